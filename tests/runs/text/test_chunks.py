"""Long text: the law of chunks with and without look-ahead, by walking every branch; where texts end; going on."""

import itertools
import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from freenergy import Continuations, Rng, Sequences, SequenceSpace, TabularLM, UserError
from freenergy.core.roles import Target
from freenergy.core.truncation import Truncation
from freenergy.energies.trunk import Trunk
from freenergy.lm.stepping import started
from freenergy.models.residual import Residual
from freenergy.samplers.autoregressive import Autoregressive
from freenergy.samplers.resampling import Resampling
from freenergy.testing.enumerating import branches, law
from freenergy.text.chunks import Chunk, reach, write

V = 3
BASE = TabularLM.random(Rng(1), vocab_size=V, order=1)
CONTEXT = Sequences.from_lists([[1, 2]])


class Pairs:
    """E = Σ of one number a pair of neighbours, the context's last token included: what stands before matters."""

    def __init__(self, spread=1.5, shift=0.0):
        self.values, self.shift = spread * Rng(3).normal(V, V), shift

    def __call__(self, x: Continuations) -> torch.Tensor:
        contexts = started(x.contexts, 0)
        last = contexts.tokens.gather(1, contexts.lengths.unsqueeze(1) - 1)
        before = torch.cat([last.unsqueeze(1).expand(-1, x.shape[1], 1), x.tokens[:, :, :-1]], dim=2)
        return (self.values[before, x.tokens] * x.mask).sum(2) + self.shift


ENERGY = Pairs()


class World:
    """Plain sums: strings of a space with their q and w, and the laws of one and of two chunks."""

    def __init__(self, space, truncation=Truncation(), law="restricted", energy=ENERGY, eos=None):  # noqa: B008
        self.space, self.truncation, self.law, self.energy = space, truncation, law, energy
        self.stops = {eos, space.eos} - {None}

    def strings(self, context):
        """x: (q, w)."""
        found = {}
        for x in map(tuple, self.space.enumerate().lists()):
            q, p = 1.0, 1.0
            for t, token in enumerate(x):
                log_p = BASE.next_log_probs(Sequences.from_lists([[*context, *x[:t]]]))
                q *= self.truncation(log_p)[0, token].exp().item()
                p *= log_p[0, token].exp().item()
            E = self.energy(Continuations.from_lists([context], [[x]])).item()
            if q > 0:
                found[x] = (q, math.exp(-E) * (p / q if self.law == "model" else 1.0))
        return found

    def z(self, context):
        return sum(q * w for q, w in self.strings(context).values())

    def resampled(self, context, n):
        """The law of resampling among n candidates: a sum over all n-tuples."""
        found = {}
        for drawn in itertools.product(self.strings(context).items(), repeat=n):
            chance, total = math.prod(q for _, (q, _) in drawn), sum(w for _, (_, w) in drawn)
            for x, (_, w) in drawn:
                found[x] = found.get(x, 0.0) + chance * w / total
        return found

    def is_ended(self, x):
        return bool(self.stops & set(x))

    def looking_ahead(self, context, n, m):
        """The same with w · mean w(y) over m roll-outs of each candidate; 1 where nothing follows."""
        options = []
        for x, (q, w) in self.strings(context).items():
            if self.is_ended(x):
                options.append((x, q, w))
                continue
            for ys in itertools.product(self.strings([*context, *x]).values(), repeat=m):
                options.append((x, q * math.prod(p for p, _ in ys), w * sum(v for _, v in ys) / m))
        found = {}
        for drawn in itertools.product(options, repeat=n):
            chance, total = math.prod(p for _, p, _ in drawn), sum(w for _, _, w in drawn)
            for x, _, w in drawn:
                found[x] = found.get(x, 0.0) + chance * w / total
        return found

    def chain(self, context):
        """P(x): one chunk by itself."""
        return normalised({x: q * w for x, (q, w) in self.strings(context).items()})

    def product(self, context):
        """Σ_y of the product of two chunks."""
        ahead = {x: 1.0 if self.is_ended(x) else self.z([*context, *x]) for x in self.strings(context)}
        return normalised({x: q * w * ahead[x] for x, (q, w) in self.strings(context).items()})

    def texts(self, context, first, second):
        """The law of two chunks from that of the first and of the second after it."""
        found = {}
        for x, chance in first(context).items():
            if self.is_ended(x):
                found[x] = chance
            else:
                for y, then in second([*context, *x]).items():
                    found[(*x, *y)] = chance * then
        return found


def normalised(values):
    return {x: value / sum(values.values()) for x, value in values.items()}


