"""The encoder–decoder as a network: exact draws, what logits see, search, and a BART with fresh weights."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MarianConfig, MarianMTModel

from freenergy.apps.translation.settings import TranslationSettings
from freenergy.apps.translation.translator import Source, Translator, build
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Network
from freenergy.testing import law

EOS, V = 0, 4


def tiny(*, dropout=0.0, places=12, seed=0, scale=25.0):
    """In float64, with weights large enough for everything to show."""
    sizes = TranslationSettings(path="-", layers=2, width=8, heads=2, feedforward=12, dropout=dropout, longest=places)
    network = build(sizes, vocab_size=V, eos=EOS, rng=Rng(seed))
    network.module.double()
    with torch.no_grad():
        for weight in network.module.parameters():
            if weight.dim() > 1:
                weight.mul_(scale)
    return network.module.eval() and network


def given(*sentences):
    S = max(map(len, sentences))
    tokens = torch.tensor([[*ids, *[EOS] * (S - len(ids))] for ids in sentences])
    return Source(tokens, torch.arange(S) < torch.tensor([[len(ids)] for ids in sentences]))


def next_probs(network, source, prefix):
    """q(· | source, prefix) by one plain pass of the model without a cache."""
    read = torch.tensor([[network.start, *prefix]])
    with torch.no_grad():
        out = network.model(input_ids=torch.tensor([source]), decoder_input_ids=read, use_cache=False)
    return out.logits[0, -1].softmax(-1).tolist()


def exact_law(network, source, length, known=()):
    """The chance of every string that ends with EOS within ``length`` tokens or is cut there."""
    found, begun = {}, {(): 1.0}
    for _ in range(length):
        longer = {}
        for prefix, chance in begun.items():
            for token, p in enumerate(next_probs(network, source, [*known, *prefix])):
                (found if token == EOS else longer)[(*prefix, token)] = chance * p
        begun = longer
    return found | begun


def drawn_law(network, source, length, known=()):
    def draw(rng):
        return network.draw(given(source), torch.tensor([known], dtype=torch.int64).reshape(1, -1), length, rng)

    return law(draw, lambda drawn: tuple(drawn[0][0][drawn[1][0]].tolist()))


def distance(p, q):
    return sum(abs(p.get(x, 0.0) - q.get(x, 0.0)) for x in {*p, *q}) / 2


@pytest.mark.parametrize(("source", "known"), [([2, 1, 3, EOS], ()), ([3, EOS], (2,))])
def test_the_law_of_a_draw_is_the_product_of_the_softmax(source, known):
    network = tiny()
    exact = exact_law(network, source, 3, known)
    assert math.fsum(exact.values()) == pytest.approx(1, abs=1e-12)
    assert distance(drawn_law(network, source, 3, known), exact) < 1e-12
    # mutants: a network that does not read its source, or forgets what was known, has another law
    assert distance(exact_law(network, [1, EOS], 3, known), exact) > 0.01
    assert not known or distance(exact_law(network, source, 3), exact) > 0.01


def test_dropout_is_off_in_a_draw_and_training_goes_on():
    network = tiny(dropout=0.5)
    exact = exact_law(network, [2, 1, EOS], 2)
    network.module.train()
    assert distance(drawn_law(network, [2, 1, EOS], 2), exact) < 1e-12
    assert network.module.training
    network.decode(given([2, EOS]), 3, beams=2)
    assert network.module.training


def test_a_row_draws_the_same_in_any_batch():
    network, sentences = tiny(), ([1, 2, EOS], [3, 1, 1, 2, 3, EOS], [EOS], [2, 2, 2, 2, EOS])
    none = torch.zeros(4, 0, dtype=torch.int64)
    tokens, mask = network.draw(given(*sentences), none, 8, Rng(5))
    lengths = mask.sum(1)
    assert len(set(lengths.tolist())) > 1
    for row, sentence in enumerate(sentences):
        alone, counts = network.draw(given(sentence), none[:1], 8, Rng(5).shift(contexts=row))
        assert alone[0][counts[0]].tolist() == tokens[row][mask[row]].tolist()


def test_what_counts_ends_with_the_end():
    network = tiny()
    tokens, mask = network.draw(given(*[[1, 2, EOS]] * 200), torch.zeros(200, 0, dtype=torch.int64), 5, Rng(1))
    lengths = mask.sum(1)
    assert torch.equal(mask, torch.arange(tokens.shape[1]) < lengths.unsqueeze(1))
    is_end = tokens == EOS
    ended = is_end.any(1)
    assert 0 < ended.sum() < 200
    assert torch.equal(lengths[ended], is_end.int().argmax(1)[ended] + 1)
    assert (lengths[~ended] == 5).all()
    assert (tokens[~mask] == EOS).all()


def test_the_length_of_a_draw_depends_on_its_source():
    network = tiny(places=40)
    with torch.no_grad():
        network.model.final_logits_bias[:, EOS] = -1e9  # it never ends by itself
    sources = given([EOS], [1, 2, 3, EOS], [1] * 30)
    for length, wanted in ((50, [12, 18, 40]), (15, [12, 15, 15])):
        assert network.longest(sources, length).tolist() == wanted
        _, mask = network.draw(sources, torch.zeros(3, 0, dtype=torch.int64), length, Rng(0))
        assert mask.sum(1).tolist() == wanted


def test_logits_are_those_of_one_step_after_the_other():
    network, source = tiny(), [2, 3, 1, EOS]
    tokens, mask = network.draw(given(*[source] * 20), torch.zeros(20, 0, dtype=torch.int64), 6, Rng(2))
    with torch.no_grad():
        found = network.logits(given(*[source] * 20), tokens).softmax(-1)
    for row in range(20):
        for t in range(int(mask[row].sum())):
            wanted = next_probs(network, source, tokens[row, :t].tolist())
            assert found[row, t].tolist() == pytest.approx(wanted, abs=1e-12)


def test_padding_is_inert():
    network, target = tiny(), torch.tensor([[3, 2, 1, EOS], [1, EOS, EOS, EOS]])
    with torch.no_grad():
        both = network.logits(given([1, 2, 3, 3, EOS], [2, EOS]), target)
        alone = network.logits(given([2, EOS]), target[1:, :2])
        other = network.logits(Source(torch.tensor([[2, EOS, 3]]), torch.tensor([[True, True, False]])), target[1:, :2])
    torch.testing.assert_close(both[1:, :2], alone, atol=1e-12, rtol=0)
    torch.testing.assert_close(other, alone, atol=1e-12, rtol=0)


def test_the_gradient_of_logits_reaches_the_encoder():
    network, source, target = tiny(), given([2, 1, EOS]), torch.tensor([[3, 1, EOS]])

    def nats():
        return -network.logits(source, target).log_softmax(-1).gather(-1, target.unsqueeze(-1)).sum()

    nats().backward()
    weights = dict(network.module.named_parameters())
    for name in ("model.shared.weight", "model.encoder.layers.0.fc1.weight", "model.decoder.layers.1.fc2.weight"):
        weight, step = weights[name], 1e-6
        wanted = weight.grad[1, 2].item()
        with torch.no_grad():
            weight[1, 2] += step
            above = nats().item()
            weight[1, 2] -= 2 * step
            below = nats().item()
            weight[1, 2] += step
        assert (above - below) / (2 * step) == pytest.approx(wanted, abs=1e-6)
        assert abs(wanted) > 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_greedy_takes_the_likeliest_token(seed):
    network, sources = tiny(seed=seed), [[2, 1, 3, EOS], [3, EOS], [1, 1, EOS]]
    found, counts = network.decode(given(*sources), 4, beams=1)
    for row, source in enumerate(sources):
        string = []
        while len(string) < 4 and EOS not in string:
            probs = next_probs(network, source, string)
            string.append(probs.index(max(probs)))
        assert found[row][counts[row]].tolist() == string


def test_enough_beams_find_the_best_string():
    """Best by the mean log-probability of its tokens; a greedy search does not always find it."""
    better = 0
    for seed in range(4):
        network, sources = tiny(seed=seed, scale=12.0), [[2, 1, 3, EOS], [1, 1, EOS]]
        (wide, wide_counts), (greedy, counts) = (network.decode(given(*sources), 3, beams=beams) for beams in (60, 1))
        for row, source in enumerate(sources):
            exact = {string: math.log(p) / len(string) for string, p in exact_law(network, source, 3).items()}
            best = exact[tuple(wide[row][wide_counts[row]].tolist())]
            assert best == pytest.approx(max(exact.values()), abs=1e-9)
            better += best > exact[tuple(greedy[row][counts[row]].tolist())] + 1e-6
    assert better


def test_it_plays_its_role_and_is_made_from_the_seed():
    before = torch.random.get_rng_state()
    one, same, other = tiny(seed=3), tiny(seed=3), tiny(seed=4)
    assert torch.equal(before, torch.random.get_rng_state())
    assert isinstance(one, Network)
    assert one.vocab_size == V
    weights = [torch.cat([w.detach().flatten() for w in net.module.parameters()]) for net in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert sum(list(w.shape) == [V, 8] for w in one.module.parameters()) == 1  # both languages and the output


def test_another_encoder_decoder_does_as_well():
    config = MarianConfig(
        vocab_size=V, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=16, init_std=0.5,
        pad_token_id=1, eos_token_id=EOS, decoder_start_token_id=1, forced_eos_token_id=None, dropout=0.0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Translator(MarianMTModel(config).double().eval(), eos=EOS)
    exact = exact_law(network, [2, 3, EOS], 2)
    assert distance(drawn_law(network, [2, 3, EOS], 2), exact) < 1e-9


def test_what_cannot_be_is_refused_with_a_word():
    with pytest.raises(UserError, match="not an encoder–decoder"):
        Translator(GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)), eos=0)
    network = tiny(places=4)
    for length, known in ((0, 0), (3, 4)):
        with pytest.raises(UserError, match="do not fit a network of 4 places"):
            network.draw(given([1, EOS]), torch.ones(1, known, dtype=torch.int64), length, Rng(0))
