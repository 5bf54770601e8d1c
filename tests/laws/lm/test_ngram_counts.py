"""What is counted, and in which form."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from freenergy.core.errors import UserError
from freenergy.core.progress import Advance
from freenergy.lm import ngram_counts
from freenergy.lm.ngram_counts import NgramCounts

EOS, A, B = 0, 1, 2


def count(*stream, **sizes):
    return ngram_counts.count(*stream, **sizes)[0]


def as_dict(counts: NgramCounts) -> dict[tuple[int, ...], int]:
    """Spell every node of the trie."""
    spelled: dict[tuple[int, ...], int] = {}
    parents: list[tuple[int, ...]] = [()]
    for level in counts.levels:
        split = (divmod(int(key), counts.vocab_size) for key in level.keys)
        parents = [(*parents[parent], token) for parent, token in split]
        spelled |= dict(zip(parents, level.counts.tolist(), strict=True))
    return spelled


def test_adjusted_counts_by_hand() -> None:
    # two documents: A B A B, and A B
    counts = count(np.array([A, B, A, B, EOS, A, B, EOS]), vocab_size=3, eos=EOS, order=3)
    assert as_dict(counts) == {
        (A,): 2,  # after EOS and B
        (B,): 1,  # after A
        (EOS,): 1,  # after B
        (EOS, A): 2,  # begins a document: as often as it occurs
        (A, B): 2,  # after EOS and B
        (B, A): 1,  # after A
        (B, EOS): 1,  # after A
        (EOS, A, B): 2,  # the longest: as often as they occur
        (A, B, A): 1,
        (A, B, EOS): 2,
        (B, A, B): 1,
    }


def test_nothing_is_counted_across_documents() -> None:
    counts = as_dict(count(np.array([A, EOS, EOS, B, EOS]), vocab_size=3, eos=EOS, order=4))
    assert all(EOS not in gram[1:-1] for gram in counts)
    assert counts[EOS, EOS] == 1  # the empty document
    assert (A, EOS, EOS) not in counts
    assert counts[EOS, B, EOS] == 1


def test_highest_order_counts_every_token() -> None:
    stream = np.array([A, B, B, A, EOS, B, EOS, EOS])
    unigrams = count(stream, vocab_size=4, eos=EOS, order=1).levels[0]
    assert unigrams.keys.tolist() == [EOS, A, B]
    assert unigrams.counts.tolist() == np.bincount(stream).tolist()


def test_any_integer_type_and_a_memory_map_count_alike(tmp_path: Path) -> None:
    stream = np.random.default_rng(0).integers(0, 300, 2000)
    stream[-1] = EOS
    expected = count(stream, vocab_size=300, eos=EOS, order=4).fingerprint
    path = tmp_path / "tokens.bin"
    stream.astype(np.uint16).tofile(path)
    mapped = np.memmap(path, dtype=np.uint16, mode="r")
    assert count(mapped, vocab_size=300, eos=EOS, order=4).fingerprint == expected
    assert count(stream.astype(np.int32), vocab_size=300, eos=EOS, order=4).fingerprint == expected


def test_arrays_round_trip_and_name_the_content() -> None:
    stream = np.array([A, B, EOS])
    counts = count(stream, vocab_size=3, eos=EOS, order=5)
    again = NgramCounts.from_arrays(counts.arrays(), vocab_size=3, eos=EOS, order=5)
    assert as_dict(again) == as_dict(counts)
    assert again.fingerprint == counts.fingerprint
    others = [
        count(stream, vocab_size=4, eos=EOS, order=5),
        count(stream, vocab_size=3, eos=EOS, order=4),
        count(np.array([A, A, EOS]), vocab_size=3, eos=EOS, order=5),
    ]
    assert counts.fingerprint not in {other.fingerprint for other in others}


def test_progress_hears_of_every_order() -> None:
    class Listener:
        def __init__(self) -> None:
            self.total: float | None = 0.0
            self.done = 0.0

        @contextmanager
        def track(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
            self.total = total

            def advance(amount: float) -> None:
                self.done += amount

            yield advance

        def say(self, message: str) -> None:
            raise AssertionError(message)

    listener = Listener()
    count(np.array([A, EOS]), vocab_size=2, eos=EOS, order=3, progress=listener)
    assert listener.done == listener.total == 3


@pytest.mark.parametrize(
    ("stream", "eos", "order", "sentence"),
    [
        ([], 0, 2, "there are no tokens to count: give a corpus with at least one document"),
        ([1, 2], 0, 2, "the corpus ends with token 2 and not with EOS"),
        ([1, 3, 0], 0, 2, "token ids 0 to 3 but the vocabulary has 3: encode"),
        ([-1, 0], 0, 2, "token ids -1 to 0 but the vocabulary has 3: encode"),
        ([1, 0], 3, 2, "EOS is token 3 but the vocabulary has ids 0 to 2: give the right EOS id"),
        ([1, 0], 0, 0, "of order 0 does not exist: set order to 1 or more"),
    ],
)
def test_bad_input_gives_one_sentence(stream: list[int], eos: int, order: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        count(np.array(stream, dtype=np.int64), vocab_size=3, eos=eos, order=order)


@pytest.mark.parametrize("block", [1, 2, 7, 50])
@pytest.mark.parametrize("order", [1, 2, 4])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, block: int, order: int) -> None:
    """Of counts, of the tables of features beside them, and wherever documents end."""
    from freenergy.energies import ngram_tables

    draws = np.random.default_rng(0)
    for _ in range(5):
        stream = np.append(draws.integers(5, size=300) * (draws.random(300) > 0.2), EOS)
        whole = ngram_tables.NgramTables.fit(stream, vocab_size=5, eos=EOS, order=order, skips=(1, 2))
        with monkeypatch.context() as patch:
            patch.setattr(ngram_counts, "_BLOCK", block)
            patch.setattr(ngram_tables, "_BLOCK", block)
            parts = ngram_tables.NgramTables.fit(stream, vocab_size=5, eos=EOS, order=order, skips=(1, 2))
        assert as_dict(parts.counts) == as_dict(whole.counts)
        assert parts.fingerprint == whole.fingerprint