def distance(p, q):
    return sum(abs(p.get(x, 0.0) - q.get(x, 0.0)) for x in {*p, *q}) / 2


def text_of(chunks):
    return tuple(token for chunk in chunks for token in chunk.tokens)


def text_law(space, *, chunks=2, eos=None, look_ahead=0, energy=ENERGY, **how):
    """The law of whole texts, over every branch."""
    sampler = Resampling(**how)

    def run(rng):
        call = {"chunks": chunks, "sampler": sampler, "eos": eos, "look_ahead": look_ahead}
        return list(write(Target(Residual(BASE, energy), CONTEXT, space), rng, **call))

    return law(run, text_of)


def first_law(space, look_ahead, *, eos=None, **how):
    """The law of the first of two chunks, over every branch of it."""

    def run(rng):
        call = {"chunks": 2, "sampler": Resampling(**how), "eos": eos, "look_ahead": look_ahead}
        return next(write(Target(Residual(BASE, ENERGY), CONTEXT, space), rng, **call))

    return law(run, lambda chunk: chunk.sampled.x.lists()[0][0][0] if space.length == 1 else tuple(chunk.tokens))


@pytest.mark.parametrize("eos", [0, None], ids=["ended", "fixed"])
def test_without_look_ahead_a_text_is_a_chain(eos):
    space, how = SequenceSpace(vocab_size=V, length=1, eos=eos), {"truncation": Truncation(top_k=2)}
    found, world = text_law(space, candidates=2, **how), World(space, **how)
    wanted = world.texts(CONTEXT.lists()[0], lambda c: world.resampled(c, 2), lambda c: world.resampled(c, 2))
    assert found == pytest.approx(wanted, abs=1e-12)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    if eos is not None:
        return  # the context ends in a 2, and so does all that goes on: the mutant would be the same
    # mutant: the second chunk given the context alone
    mutant = world.texts(
        CONTEXT.lists()[0], lambda c: world.resampled(c, 2), lambda c: world.resampled(CONTEXT.lists()[0], 2)
    )
    assert distance(found, mutant) > 0.01


def test_a_text_is_cut_after_eos_in_a_space_that_does_not_end():
    """Chunks of two tokens over a fixed space; 0 ends the text wherever it stands in a chunk."""
    space, context = SequenceSpace(vocab_size=V, length=2), CONTEXT.lists()[0]
    found = text_law(space, candidates=1, eos=0)
    world, wanted = World(space, eos=0), {}
    for text, chance in world.texts(context, lambda c: world.resampled(c, 1), lambda c: world.resampled(c, 1)).items():
        cut = text[: text.index(0) + 1] if 0 in text else text
        wanted[cut] = wanted.get(cut, 0.0) + chance
    assert found == pytest.approx(wanted, abs=1e-12)
    assert {len(text) for text in found} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("eos", "how"),
    [
        (None, {}),
        (0, {}),
        (None, {"truncation": Truncation(top_k=2)}),
        (None, {"truncation": Truncation(top_k=2, temperature=0.7), "law": "model"}),
    ],
    ids=["fixed", "ended", "top-k", "top-k, model"],
)
def test_look_ahead_weighs_candidates_by_what_follows(eos, how):
    space, context = SequenceSpace(vocab_size=V, length=1, eos=eos), CONTEXT.lists()[0]
    found = first_law(space, 1, candidates=2, **how)
    world = World(space, **how)
    wanted = {x[0]: chance for x, chance in world.looking_ahead(context, 2, 1).items()}
    assert found == pytest.approx(wanted, abs=1e-12)
    # mutant: no look-ahead
    assert distance(found, {x[0]: chance for x, chance in world.resampled(context, 2).items()}) > 1e-3


def test_more_roll_outs_are_averaged():
    space, context = SequenceSpace(vocab_size=V, length=1), CONTEXT.lists()[0]
    found = first_law(space, 2, candidates=2, truncation=Truncation(top_k=2))
    world = World(space, Truncation(top_k=2))
    assert found == pytest.approx({x[0]: p for x, p in world.looking_ahead(context, 2, 2).items()}, abs=1e-12)
    assert distance(found, {x[0]: p for x, p in world.looking_ahead(context, 2, 1).items()}) > 1e-3


def test_the_law_of_two_chunks_with_look_ahead():
    """The second is the last: it has nothing ahead."""
    how = {"truncation": Truncation(top_k=2)}
    space, context = SequenceSpace(vocab_size=V, length=1), CONTEXT.lists()[0]
    found, world = text_law(space, candidates=2, look_ahead=1, **how), World(space, **how)
    wanted = world.texts(context, lambda c: world.looking_ahead(c, 2, 1), lambda c: world.resampled(c, 2))
    assert found == pytest.approx(wanted, abs=1e-12)


