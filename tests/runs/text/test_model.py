"""The residual model against enumeration, ranking texts with it, and the pair on disk."""

import builtins
import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import torch

from freenergy import (
    Continuations,
    NgramFeatures,
    NgramLM,
    ResidualModel,
    Rng,
    Sequences,
    SequenceSpace,
    TabularLM,
    Tokenizer,
    UserError,
    exact_log_partition,
)
from freenergy.core.roles import Target
from freenergy.corpus.tokenize_pair import Joined, JoinedText
from freenergy.energies.ngram_features import NgramEnergy
from freenergy.energies.ngram_tables import NgramTables
from freenergy.samplers import Metropolis, Resampling
from freenergy.text.ranking import Ranking
from freenergy.text.write import Writing, stream

SPACE = SequenceSpace(vocab_size=3, length=3, eos=0)


@pytest.fixture
def tokenizer():
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(4)}, unk_token="w0")
    return Tokenizer(tokenizers.Tokenizer(words), eos=0)


def everything(contexts):
    strings, B = SPACE.enumerate(), len(contexts)
    tokens, lengths = strings.tokens.expand(B, -1, -1), strings.lengths.expand(B, -1)
    return Continuations(Sequences.from_lists(contexts), tokens, lengths)


def energy(x):
    return (x.tokens == 1).double().sum(-1) - 0.5 * x.lengths


def test_log_score_is_the_joint_up_to_log_z():
    """P = softmax of log_score over the whole space; E + 1000 moves log Z by −1000 and no probability."""
    lm = TabularLM.random(Rng(1), vocab_size=3, order=1)
    x = everything([[1, 2], [2]])
    log_score = ResidualModel(lm, energy).log_score(x)
    p = lm.log_prob(x).exp() * (-energy(x)).exp()
    torch.testing.assert_close(log_score.softmax(-1), p / p.sum(-1, keepdim=True), atol=1e-12, rtol=0)
    moved = ResidualModel(lm, lambda x: energy(x) + 1000).log_score(x)
    torch.testing.assert_close(moved.logsumexp(-1), log_score.logsumexp(-1) - 1000, atol=1e-9, rtol=0)
    torch.testing.assert_close(moved.softmax(-1), log_score.softmax(-1), atol=1e-10, rtol=0)


def test_an_energy_of_zero_leaves_the_base():
    lm = TabularLM.random(Rng(1), vocab_size=3, order=1)
    x = everything([[1]])
    assert torch.equal(ResidualModel(lm, lambda x: torch.zeros(x.shape)).log_score(x), lm.log_prob(x))


def test_the_pair_on_disk(tmp_path, tokenizer):
    stream = np.array([1, 2, 3, 0, 1, 2, 0, 3, 3, 1, 0] * 4)
    lm = NgramLM.fit(stream, vocab_size=4, eos=0, order=2, tokenizer=tokenizer.fingerprint)
    features = NgramFeatures(NgramEnergy(order=2), NgramTables.fit(stream, vocab_size=4, eos=0, order=2))
    with torch.no_grad():
        features.weight.normal_(generator=torch.Generator().manual_seed(0))
    joint = ResidualModel(lm, features, tokenizer)
    joint.save_pretrained(tmp_path / "pair", facts={"gain": {"percent": 12.345678}})
    again = ResidualModel.from_pretrained(tmp_path / "pair")
    x = Continuations.from_lists([[1, 2]], [[[3, 0], [2, 2, 1]]])
    assert torch.equal(again.log_score(x), joint.log_score(x))
    card = (tmp_path / "pair" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: freenergy")
    assert "percent: 12.35" in card


def test_what_cannot_be_saved_or_loaded_is_one_sentence(tmp_path, tokenizer):
    lm = TabularLM.random(Rng(1), vocab_size=4, order=1)
    with pytest.raises(UserError, match="has no tokenizer"):
        ResidualModel(lm, energy).save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match="the energy function has no save_pretrained"):
        ResidualModel(lm, energy, tokenizer).save_pretrained(tmp_path / "a")
    features = NgramFeatures(
        NgramEnergy(order=1), NgramTables.fit(np.array([1, 0, 2, 0, 3, 3, 0]), vocab_size=4, eos=0, order=1)
    )
    with pytest.raises(UserError, match="a base of class TabularLM cannot be saved"):
        ResidualModel(lm, features, tokenizer).save_pretrained(tmp_path / "a")
    with pytest.raises(UserError, match="there is no residual model in"):
        ResidualModel.from_pretrained(tmp_path / "nowhere")
    assert not (tmp_path / "a").exists()


@pytest.fixture
def words():
    """w1 and w2 between spaces; anything else is w3."""
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(4)}, unk_token="w3")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner, eos=0)


@pytest.fixture
def joint(words):
    return ResidualModel(TabularLM.random(Rng(1), vocab_size=4, order=2), energy, words)


def spelt(tokens):
    return "".join(f" w{i}" for i in tokens)


@pytest.mark.parametrize("prefix", [[1, 2], [2], []])
def test_the_shares_of_the_whole_space_are_the_joint_law(words, prefix):
    """P(x | c) = exp(log_score − log Z), Z by enumeration; the base never ends, so that every string can be spelt."""
    logits = Rng(1).normal(16, 4).index_fill(1, torch.tensor([0]), -torch.inf)
    joint, space = ResidualModel(TabularLM(logits, eos=0), energy, words), SequenceSpace(vocab_size=4, length=2)
    strings = [x for x in space.enumerate().lists() if 0 not in x]
    found = joint.score(spelt(prefix).strip(), [spelt(x) for x in strings])
    x = Continuations.from_lists([prefix], [strings])
    log_z = exact_log_partition(Target(joint.residual, x.contexts, space))
    p = (joint.base.log_prob(x)[0] - energy(x)[0] - log_z).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    assert [one.share for one in found.candidates] == pytest.approx(p.tolist(), abs=1e-12)
    assert [one.log_base for one in found.candidates] == joint.base.log_prob(x)[0].tolist()
    assert [one.energy for one in found.candidates] == energy(x)[0].tolist()
    assert [found[i].rank for i in p.argsort(descending=True).tolist()] == list(range(1, 10))
    assert found.best.text == spelt(strings[int(p.argmax())])


