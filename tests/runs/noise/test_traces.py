"""Traces that are kept with the draws are those that the base reads from them, and spare it that reading."""

import pytest
import torch
from tests.runs.noise.test_store import IDENTITY, ROWS, SPACE, K, L, V, windows

from freenergy import Rng, SequenceSpace, UserError
from freenergy.core.progress import Silent
from freenergy.energies.probe import Probe, ProbeEnergy
from freenergy.noise.from_lm import FromLM
from freenergy.noise.store import NegativeShards, NegativeStore
from freenergy.noise.traces import Traced, trace_path
from freenergy.testing.networks import tiny_network
from freenergy.training.contrastive_batches import StoredContrast
from freenergy.training.feature_cache import FeatureCache

LAYERS = (0, 2)
WHAT = Traced(LAYERS)


@pytest.fixture(params=["GPT2", "Bloom"], ids=["own steps", "whole strings or the model's steps"])
def lm(request):
    return tiny_network(request.param, vocab_size=V, eos=0)


def store(folder, lm, what=WHAT, some=None):
    source = FromLM(lm, SPACE)
    shards = NegativeShards(folder, ROWS, some or windows(), source, IDENTITY, Rng(1), shard=5, batch=3, traced=what)
    shards.write(Silent())
    return NegativeStore.open(folder, IDENTITY)


def test_they_are_what_the_base_reads(tmp_path, lm):
    kept, plain = store(tmp_path / "kept", lm), store(tmp_path / "plain", lm, what=None)
    index = torch.tensor([20, 0, 7, 4, 5, 22])
    x = StoredContrast(windows(), kept).all(index)
    assert x.lists() == StoredContrast(windows(), plain).all(index).lists()
    found, read = kept.trace(index, WHAT), lm.trace(x, LAYERS)
    assert found.mask.shape == (6, 1 + K, L)
    assert torch.equal(found.mask, x.mask)
    for name in ("states", "log_p", "entropy", "log_rank"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(read, name), atol=1e-4, rtol=0)
    torch.testing.assert_close(kept.data_log_prob(index), lm.log_prob(x)[:, 0], atol=1e-5, rtol=0)
    assert plain.data_log_prob(index) is None
    of_one = kept.trace(index, Traced((2,)))
    assert torch.equal(of_one.states[:, :, 0], found.states[:, :, 1])
    assert kept.trace(index, Traced((1,))) is None, "that layer was not kept"
    assert kept.trace(index, Traced(LAYERS, after=True)) is None, "those states were not kept"
    assert plain.trace(index, WHAT) is None


@pytest.mark.parametrize("after", [False, True])
def test_features_are_not_read_again(tmp_path, lm, after, monkeypatch):
    kept = store(tmp_path / "kept", lm, Traced(LAYERS, after))
    probe = Probe(ProbeEnergy(layers=LAYERS, after=after), lm)
    cache = FeatureCache(tmp_path / "features", StoredContrast(windows(), kept), leave_self_out=True, batch_size=4)
    read = [probe.features(cache.contrast.all(chunk)) for chunk in cache.chunks()]
    monkeypatch.setattr(type(lm), "trace", None)
    assert not cache.missing(probe)
    for wanted, found in zip(read, cache.pieces(probe, "train", Silent()), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "features").exists(), "there is no second copy"


def test_windows_with_less_room_are_traced_to_their_end(tmp_path, lm):
    """The last chunk of a window may be shorter than the others."""
    chunks = windows().in_chunks((2,))
    rows, space = torch.arange(12), SequenceSpace(vocab_size=V, length=2, eos=0)
    data = chunks.examples(rows)
    assert data.rooms is not None
    assert len(data.rooms.unique()) == 2
    source = FromLM(lm, space)
    draws, trace = source.draw_traced(data, K, Rng(1), LAYERS)
    _, plain = source.draw(None, source.init(Rng(1)), data, K, Rng(1))
    assert draws.x.lists() == plain.x.lists()
    read = lm.trace(draws.x, LAYERS)
    torch.testing.assert_close(trace.log_p[:, 1:], read.log_p, atol=1e-4, rtol=0)
    torch.testing.assert_close(trace.log_p[:, :1].sum(-1), lm.log_prob(data.x), atol=1e-4, rtol=0)


def test_a_damaged_trace_is_named(tmp_path, lm):
    kept = store(tmp_path, lm)
    path = trace_path(tmp_path / "shard-00001.parquet")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="shard-00001"):
        kept.trace(torch.tensor([5]), WHAT)