def test_weights_ahead_are_unbiased():
    """E[Ẑ(c x_i) | x_i] = Z(c x_i), of chunks of two tokens; and the weights that are chosen by are w · Ẑ."""
    space, context = SequenceSpace(vocab_size=V, length=2, eos=0), CONTEXT.lists()[0]
    world, how = World(space, Truncation(top_k=2)), {"truncation": Truncation(top_k=2)}

    def run(rng):
        call = {"chunks": 2, "sampler": Resampling(candidates=1, **how), "eos": 0, "look_ahead": 2}
        return next(write(Target(Residual(BASE, ENERGY), CONTEXT, space), rng, **call))

    mean, chance_of = {}, {}
    for chance, chunk in branches(run):
        x = tuple(chunk.sampled.candidates.x.lists()[0][0])
        mean[x] = mean.get(x, 0.0) + chance * chunk.log_ahead.exp().item()
        chance_of[x] = chance_of.get(x, 0.0) + chance
        own = ENERGY(chunk.sampled.x).item()
        assert chunk.sampled.energy.item() == pytest.approx(own, abs=1e-12)
        assert chunk.sampled.candidates.log_weight.item() == pytest.approx(chunk.log_ahead.item() - own, abs=1e-12)
    strings = world.strings(context)
    assert set(mean) == set(strings)
    for x, (q, _) in strings.items():
        assert chance_of[x] == pytest.approx(q, abs=1e-12)
        z = 1.0 if world.is_ended(x) else world.z([*context, *x])
        assert mean[x] / q == pytest.approx(z, abs=1e-12)
    assert any(world.is_ended(x) for x in strings)


def test_with_candidates_the_law_comes_to_the_product_of_two_chunks():
    """At one roll-out already: weights are unbiased. Without look-ahead it comes to the chain, which is another law."""
    world, context = World(SequenceSpace(vocab_size=V, length=1), Truncation(top_k=2)), CONTEXT.lists()[0]
    product, chain = world.product(context), world.chain(context)
    assert distance(product, chain) > 0.05
    gaps = [distance(world.looking_ahead(context, n, 1), product) for n in (2, 4, 6)]
    assert gaps[0] > 1.5 * gaps[1] > 1.8 * gaps[2]
    assert distance(world.looking_ahead(context, 6, 1), chain) > 0.02
    # two chunks from the product's marginal and the chain's second are the product, normalised once
    texts = world.texts(context, world.product, world.chain)
    score = {}
    for x, (q, w) in world.strings(context).items():
        for y, (q_next, w_next) in world.strings([*context, *x]).items():
            score[(*x, *y)] = q * w * q_next * w_next
    assert texts == pytest.approx(normalised(score), abs=1e-12)


def test_a_constant_in_the_energy_moves_only_the_end_of_texts_that_look_ahead():
    fixed, ended = (SequenceSpace(vocab_size=V, length=1, eos=eos) for eos in (None, 0))
    shifted, context = Pairs(shift=3.0), CONTEXT.lists()[0]
    for how in ("chain", "product"):
        here, there = (getattr(World(fixed, energy=E), how)(context) for E in (ENERGY, shifted))
        assert here == pytest.approx(there, abs=1e-12)
    here, there = (World(ended, energy=E).product(context) for E in (ENERGY, shifted))
    assert there[(0,)] > here[(0,)] + 0.1


@pytest.fixture
def calls(monkeypatch):
    """How the base was asked for draws: contexts, candidates."""
    found, sample = [], BASE.sample

    def counted(contexts, num, *rest):
        found.append((len(contexts), num))
        return sample(contexts, num, *rest)

    monkeypatch.setattr(BASE, "sample", counted)
    return found


def chunks_of(length=2, *, eos=None, num=None, context=CONTEXT, seed=5, energy=ENERGY, **how):
    space = SequenceSpace(vocab_size=V, length=length)
    call = {"chunks": 4, "sampler": Resampling(candidates=8), "eos": eos, **how}
    return list(itertools.islice(write(Target(Residual(BASE, energy), context, space), Rng(seed), **call), num))


def test_each_chunk_is_given_when_it_is_there(calls):
    assert len(chunks_of(num=1)) == 1
    assert calls == [(1, 8)]
    assert [chunk.index for chunk in chunks_of()] == [0, 1, 2, 3]
    assert len(calls) == 5