def test_shares_of_texts_that_end(joint):
    """All texts that end within three tokens: EOS after none is no candidate, so the law is given at least one word."""
    strings = [[a, *b, 0] for a in (1, 2, 3) for b in ([], [1], [2], [3])]
    found = joint.score("w1", [spelt(x[:-1]) for x in strings], ends=True)
    x = Continuations.from_lists([[1]], [strings])
    p = (joint.base.log_prob(x) - energy(x)).softmax(-1)[0]
    assert [one.share for one in found.candidates] == pytest.approx(p.tolist(), abs=1e-12)
    assert [one.tokens for one in found.candidates] == [len(x) for x in strings]


def test_equal_candidates_have_equal_scores_and_the_earlier_is_better(joint):
    """Also where an energy's own rounding depends on the row."""
    joint.residual = replace(joint.residual, energy=lambda x: torch.arange(x.tokens.shape[1]).expand(x.shape).double())
    found = joint.score("w1", [" w2", " w1", " w2", " w2"])
    assert found[0].log_score == found[2].log_score == found[3].log_score
    ranks = [one.rank for one in found.candidates]
    assert ranks[0] < ranks[2] < ranks[3]
    assert sum(one.share for one in found.candidates) == pytest.approx(1, abs=1e-12)


def test_what_is_scored_otherwise_than_it_reads_is_told(joint):
    found = joint.score("w1", [" w2", " w2 zebra"])
    assert [one.reads_as for one in found.candidates] == [None, " w2 w3"]
    assert "(its tokens read ' w2 w3')" in str(found)


def test_a_ranking_as_table_json_and_frame(joint):
    found = joint.score("w1", [" w2", " w1 w1", " w1"])
    head, first, *rest = str(found).splitlines()
    assert head.split() == ["rank", "share", "log_score", "log_base", "energy", "tokens", "text"]
    assert first.endswith(repr(found.best.text))
    assert first.split()[0] == "1"
    assert len(rest) == 2
    as_json = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert as_json["best"] == found.best.text
    assert [row["text"] for row in as_json["candidates"]] == [" w2", " w1 w1", " w1"]
    frame = pytest.importorskip("pandas") and found.to_frame()
    assert frame.log_score.tolist() == [one.log_score for one in found.candidates]
    assert frame["rank"].tolist() == [one.rank for one in found.candidates]


def test_without_pandas_there_is_no_frame(joint, monkeypatch):
    found, real = joint.score("w1", [" w2"]), builtins.__import__

    def missing(name, *rest, **named):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match="a data frame needs pandas"):
        found.to_frame()


def test_forbidden_candidates(joint):
    """An energy of +inf is probability zero; where all have it, there is nothing to divide by."""
    joint.residual = replace(joint.residual, energy=lambda x: torch.where(x.tokens[..., 0] == 2, torch.inf, 0.0))
    found = joint.score("w1", [" w2", " w1"])
    assert [one.share for one in found.candidates] == [0, 1]
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["candidates"][0]["log_score"] is None
    with pytest.raises(UserError, match=r"^no candidate is acceptable, 2 of 2 have probability zero"):
        joint.score("w1", [" w2", " w2 w1"])


def test_what_cannot_be_ranked_is_one_sentence(joint):
    with pytest.raises(UserError, match="this residual model has no tokenizer"):
        ResidualModel(joint.base, energy).score("w1", [" w2"])
    for nothing in ([], " w2"):
        with pytest.raises(UserError, match="there is no list of candidates to rank"):
            joint.score("w1", nothing)
    with pytest.raises(UserError, match="candidate 2 is empty"):
        joint.score("w1", [" w2", ""])
    with pytest.raises(UserError, match="has no score: the base gave nan"):
        Ranking.of("", ["a"], Joined([], (JoinedText([1]),)), torch.tensor([torch.nan]), torch.zeros(1))
    joint.residual = replace(joint.residual, energy=lambda x: torch.full(x.shape, torch.nan))
    with pytest.raises(UserError, match="returned nan"):
        joint.score("w1", [" w2"])


def test_any_sampler_from_python(joint):
    """A setting of another sampler is refused, and so is a list of prefixes."""
    found = joint.sample("w1", sampler=Metropolis(steps=4), n=2, length=3, seed=1)
    writing = Writing(sampler=Metropolis(steps=4), num=2)
    assert found.texts == joint.write("w1", joint.space_of(3), stream(1), writing).texts
    default = joint.sample("w1", length=3, seed=1)
    assert default.texts == joint.sample("w1", sampler=Resampling(), length=3, seed=1).texts
    with pytest.raises(UserError, match="candidates and law would be ignored"):
        joint.sample("w1", sampler=Metropolis(), candidates=9, law="model", length=3)
    with pytest.raises(UserError, match="the prefix is a list: give one text per call"):
        next(ResidualModel.generation.__wrapped__(joint, ["w1", "w2"], joint.space_of(3), Rng(0), Writing()))
    with pytest.raises(UserError, match="take resampling and 2 chunks or more"):
        joint.sample("w1", look_ahead=2, length=3)
