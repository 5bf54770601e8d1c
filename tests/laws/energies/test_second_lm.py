"""A second language model against the base: its law at α = 1, the fit, other tokens, and what is refused."""

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from freenergy import Continuations, HuggingFaceLM, RemoteLM, Rng, SecondLM, TabularLM, UserError, load_energy
from freenergy.corpus import Tokenizer
from freenergy.corpus.tokenizer import byte_alphabet
from freenergy.energies.second_lm import Second, SecondLMEnergy, second_model
from freenergy.models.residual import Residual
from freenergy.objectives import RankingNCE
from freenergy.testing import World
from freenergy.testing.networks import tiny_network
from freenergy.training.convex import fit_convex
from freenergy.training.feature_cache import Pieces


def bytes_tokenizer(first, *merges):
    """Token b + first is byte b, then come the merges; token 0 ends a document."""
    vocabulary = {"<eos>": 0} | {char: byte[0] + first for char, byte in byte_alphabet().items()}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary) + first - 1
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges)))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    return Tokenizer(inner, eos=0)


def tabular(lm, base):
    return SecondLM(SecondLMEnergy(path="q"), base, Second(lm, None, "q"))


@pytest.fixture
def world():
    return World(tokens=3, length=2)


def test_at_weight_one_the_residual_model_is_the_second_model(world):
    Q = TabularLM.random(Rng(9), vocab_size=3, order=1)
    energy = tabular(Q, world.base)
    assert torch.equal(energy(world.x), torch.zeros(world.x.shape, dtype=torch.float64))
    with torch.no_grad():
        energy.weight.fill_(1.0)
    log_score = Residual(world.base, energy).log_score(world.x)
    torch.testing.assert_close(log_score, Q.log_prob(world.x), atol=1e-12, rtol=0)
    assert log_score.logsumexp(-1).abs().max() < 1e-12, "log Z = 0"


def test_between_zero_and_one_it_is_a_geometric_mean(world):
    Q = TabularLM.random(Rng(9), vocab_size=3, order=1)
    energy = tabular(Q, world.base)
    with torch.no_grad():
        energy.weight.fill_(0.3)
    wanted = 0.7 * world.base.log_prob(world.x) + 0.3 * Q.log_prob(world.x)
    torch.testing.assert_close(Residual(world.base, energy).log_score(world.x), wanted, atol=1e-12, rtol=0)