def test_roll_outs_of_all_candidates_are_drawn_together(calls):
    chunk = chunks_of(num=1, look_ahead=4)[0]
    assert calls == [(1, 8), (8, 4)]
    assert chunk.log_ahead.shape == (8,)
    assert chunk.sampled.base_tokens == 8 * 2 + 8 * 4 * 2
    calls.clear()
    few = chunks_of(num=1, look_ahead=4, sampler=Resampling(candidates=8, batch_size=8))[0]
    assert calls == [(1, 8), (2, 4), (2, 4), (2, 4), (2, 4)]
    torch.testing.assert_close(few.log_ahead, chunk.log_ahead, atol=1e-12, rtol=0)
    assert few.tokens == chunk.tokens


@pytest.mark.parametrize("look_ahead", [0, 3])
def test_the_same_seed_gives_the_same_text_and_a_text_can_be_taken_up(look_ahead):
    whole, again = (chunks_of(look_ahead=look_ahead) for _ in range(2))
    assert text_of(whole) == text_of(again)
    assert text_of(whole) != text_of(chunks_of(look_ahead=look_ahead, seed=6))
    for k in range(5):
        rest = chunks_of(look_ahead=look_ahead, written=text_of(whole[:k]))
        assert [chunk.index for chunk in rest] == list(range(k, 4))
        assert text_of(rest) == text_of(whole[k:])
    assert len(set(text_of(whole[i : i + 1]) for i in range(4))) > 1  # each has draws of its own


def test_a_chunk_reads_what_was_written():
    chunks = chunks_of()
    before = CONTEXT.lists()[0]
    for chunk in chunks:
        assert chunk.sampled.x.contexts.lists() == [before]
        assert (chunk.read, chunk.dropped) == (len(before), 0)
        before = [*before, *chunk.tokens]
        assert chunk.sampled.notes.count("from chunk") == 0


def test_a_text_ends_at_eos():
    for seed in range(20):
        chunks = chunks_of(eos=0, seed=seed)
        text = text_of(chunks)
        ended = [chunk.has_ended for chunk in chunks]
        if 0 in text:
            assert text.index(0) == len(text) - 1
            assert ended == [False] * (len(chunks) - 1) + [True]
            assert chunks_of(eos=0, seed=seed, written=[*text, *[0] * (-len(text) % 2)]) == []
        else:
            assert len(text) == 8
            assert not any(ended)
    assert 0 in text_of(chunks_of(seed=1))  # mutant: nobody looks for EOS
    assert not any(chunk.has_ended for chunk in chunks_of(seed=1))


