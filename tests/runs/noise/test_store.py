"""The store gives back what was drawn, survives a kill with the same bytes, and refuses what others made."""

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from freenergy import Rng, SequenceSpace, TabularLM, Truncation, UserError
from freenergy.core.progress import Silent
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.noise.from_lm import FromLM
from freenergy.noise.mixture import Mixture
from freenergy.noise.store import Identity, NegativeShards, NegativeStore
from freenergy.testing.training import draws_of

V, P, L, K = 5, 4, 3, 6
SPACE = SequenceSpace(vocab_size=V, length=L, eos=0)
LM = TabularLM.random(Rng(2), vocab_size=V, order=2)
ROWS = Rng(3).permutation(40)[:23]
IDENTITY = Identity(
    lm="model-1", tokenizer="tokenizer-1", corpus="corpus-1", split="train", seed=1, per_prefix=K, sources="base",
    space=SPACE,
)  # fmt: skip


def windows():
    stream = np.arange(400) * 7 % V
    places = places_of(np.arange(40) * 9, L)
    return Windows(stream, places, P, L)


def write(folder, *, source=None, identity=IDENTITY, rows=ROWS, shard=5, batch=3, progress=None):
    source = source or FromLM(LM, SPACE)
    NegativeShards(folder, rows, windows(), source, identity, Rng(1), shard=shard, batch=batch).write(
        progress or Silent()
    )
    return folder


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_it_gives_back_what_was_drawn(tmp_path):
    store = NegativeStore.open(write(tmp_path), IDENTITY)
    assert torch.equal(store.rows, ROWS)
    assert len(store) == 23
    data = windows().continuations(ROWS)
    wanted = draws_of(FromLM(LM, SPACE), ROWS, data, K, Rng(1))
    index = torch.tensor([20, 0, 7, 7])
    draws = store.draws(index, data.contexts[index])
    assert draws.x.lists() == [wanted.x.lists()[i] for i in index]
    assert draws.x.contexts.lists() == data.contexts[index].lists()
    assert torch.equal(draws.log_base, wanted.log_base[index])
    assert torch.equal(draws.log_proposal, wanted.log_proposal[index])
    torch.testing.assert_close(draws.log_base, LM.log_prob(draws.x), atol=1e-12, rtol=0)


def test_the_batch_changes_no_bit(tmp_path):
    one, seven = (bytes_of(write(tmp_path / str(batch), batch=batch)) for batch in (1, 7))
    assert list(one) == [f"shard-0000{k}.parquet" for k in range(5)]
    assert one == seven


class Killed(BaseException):
    pass


class KillsAfter:
    """Progress that ends the process after some windows."""

    def __init__(self, left):
        self.left, self.seen = left, 0

    @contextmanager
    def track(self, label, total=None, unit=""):
        def advance(amount, note=""):
            self.seen += amount
            if self.seen >= self.left:
                raise Killed

        yield advance

    def say(self, message):
        pass


@pytest.mark.parametrize("after", [1, 5, 9, 22])
def test_a_killed_store_goes_on_with_the_same_bytes(tmp_path, after):
    whole = bytes_of(write(tmp_path / "whole"))
    with pytest.raises(Killed):
        write(tmp_path / "cut", progress=KillsAfter(after))
    # a shard is there only if all its windows were drawn, and the next call draws only what is missing
    kept = bytes_of(tmp_path / "cut") if (tmp_path / "cut").is_dir() else {}
    assert len(kept) < 5

    class Counting:
        drawn = 0
        kind = "base"

        def init(self, rng):
            return {}

        def draw(self, model, state, data, num, rng):
            self.drawn += len(data.rows)
            return FromLM(LM, SPACE).draw(model, state, data, num, rng)

        def log_noise(self, x):
            return None

    source = Counting()
    assert bytes_of(write(tmp_path / "cut", source=source)) == whole
    assert source.drawn == 23 - 5 * len(kept)


