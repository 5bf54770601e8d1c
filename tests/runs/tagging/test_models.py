"""Models of tags against exact sums and finite differences: features, HMM, losses, an encoder."""

from itertools import product

import numpy as np
import pytest
import torch

from freenergy import Rng, Sentence
from freenergy.core.progress import SILENT
from freenergy.recipes.load import make_recipe
from freenergy.tagging.features import _Objective, attribute_matrix, fit_features
from freenergy.tagging.hmm import HiddenMarkovModel
from freenergy.tagging.losses import batch_loss
from freenergy.tagging.network import BothWays, fresh
from freenergy.tagging.reading import Vocabulary, labels_of
from freenergy.tagging.sentences import TagSet
from freenergy.tagging.settings import FeatureTagger, HiddenMarkov
from freenergy.tagging.templates import PRESETS, attributes, parse, shape_of
from tagged_world import SMALL, sentences


def tiny(count=12, seed=0):
    return [Sentence(tuple(w for w, _, _ in rows), tuple(t for *_, t in rows), tuple((c,) for _, c, _ in rows))
            for rows in sentences(count, seed)]  # fmt: skip


def test_attributes_are_crfsuite_s_for_chunking():
    one = Sentence(("The", "sea"), ("B-NP", "I-NP"), (("DT",), ("NN",)))
    first, second = attributes(one, parse(["chunking"]))
    assert {"w[0]=The", "w[1]=sea", "w[0]|w[1]=The|sea", "c0[0]|c0[1]=DT|NN"} <= set(first)
    assert {"w[-1]=The", "w[-1]|w[0]=The|sea", "c0[-1]|c0[0]=DT|NN"} <= set(second)
    assert not any("w[2]" in each or "w[-2]" in each for each in (*first, *second))
    assert len(PRESETS["chunking"]) == 19
    assert shape_of("iPhone-5") == "xXxx-9"