def test_a_text_ends_at_a_length():
    whole = text_of(chunks_of())
    for most in (1, 2, 5, 8, 9):
        chunks = chunks_of(max_tokens=most)
        assert text_of(chunks) == whole[:most]
        assert len(chunks) == min(4, -(-most // 2))
    ahead = chunks_of(max_tokens=3, look_ahead=2)
    assert [chunk.log_ahead is None for chunk in ahead] == [False, True]  # nothing follows the second


def test_what_does_not_fit_is_dropped_and_told_once():
    chunks = chunks_of(max_context=3)
    before = CONTEXT.lists()[0]
    for k, chunk in enumerate(chunks):
        assert chunk.sampled.x.contexts.lists() == [before[-3:]]
        assert (chunk.read, chunk.dropped) == (min(3, len(before)), max(0, len(before) - 3))
        told = [note for note in chunk.sampled.notes if "only the last" in note]
        assert told == (["from chunk 2 on only the last 3 tokens of what stands before it are read"] if k == 1 else [])
        before += chunk.tokens


def test_roll_outs_read_what_the_next_chunk_would(monkeypatch):
    """With room for one token the chunk ahead is judged after the candidate's last token alone."""
    read, sample = [], BASE.sample

    def listening(contexts, num, *rest):
        read.append(contexts.lists())
        return sample(contexts, num, *rest)

    monkeypatch.setattr(BASE, "sample", listening)
    chunk = chunks_of(num=1, look_ahead=2, max_context=1)[0]
    assert read[0] == [[2]]
    assert read[1] == [x[-1:] for x in chunk.sampled.candidates.x.lists()[0]]


class Short(nn.Module):
    """An energy that can read 9 tokens."""

    def __init__(self):
        super().__init__()
        config = GPT2Config(vocab_size=V, n_positions=9, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        self.trunk = Trunk(GPT2Model(config), "causal")

    def forward(self, x: Continuations) -> torch.Tensor:
        assert int(x.contexts.lengths.max()) + x.tokens.shape[2] <= 9
        return ENERGY(x)


def test_no_more_is_read_than_base_and_energy_can(monkeypatch):
    space, energy = SequenceSpace(vocab_size=V, length=2), Short()
    assert reach(Target(Residual(BASE, ENERGY), CONTEXT, space)) is None
    assert reach(Target(Residual(BASE, ENERGY), CONTEXT, space), 5) == 5
    assert reach(Target(Residual(BASE, energy), CONTEXT, space)) == 7
    assert reach(Target(Residual(BASE, energy), CONTEXT, space), 5) == 5
    monkeypatch.setattr(BASE, "max_length", 8)
    assert reach(Target(Residual(BASE, energy), CONTEXT, space)) == 6
    assert [chunk.read for chunk in chunks_of(energy=energy, look_ahead=2)] == [2, 4, 6, 6]
    with pytest.raises(UserError, match="leaves no room"):
        reach(Target(Residual(BASE, ENERGY), CONTEXT, SequenceSpace(vocab_size=V, length=8)))
    long = Sequences.from_lists([[1] * 12])  # a prefix is not cut behind the user's back
    assert chunks_of(num=1, context=long)[0].read == 12
    assert chunks_of(num=1, context=long, max_context=4)[0].dropped == 8


def test_an_empty_context_begins_a_document():
    empty, begun = (chunks_of(context=Sequences.from_lists([tokens])) for tokens in ([], [0]))
    assert [chunk.read for chunk in empty] == [0, 3, 5, 7]
    assert [chunk.read for chunk in begun] == [1, 3, 5, 7]
    assert text_of(empty)[:2] == text_of(begun)[:2]
    assert text_of(empty) == text_of(begun)


def test_any_sampler_can_write():
    chunks = chunks_of(sampler=Autoregressive(completions=3))
    assert len(text_of(chunks)) == 8
    assert {chunk.sampled.method for chunk in chunks} == {"autoregressive"}


def test_candidates_that_lead_nowhere_are_not_chosen():
    """Nothing may follow a 2: without look-ahead it is written all the same, and the next chunk cannot be."""

    def forbids(x: Continuations) -> torch.Tensor:
        last = x.contexts.tokens.gather(1, x.contexts.lengths.unsqueeze(1) - 1)
        return torch.where(last == 2, math.inf, 0.0).expand(x.shape)

    begin = Sequences.from_lists([[1]])
    for seed in range(10):
        chunk = chunks_of(1, context=begin, energy=forbids, look_ahead=1, chunks=2, seed=seed)[0]
        assert chunk.tokens != (2,)
        assert (chunk.log_ahead == -math.inf).equal(chunk.sampled.candidates.x.tokens[0, :, 0] == 2)
    firsts = {chunks_of(1, num=1, context=begin, energy=forbids, seed=seed)[0].tokens for seed in range(10)}
    assert (2,) in firsts
    dead = Sequences.from_lists([[2]])
    for look_ahead in (0, 1):
        with pytest.raises(UserError, match="no candidate is acceptable"):
            chunks_of(1, context=dead, energy=forbids, look_ahead=look_ahead)


def test_progress_is_told():
    class Listener:
        def __init__(self):
            self.bars = {}

        @contextmanager
        def track(self, label, total=None, unit=""):
            def advance(amount, note=""):
                self.bars[label] = self.bars.get(label, 0) + amount

            yield advance

        def say(self, message):
            raise AssertionError(message)

    listener = Listener()
    chunks_of(look_ahead=2, progress=listener)
    assert listener.bars == {
        "writing": 4,
        "drawing": 32,
        "looking ahead": 48,
    }  # two rollouts of eight candidates, three times


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"chunks": 0}, "chunks is 0"),
        ({"look_ahead": -1}, "look_ahead is -1"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"max_context": 0}, "max_context is 0"),
        ({"written": [1, 1, 1]}, "not whole chunks of 2"),
        ({"look_ahead": 1, "chunks": 1}, "2 chunks or more"),
        ({"look_ahead": 1, "sampler": Autoregressive()}, "take resampling"),
        ({"context": Sequences.from_lists([[1], [2]])}, "one at a time"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_requests_are_refused_at_once(how, message):
    space = SequenceSpace(vocab_size=V, length=2)
    call = {"chunks": 4, "sampler": Resampling(candidates=8), "eos": None, "context": CONTEXT, **how}
    context = call.pop("context")
    with pytest.raises(UserError, match=message):
        write(Target(Residual(BASE, ENERGY), context, space), Rng(0), **call)  # before anything is asked for


def test_a_chunk_is_a_value():
    assert isinstance(chunks_of(num=1)[0], Chunk)
    with pytest.raises(AttributeError):
        chunks_of(num=1)[0].tokens = ()
