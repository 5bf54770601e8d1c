"""Energies in batches: the same numbers as one string at a time, every row once, little padding."""

import threading
import time

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from freenergy import Continuations, HuggingFaceLM, Rng, Sequences
from freenergy.energies import batching
from freenergy.energies.batching import ahead, batches, portions
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.energies.log_ratio import LogRatio, LogRatioEnergy
from freenergy.energies.unit import Unit, UnitEnergy
from freenergy.lm.presets import build

V = 30
ENERGIES = {
    "bit": lambda lm: Bit.from_base(BitEnergy(over="all"), lm),
    "prefix once": lambda lm: Bit.from_base(BitEnergy(prefix_once=True, over="all"), lm),
    "unit": lambda lm: Unit(UnitEnergy(pool="sum"), lm),
    "log-ratio": lambda lm: LogRatio(LogRatioEnergy(), lm),
}


def energy_of(kind, name="Llama"):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V, bos_token_id=0, eos_token_id=0, pad_token_id=None, max_position_embeddings=64, **sizes
    )
    energy = ENERGIES[kind](HuggingFaceLM(build(config, Rng(0)), eos=0))
    with torch.no_grad():
        for i, weight in enumerate(energy.parameters()):
            weight.add_(0.1 * Rng(1).child(i).normal(*weight.shape))
    return energy.eval()


def mixed(B, N, P=6, L=8):
    rng = Rng(5)
    tokens = 1 + (rng.uniform(B, P + N * L) * (V - 1)).long()
    lengths = (rng.child("x").uniform(B, N) * (L + 1)).long()
    contexts = Sequences(tokens[:, :P], (rng.child("c").uniform(B) * (P + 1)).long())
    return Continuations(contexts, tokens[:, P:].reshape(B, N, L), lengths)


@pytest.mark.parametrize("budget", [1, 300, 3_000, 1_000_000])
@pytest.mark.parametrize("shape", [(1, 23), (7, 3)])
@pytest.mark.parametrize("kind", ENERGIES)
def test_energies_do_not_depend_on_the_batches(kind, shape, budget, monkeypatch):
    energy, x = energy_of(kind), mixed(*shape)
    monkeypatch.setattr(batching, "_BUDGET", budget)
    wanted = energy(x).detach()  # with gradients: all at once
    with torch.no_grad():
        found = energy(x)
    assert found.shape == x.shape
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    assert wanted.std() > 1e-3


@pytest.mark.parametrize("kind", ENERGIES)
def test_no_strings_have_no_energies(kind):
    with torch.no_grad():
        assert energy_of(kind)(mixed(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("kind", ENERGIES)
def test_a_mutant_that_forgets_the_order_is_seen(kind, monkeypatch):
    energy, x, own = energy_of(kind), mixed(1, 23), batching.batches
    monkeypatch.setattr(batching, "_BUDGET", 300)
    monkeypatch.setattr(batching, "batches", lambda *given: [rows.flip(0) for rows in own(*given)])
    with torch.no_grad():
        right = energy(x)  # any order within a batch is right …
    torch.testing.assert_close(right, energy(x).detach(), atol=2e-5, rtol=1e-5)
    place = batching._after_prefixes if energy.trunk.shares_prefix else batching._one_by_one
    wrong = lambda *given: ((b, n.flip(-1), values) for b, n, values in place(*given))  # noqa: E731
    monkeypatch.setattr(batching, place.__name__, wrong)
    with torch.no_grad():
        assert (energy(x) - right).abs().max() > 1e-3  # … but its numbers must be put back in that order


@given(st.lists(st.integers(0, 900), max_size=60), st.integers(1, 2_000))
def test_every_row_is_in_one_batch_which_is_small_and_little_padded(lengths, width):
    found = batches(torch.tensor(lengths, dtype=torch.long), width)
    assert sorted(row for batch in found for row in batch.tolist()) == list(range(len(lengths)))
    for batch in found:
        rows = [lengths[i] for i in batch.tolist()]
        assert len(rows) == 1 or max(rows) * len(rows) <= 1_000_000 // width
        real, padded = sum(rows[:-1]), max(rows) * len(rows)
        assert real < 512 or (padded - sum(rows)) * 8 <= padded


def test_equal_lengths_fill_their_batches():
    assert [len(batch) for batch in batches(torch.full((100,), 40), 1_000)] == [25, 25, 25, 25]


def test_the_prefix_is_read_once_for_all_batches(monkeypatch):
    energy, x, seen = energy_of("prefix once"), mixed(1, 23), []
    monkeypatch.setattr(batching, "_BUDGET", 300)
    own = energy.trunk._states
    monkeypatch.setattr(energy.trunk, "_states", lambda tokens, *rest: seen.append(tokens.shape) or own(tokens, *rest))
    with torch.no_grad():
        energy(x)
    assert len(seen) > 4
    assert sum(rows == 1 and length == int(x.contexts.lengths[0]) for rows, length in seen) == 1


def test_portions_cover_everything_once():
    for shape in [(1, 1_000), (300, 3), (2, 256), (4, 0), (0, 5)]:
        count = torch.zeros(shape, dtype=torch.long)
        for b, n in portions(*shape):
            assert 0 < count[b, n].numel() <= 256
            count[b, n] += 1
        assert (count == 1).all()


def test_the_next_is_made_while_the_present_is_used():
    begun = [threading.Event() for _ in range(3)]

    def make(i):
        begun[i].set()
        time.sleep(0.01)
        return i * i

    found = []
    for i, value in enumerate(ahead(make, range(3))):
        assert i == 2 or begun[i + 1].wait(5)  # it began although nobody has asked for it yet
        found.append(value)
    assert found == [0, 1, 4]
    assert list(ahead(make, [])) == []


def test_what_goes_wrong_ahead_is_raised():
    def make(i):
        return 1 // i

    with pytest.raises(ZeroDivisionError):
        list(ahead(make, [1, 1, 0]))