def test_the_fit_finds_the_second_model_when_it_wrote_the_text():
    """Data ~ Q, negatives ~ P_LM: ranking NCE has its optimum at α = 1 (0.96 to 1.07 by ten seeds)."""
    P, Q = (TabularLM.random(Rng(i), vocab_size=3, order=1, spread=0.7) for i in (2, 9))
    world = World(tokens=3, length=2)
    energy, law = tabular(Q, P), Q.log_prob(world.x)[0]
    base = P.log_prob(world.x)[0]
    every = energy.features(world.x)[0]
    data = every[Rng(5).categorical(law.expand(5_000, -1))].unsqueeze(1)
    draws = every[Rng(6).categorical(base.expand(10_000, -1))].view(5_000, 2, 1)
    joined = torch.cat([data, draws], dim=1)
    fit_convex([energy], [Pieces(joined.shape, lambda: iter([joined]))], RankingNCE(), l2=0.0)
    alpha = (energy.weight / energy.scale).item()
    assert alpha == pytest.approx(1.0, abs=0.15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A second model with its own tokens: one token for "the", and other numbers."""
    place = tmp_path_factory.mktemp("second")
    tokenizer = bytes_tokenizer(3, ("t", "h"), ("th", "e"))
    tiny_network("GPT2", vocab_size=tokenizer.vocab_size).save_pretrained(place)
    tokenizer.save(place)
    return place


def test_other_tokens_cross_as_text(folder):
    """log Q is that of the tokens which Q itself gives the text, after EOS and the prefix; EOS crosses as EOS."""
    tokenizer, own = bytes_tokenizer(1), Tokenizer.from_pretrained(folder)
    base = tiny_network(vocab_size=tokenizer.vocab_size)
    energy = SecondLM(SecondLMEnergy(path=str(folder)), base, second_model(SecondLMEnergy(path=str(folder)), tokenizer))
    texts = [" the cat", " there", ""]
    rows = [tokenizer.encode(text) for text in texts]
    rows[2] = [tokenizer.eos]
    found = energy.log_second(Continuations.from_lists([tokenizer.encode("of the")], [rows]))[0]
    model = energy.second.lm.model
    for text, log_q in zip(texts, found.tolist(), strict=True):
        before, x = [own.eos, *own.encode("of the")], own.encode(text) or [own.eos]
        log_probs = model(torch.tensor([before + x])).logits[0].double().log_softmax(-1)
        wanted = sum(log_probs[len(before) - 1 + t, token].item() for t, token in enumerate(x))
        assert log_q == pytest.approx(wanted, abs=1e-4)
    assert len(own.encode(" the cat")) < len(rows[0])


def test_the_same_text_has_the_same_second_probability_however_it_was_cut(folder):
    tokenizer = bytes_tokenizer(1, ("a", "t"))
    second = second_model(SecondLMEnergy(path=str(folder)), tokenizer)
    energy = SecondLM(SecondLMEnergy(path=str(folder)), tiny_network(vocab_size=tokenizer.vocab_size), second)
    whole, letters = tokenizer.encode("at"), [ord("a") + 1, ord("t") + 1]
    assert whole != letters
    found = energy.log_second(Continuations.from_lists([tokenizer.encode("a ")], [[whole, letters]]))
    assert found[0, 0] == found[0, 1]


def test_a_folder_without_a_tokenizer_has_the_tokens_of_the_corpus(tmp_path):
    tokenizer = bytes_tokenizer(1)
    tiny_network(vocab_size=tokenizer.vocab_size).save_pretrained(tmp_path / "q")
    second = second_model(SecondLMEnergy(path=str(tmp_path / "q")), tokenizer)
    assert second.crossing is None
    assert isinstance(second.lm, HuggingFaceLM)
    tiny_network(vocab_size=10).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match="knows only 10"):
        second_model(SecondLMEnergy(path=str(tmp_path / "small")), tokenizer)


def test_a_server_is_a_second_model_too(folder):
    tokenizer = bytes_tokenizer(1)
    second = second_model(SecondLMEnergy(url="http://127.0.0.1:1/v1", model="q", path=str(folder)), tokenizer)
    assert isinstance(second.lm, RemoteLM)
    assert second.lm.vocab_size == Tokenizer.from_pretrained(folder).vocab_size
    assert second.crossing is not None
    same = second_model(SecondLMEnergy(url="http://127.0.0.1:1/v1"), tokenizer)
    assert same.crossing is None
    assert same.fingerprint != second.fingerprint


def test_what_is_refused(folder, tmp_path, world):
    with pytest.raises(UserError, match="a second language model is missing"):
        SecondLMEnergy()
    never = torch.zeros(1, 3)
    never[0, 2] = -torch.inf
    with pytest.raises(UserError, match="gives some text the probability 0"):
        tabular(TabularLM(never, eos=0), world.base)(world.x)
    tokenizer = bytes_tokenizer(1)
    base, place = tiny_network(vocab_size=tokenizer.vocab_size), tmp_path / "q"
    tiny_network(vocab_size=tokenizer.vocab_size).save_pretrained(place)
    settings = SecondLMEnergy(path=str(place))
    SecondLM(settings, base, second_model(settings, tokenizer)).save_pretrained(tmp_path / "energy")
    tiny_network(vocab_size=tokenizer.vocab_size, spread=0.3).save_pretrained(place)
    with pytest.raises(UserError, match="is not the second language model that the energy"):
        load_energy(tmp_path / "energy", base=base, tokenizer=tokenizer)
