"""Negatives on disk: drawn once, read in every epoch.

    shard-00000.parquet, shard-00001.parquet, …      each the negatives of M windows, one row per negative

A shard is written completely or not at all; after a crash only missing shards are drawn. Batches restart in every
shard, so that rounding does not depend on where work was interrupted, and a finished store has the same bytes. The
schema of every shard says what made it (``Identity``), and a store that another model, tokenizer or corpus made is
refused.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow.parquet as pq
import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import Advance, Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Noise
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.corpus import Windows
from freenergy.lm.activations import Trace, TracingLM
from freenergy.noise.from_lm import FromLM
from freenergy.noise.mapped import Flat, flat_record, list_fingerprint, open_flat
from freenergy.noise.shard_files import check_about, damaged, read_about, read_tables, shard_path, size_of, write_shard
from freenergy.noise.traces import Traced, read_data_log_prob, read_trace, write_trace


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What made the negatives. ``lm``, ``tokenizer``, ``corpus`` and ``sources`` are fingerprints."""

    lm: str
    tokenizer: str
    corpus: str
    split: str
    seed: int
    per_prefix: int
    sources: str
    space: SequenceSpace


@final
class NegativeShards:
    """The shards of a store that is being drawn: ``shard`` windows a file, ``batch`` of them at once.

    ``traced``: the traces of draws and data are kept next to them, where the source is a base that shows them.
    """

    def __init__(
        self,
        folder: Path,
        rows: Int[Tensor, " rows"],
        windows: Windows,
        source: Noise,
        identity: Identity,
        rng: Rng,
        *,
        shard: int = 64,
        batch: int = 16,
        traced: Traced | None = None,
    ) -> None:
        if len(rows) == 0:
            raise UserError(f"there are no windows to draw negatives for in the {identity.split} split: give more text")
        self.folder, self.rows, self.windows, self.source, self.rng = folder, rows, windows, source, rng
        self.identity, self.shard, self.batch = identity, shard, batch
        shows = isinstance(source, FromLM) and source.together and isinstance(source.lm, TracingLM)
        self.traced = traced if shows else None
        self.count = -(-len(rows) // shard)
        self._about = {"identity": asdict(identity), "rows": list_fingerprint(rows), "shards": self.count}

    def missing(self) -> list[int]:
        """The numbers of the shards that are not there."""
        return [k for k in range(self.count) if not shard_path(self.folder, k).exists()]

    def make(self, k: int, advance: Advance = lambda amount, note="": None) -> None:
        """Draw shard k, unless it is there; then see whether it is what is wanted."""
        path, some = shard_path(self.folder, k), self.rows[k * self.shard : (k + 1) * self.shard]
        about = {**self._about, "shard": k}
        if path.exists():
            check_about(path, read_about(path), about)
            advance(len(some))
            return
        parts, traces, K = list[Draws](), list[Trace](), self.identity.per_prefix
        for now in some.split(self.batch):
            data = self.windows.examples(now)
            if self.traced is None:
                _, draws = self.source.draw(None, self.source.init(self.rng), data, K, self.rng)
            else:
                assert isinstance(self.source, FromLM), "only draws of a language model are traced"
                draws, trace = self.source.draw_traced(data, K, self.rng, self.traced.layers, after=self.traced.after)
                traces.append(trace)
            parts.append(draws)
            advance(len(now))
        if self.traced is not None:
            write_trace(path, Trace.cat(traces, dim=0), self.traced)
        write_shard(path, some, Draws.cat(parts, dim=0), names(self.source, K), about)

    def write(self, progress: Progress) -> None:
        """Draw what is missing, and check what is there."""
        with progress.track(f"draws for {self.identity.split} prefixes", len(self.rows), "windows") as advance:
            for k in range(self.count):
                self.make(k, advance)


def names(source: Noise, num: int) -> list[str]:
    """What each of a window's ``num`` negatives is called in the store."""
    parts: Sequence[tuple[Noise, int]] = getattr(source, "parts", ())
    if parts:
        return [name for part, count in parts for name in names(part, count)]
    return [str(getattr(source, "kind", type(source).__name__.lower()))] * num


@final
class NegativeStore:
    """The negatives of some windows of a split, on disk; it takes 8 bytes of memory per window."""

    def __init__(self, folder: Path, flat: Flat, identity: Identity) -> None:
        self.folder, self.identity = folder, identity
        self.per_prefix, self.rows = identity.per_prefix, flat.windows
        self.is_plain = flat.is_plain  # every draw is the base's own
        self._draws = flat.draws
        self._fingerprint: str | None = None

    @classmethod
    def open(cls, folder: Path, identity: Identity) -> "NegativeStore":
        """Map a store, or say what is missing, damaged, or made by something else.

        The first opening reads every shard once, and checks it, to lay its negatives out flat (``mapped``).
        """
        first = read_about(shard_path(folder, 0))
        check_about(shard_path(folder, 0), first, {**first, "identity": asdict(identity), "shard": 0})
        sizes = [size_of(shard_path(folder, k)) for k in range(first["shards"])]
        record = flat_record(identity.space, identity.per_prefix)
        return cls(folder, open_flat(folder, [first, sizes], record, partial(read_tables, folder, first)), identity)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files itself, where a mapped array would travel whole."""
        return NegativeStore.open, (self.folder.resolve(), self.identity)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """Equal for two stores with the same negatives of the same windows."""
        if self._fingerprint is None:
            identity = json.dumps(asdict(self.identity), sort_keys=True, separators=(",", ":"))
            self._fingerprint = list_fingerprint(self.rows, f"[{identity},", "]")
        return self._fingerprint

    def draws(self, index: Int[Tensor, " batch"], contexts: Sequences) -> Draws:
        """The negatives at these positions; ``contexts`` are the prefixes of their windows."""
        found = self._draws[index.numpy()]
        tokens, lengths = (torch.from_numpy(found[name].astype(np.int64)) for name in ("tokens", "lengths"))
        numbers = (torch.from_numpy(found[name].astype(np.float64)) for name in ("log_base", "log_proposal"))
        log_base, log_proposal = numbers
        self._check_numbers(tokens, lengths, log_base, log_proposal)
        return Draws(Continuations(contexts, tokens, lengths), log_base, log_proposal)

    def _check_numbers(self, tokens: Tensor, lengths: Tensor, *numbers: Tensor) -> None:
        """Refuse what no draw can be."""
        space, some = self.identity.space, lengths.numel() > 0
        if some and not (int(lengths.min()) >= 0 and int(lengths.max()) <= space.length):
            raise damaged(self.folder, f"a draw has {int(lengths.max())} tokens")
        if some and int(tokens.max()) >= space.vocab_size:
            raise damaged(self.folder, f"a draw has the token {int(tokens.max())}")
        if any(bool(number.isnan().any()) for number in numbers):
            raise damaged(self.folder, "a log-probability is not a number")

    def trace(self, index: Int[Tensor, " batch"], what: Traced) -> Trace | None:
        """The trace of the data and negatives at these positions, where it was kept as they were drawn."""
        return read_trace(*self._shards, index, what)

    def data_log_prob(self, index: Int[Tensor, " batch"]) -> Float[Tensor, " batch"] | None:
        """log P_LM of the data at these positions, where the traces have it."""
        return read_data_log_prob(*self._shards, index)

    @cached_property
    def _shards(self) -> tuple[list[Path], int]:
        """All shards, and the number of windows in each but the last."""
        size = pq.read_metadata(shard_path(self.folder, 0)).num_rows // self.per_prefix
        return [shard_path(self.folder, k) for k in range(-(-len(self) // size))], size