def test_progress_counts_windows(tmp_path):
    counting = KillsAfter(10**9)
    write(tmp_path, progress=counting)
    assert counting.seen == 23
    write(tmp_path, progress=counting)
    assert counting.seen == 46


def test_columns_and_metadata(tmp_path):
    mixed = Mixture([(FromLM(LM, SPACE), 4), (FromLM(LM, SPACE, Truncation(top_k=2)), 2)])
    table = pq.read_table(write(tmp_path, source=mixed) / "shard-00004.parquet")
    assert table.column("window").to_pylist() == ROWS[20:].repeat_interleave(K).tolist()
    assert table.column("candidate").to_pylist() == list(range(K)) * 3
    assert set(table.column("source").to_pylist()) == {"base"}
    about = json.loads(table.schema.metadata[b"freenergy"])
    assert about["identity"]["lm"] == "model-1"
    assert about["identity"]["space"] == {"vocab_size": V, "length": L, "eos": 0}
    assert not NegativeStore.open(tmp_path, IDENTITY).is_plain
    assert NegativeStore.open(write(tmp_path / "plain"), IDENTITY).is_plain


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lm": "model-2"}, "language model"),
        ({"tokenizer": "tokenizer-2"}, "tokenizer"),
        ({"corpus": "corpus-2"}, "corpus"),
        ({"split": "validation"}, "split"),
        ({"seed": 2}, "seed"),
        ({"per_prefix": K + 1}, "number of negatives"),
        ({"sources": "other"}, "mixture of sources"),
        ({"space": SequenceSpace(vocab_size=V, length=L)}, "space"),
    ],
)
def test_what_others_made_is_refused(tmp_path, change, word):
    write(tmp_path)
    before = bytes_of(tmp_path)
    for use in (NegativeStore.open, lambda folder, identity: write(folder, identity=identity)):
        with pytest.raises(UserError, match=f"another {word}.*run the negatives stage again"):
            use(tmp_path, replace(IDENTITY, **change))
    assert bytes_of(tmp_path) == before


def test_other_windows_are_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match="other windows"):
        write(tmp_path, rows=ROWS.flip(0))


def test_no_windows(tmp_path):
    with pytest.raises(UserError, match="no windows"):
        write(tmp_path, rows=ROWS[:0])


def test_a_missing_shard(tmp_path):
    (write(tmp_path) / "shard-00003.parquet").unlink()
    with pytest.raises(UserError, match=r"no file .*shard-00003\.parquet"):
        NegativeStore.open(tmp_path, IDENTITY)
    write(tmp_path)
    assert len(NegativeStore.open(tmp_path, IDENTITY)) == 23
    with pytest.raises(UserError, match="no file"):
        NegativeStore.open(tmp_path / "nowhere", IDENTITY)


@pytest.mark.parametrize(
    ("damage", "column"),
    [*((damage, None) for damage in ("cut", "flipped", "empty", "foreign"))]
    + [("empty place", column) for column in ("window", "tokens", "list", "log_base", "log_proposal", "source")],
)
def test_a_damaged_shard(tmp_path, damage, column):
    path = write(tmp_path) / "shard-00002.parquet"
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "flipped":
            path.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])  # in the numbers
        case "empty":
            path.write_bytes(b"")
        case "foreign":
            pq.write_table(pq.read_table(path).replace_schema_metadata(), path)
        case "empty place":
            table = pq.read_table(path)
            name, hole = ("tokens", None) if column == "list" else (column, [None] if column == "tokens" else None)
            place = table.schema.get_field_index(name)
            values = table.column(name).to_pylist()
            values[2] = hole
            field = table.schema.field(place)
            pq.write_table(table.set_column(place, field, pa.array(values, field.type)), path)
    with pytest.raises(UserError, match=r"shard-00002\.parquet is damaged"):
        NegativeStore.open(tmp_path, IDENTITY)