@pytest.mark.parametrize("partial", [False, True])
def test_the_gradient_of_the_features_is_that_of_the_likelihood(partial):
    world = tiny(5)
    tags = TagSet.of(world)
    if partial:
        world = [one.tagged(["_" if i == 1 else tag for i, tag in enumerate(one.tags)]) for one in world]
    templates = parse(["w[0]", "c0[-1]|c0[0]"])
    numbers = {
        name: i for i, name in enumerate(sorted({a for s in world for own in attributes(s, templates) for a in own}))
    }
    loss = _Objective(attribute_matrix(world, templates, numbers), world, tags, None, partial)
    w = Rng(3).normal(loss.size).numpy() * 0.5
    _, gradient = loss(w)
    for i in range(0, loss.size, max(1, loss.size // 12)):
        step = np.zeros(loss.size)
        step[i] = 1e-2
        slope = (loss(w + step)[0] - loss(w - step)[0]) / 2e-2
        assert gradient[i] == pytest.approx(slope, abs=5e-3)  # the chain is computed in float32


def test_penalties_shrink_and_l1_gives_zeros():
    world = tiny(30)
    tags = TagSet.of(world)
    free, few = (
        fit_features(
            FeatureTagger(templates=("w[0]", "c0[0]"), l1=l1, l2=0.1, iterations=40), world, tags, None, SILENT
        )[1]
        for l1 in (0.0, 2.0)
    )
    assert free["not_zero"] == free["weights"]
    assert 0 < few["not_zero"] < few["weights"] / 2


def test_an_hmm_s_posterior_is_bayes_and_its_log_z_is_the_probability_of_the_words():
    world = tiny(20)
    tags = TagSet.of(world)
    model = HiddenMarkovModel.count(HiddenMarkov(), world, tags, None, partial=False)
    w, x = model.weights, Sentence(("Noam", "sees", "Oslo"))
    chain = model.law([x]).chain
    e = chain._given.emissions[0]
    joint = {}
    for y in product(range(len(tags)), repeat=3):
        own = w["start"][y[0]] + sum(e[t, y[t]] for t in range(3)) + w["end"][y[2]]
        joint[y] = (own + w["transitions"][y[0], y[1]] + w["transitions"][y[1], y[2]]).item()
    log_x = torch.tensor(list(joint.values()), dtype=torch.float64).logsumexp(0).item()
    assert chain.log_partition().item() == pytest.approx(log_x, abs=1e-10)
    y = next(iter(joint))
    assert model.law([x]).log_prob(torch.tensor([y])).item() == pytest.approx(joint[y] - log_x, abs=1e-10)
    assert w["emit"].exp().sum(0) == pytest.approx(np.ones(len(tags)), abs=1e-12)
    ends = w["transitions"].exp().sum(1) + w["end"].exp()
    assert ends == pytest.approx(np.ones(len(tags)), abs=1e-12)


@pytest.mark.parametrize("loss", ["ranking", "conditional"])
def test_conditional_nce_pushes_true_tags_up(loss):
    """A step against the gradient raises the log-odds of true tags against the noise; a step along it does not."""
    table = {"family": "tagging", "name": "a", "data": {"train": "x"}}
    settings = make_recipe(
        table | {"tagger": SMALL | {"law": "transducer", "dropout": 0.0, "loss": {"kind": "nce", "objective": loss}}}
    ).tagger
    world = tiny(8)
    tags = TagSet.of(world)
    vocabulary = Vocabulary.of(world, min_count=1, buckets=100)
    network = fresh(settings, vocabulary, len(tags), None, None, Rng(0)).eval()
    words, labels = vocabulary.read(world), labels_of(world, tags)
    before = batch_loss(network, words, labels, tags.names, Rng(1))
    before.value.backward()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.grad is not None:
                weight -= 0.05 * weight.grad
    after = batch_loss(network, words, labels, tags.names, Rng(1))
    assert after.value.item() < before.value.item()
    assert set(after.metrics) == {"accuracy", "noise_nats"}


def test_a_sentence_has_the_states_that_it_has_alone():
    """Padding is inert in both directions, and BothWays is torch's own BiLSTM on packed sentences."""
    torch.manual_seed(0)
    both, x, lengths = BothWays(5, 4), torch.randn(3, 6, 5), torch.tensor([6, 2, 4])
    found = both(x, lengths)
    whole = torch.nn.LSTM(5, 4, batch_first=True, bidirectional=True)
    names = [name for name, _ in both.ahead.named_parameters()]
    own = {name: getattr(both.ahead, name) for name in names} | {f"{n}_reverse": getattr(both.back, n) for n in names}
    whole.load_state_dict(own)
    for row, length in enumerate(lengths.tolist()):
        alone = both(x[row : row + 1, :length], lengths[row : row + 1])
        assert torch.allclose(found[row, :length], alone[0], atol=1e-6)
        assert torch.allclose(alone, whole(x[row : row + 1, :length])[0], atol=1e-6)


def test_an_encoder_s_words_are_means_of_their_pieces(tmp_path):
    """A BERT with random weights: states of words, long sentences in parts, a frozen one remembers."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from freenergy.tagging.encoder import WordEncoder

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "new", "##er", "york", "is", "big"]
    inner = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=9, max_position_embeddings=24, **sizes)).save_pretrained(tmp_path)
    encoder = WordEncoder(tmp_path, frozen=True)
    one, other = Sentence(("Newer", "York")), Sentence(("Big", "is", "York"))
    found = encoder.states([one, other])
    assert found.shape == (5, 8)
    with torch.no_grad():
        h = encoder.network(input_ids=torch.tensor([[2, 4, 5, 6, 3]])).last_hidden_state[0]
    assert torch.allclose(found[0], h[1:3].mean(0), atol=1e-5)
    assert torch.allclose(found[1], h[3], atol=1e-5)
    assert encoder.states([other]).equal(found[2:])
    long = Sentence(("Newer",) * 30)  # 60 pieces, 24 places
    assert encoder.states([long]).shape == (30, 8)
    assert not any(weight.requires_grad for weight in encoder.parameters())
