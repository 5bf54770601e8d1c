"""The flat file gives what the shards hold, is made once and made again when torn, and memory does not hold it."""

import json
import pickle
import tracemalloc
from dataclasses import asdict

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from freenergy import Rng, SequenceSpace, TabularLM, UserError
from freenergy.core.files import fingerprint
from freenergy.core.progress import Silent
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.noise import mapped
from freenergy.noise.from_lm import FromLM
from freenergy.noise.mapped import list_fingerprint
from freenergy.noise.store import Identity, NegativeShards, NegativeStore

V, P, L, K = 300, 2, 5, 4
SPACE = SequenceSpace(vocab_size=V, length=L, eos=0)
IDENTITY = Identity(
    lm="m", tokenizer="t", corpus="c", split="train", seed=1, per_prefix=K, sources="base", space=SPACE
)  # fmt: skip


def windows(num):
    places = places_of(np.arange(num), L)
    return Windows(np.arange(num + P + L) % V, places, P, L)


def write(folder, num=23):
    lm = TabularLM.random(Rng(2), vocab_size=V, order=1)
    rows = Rng(3).permutation(num)
    NegativeShards(folder, rows, windows(num), FromLM(lm, SPACE), IDENTITY, Rng(1), shard=8, batch=8).write(Silent())
    return rows


def in_memory(folder):
    """All shards as lists, read without the flat file."""
    tables = [pq.read_table(path) for path in sorted(folder.glob("shard-*.parquet"))]
    return {name: [x for table in tables for x in table.column(name).to_pylist()] for name in tables[0].schema.names}


def everything(store):
    contexts = windows(len(store)).continuations(store.rows).contexts
    return store.draws(torch.arange(len(store)), contexts)


def test_it_holds_what_the_shards_hold(tmp_path):
    write(tmp_path)
    draws, wanted = everything(NegativeStore.open(tmp_path, IDENTITY)), in_memory(tmp_path)
    assert [x for row in draws.x.lists() for x in row] == wanted["tokens"]
    assert len({len(x) for x in wanted["tokens"]}) > 1  # some end early
    assert draws.log_base.flatten().tolist() == wanted["log_base"]
    assert draws.log_proposal.flatten().tolist() == wanted["log_proposal"]
    assert (draws.x.tokens.dtype, draws.x.lengths.dtype, draws.log_base.dtype) == (torch.long, torch.long, torch.double)
    assert not (draws.x.tokens * ~draws.x.mask).any()


def test_it_is_made_once_and_the_shards_are_not_read_again(tmp_path, monkeypatch):
    write(tmp_path)
    first = everything(NegativeStore.open(tmp_path, IDENTITY))
    monkeypatch.setattr("freenergy.noise.shard_files._read", lambda *_: pytest.fail("a shard was read"))
    again = everything(NegativeStore.open(tmp_path, IDENTITY))
    assert torch.equal(first.x.tokens, again.x.tokens)


@pytest.mark.parametrize("name", ["draws.bin", "windows.bin", "flat.json"])
@pytest.mark.parametrize("harm", ["torn", "gone", "of other shards"])
def test_what_is_torn_is_made_again(tmp_path, name, harm):
    write(tmp_path)
    whole = everything(NegativeStore.open(tmp_path, IDENTITY))
    files = {path.name: path.read_bytes() for path in sorted((tmp_path / ".flat").iterdir())}
    path = tmp_path / ".flat" / name
    match harm:
        case "torn":
            path.write_bytes(files[name][:-9])
        case "gone":
            path.unlink()
        case "of other shards":
            told = json.loads(files["flat.json"])
            (tmp_path / ".flat" / "flat.json").write_text(json.dumps(told | {"key": "0" * 16}))
    again = everything(NegativeStore.open(tmp_path, IDENTITY))
    assert torch.equal(whole.x.tokens, again.x.tokens)
    assert torch.equal(whole.log_base, again.log_base)
    assert {path.name: path.read_bytes() for path in sorted((tmp_path / ".flat").iterdir())} == files


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped, "_records", full)
    with pytest.raises(UserError, match="no space left to write"):
        NegativeStore.open(tmp_path, IDENTITY)
    assert not list((tmp_path / ".flat").iterdir())


def test_fingerprints_are_those_of_lists(monkeypatch):
    monkeypatch.setattr(mapped, "_BATCH_SIZE", 3)
    for size in (0, 1, 3, 7):
        rows = Rng(size).permutation(size) * 1000
        assert list_fingerprint(rows) == fingerprint(rows.tolist())
        text = json.dumps(asdict(IDENTITY), sort_keys=True, separators=(",", ":"))
        assert list_fingerprint(rows, f"[{text},", "]") == fingerprint([asdict(IDENTITY), rows.tolist()])


def test_a_store_travels_by_its_name(tmp_path):
    write(tmp_path)
    store = NegativeStore.open(tmp_path, IDENTITY)
    sent = pickle.dumps(store)
    assert len(sent) < 2000
    assert pickle.loads(sent).fingerprint == store.fingerprint == fingerprint([asdict(IDENTITY), store.rows.tolist()])


def test_memory_of_opening_and_reading_does_not_grow_with_the_store(tmp_path):
    """What Python and numpy allocate grows by some bytes a window, far less than the window's record has."""
    peaks = []
    for i, num in enumerate((64, 64, 512)):  # the first one warms up
        folder, of = tmp_path / str(i), windows(num)
        write(folder, num)
        tracemalloc.start()
        store = NegativeStore.open(folder, IDENTITY)
        for index in torch.arange(num).split(8):
            store.draws(index, of.continuations(store.rows[index]).contexts)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    record = mapped.flat_record(SPACE, K).itemsize
    assert record == 112
    assert peaks[2] - peaks[1] < 448 * record / 2
