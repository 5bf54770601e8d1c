"""What sequential Monte Carlo is certain to gain on held-out text (``samplers.conditional``).

    log P_certified(x) = log γ(x) − log Ẑ        Ẑ of one run in which the true text x is one of the N particles

It is measured on the windows, or their chunks, that resampling is measured on, so the two certificates are paired. Each
is kept on disk when it is done. With k looks no gain is above k · log N.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Integer
from safetensors.torch import save_file

from freenergy.core.files import atomic_write, read_tensors
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import SequenceSpace
from freenergy.corpus import Windows
from freenergy.evaluation.certified import ChunkRows
from freenergy.evaluation.perplexity import Counts, Measurement, measured_percent, measured_rate, percent_less
from freenergy.models.residual import Residual
from freenergy.samplers.conditional import conditional_run
from freenergy.samplers.particles import looks
from freenergy.samplers.sequential import Sequential


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalRuns:
    """One conditional run for each of some windows; ``space`` is that of whole continuations."""

    model: Residual
    windows: Windows
    rows: Integer[np.ndarray, " W"]
    space: SequenceSpace
    sampler: Sequential
    folder: Path  # of the evaluation
    rng: Rng

    def path(self, b: int) -> Path:
        """Where the numbers of the b-th window are kept."""
        return self.folder / "sequential" / f"{b:05d}.safetensors"

    def make(self, b: int) -> None:
        """Run the b-th window, unless that was done."""
        if self.path(b).is_file():
            return
        data = self.windows.examples(torch.from_numpy(self.rows[b : b + 1]))
        target: Target[Model] = Target(self.model, data.x.contexts, self._space(b))
        run = conditional_run(target, data.x.trimmed(), self.sampler, self.rng.child(b))
        resampled = [float(island.is_resampled.sum()) for island in run.particles.islands]
        numbers = {"log_prob": run.log_prob, "origins": run.particles.origins, "resampled": np.mean(resampled)}
        with atomic_write(self.path(b)) as aside:
            save_file({name: torch.tensor([value]).double() for name, value in numbers.items()}, aside)

    def read(self, progress: Progress) -> dict[str, Float[np.ndarray, " W"]]:
        """Run what is missing; the numbers of all windows."""
        found = []
        with progress.track("conditional runs of particles", len(self.rows), "windows") as advance:
            for b in range(len(self.rows)):
                self.make(b)
                found.append(read_tensors(self.path(b)))
                advance(1)
        return {name: torch.cat([each[name] for each in found]).numpy() for name in found[0]}

    def num_looks(self) -> int:
        """The looks at all windows, from which the ceiling follows."""
        return sum(len(looks(self._space(b).length, self.sampler.check_every)) for b in range(len(self.rows)))

    def _space(self, b: int) -> SequenceSpace:
        rooms = self.windows.examples(torch.from_numpy(self.rows[b : b + 1])).rooms
        return self.space if rooms is None else replace(self.space, length=int(rooms[0]))


def sequential_report(
    runs: ConditionalRuns,
    others: dict[str, Float[np.ndarray, " W"]],
    counts: Counts,
    chunks: ChunkRows | None,
    progress: Progress,
) -> dict[str, Any]:
    """Report the certificate; ``others`` are log P of the same windows by ``base`` and by ``resampling``, certified."""
    found, t = runs.read(progress), counts.by_document(counts.token)
    are_first = np.ones(len(counts)) if chunks is None else chunks.are_first.astype(np.float64)
    gain = counts.by_document(found["log_prob"] - others["base"])
    perplexity = counts.perplexity(found["log_prob"])
    nats, percent = measured_rate(gain, counts.by_document(are_first)), measured_percent(gain, t)
    beyond = measured_percent(counts.by_document(found["log_prob"] - others["resampling"]), t)
    ceiling = percent_less(runs.num_looks() * math.log(runs.sampler.particles) / t.sum())
    return {
        "sampler": sampler_words(runs.sampler, None if chunks is None else chunks.size),
        "perplexity": perplexity.value,
        "interval": perplexity.interval,
        "gain": {
            "nats_per_sequence": nats.value,
            "nats_interval": nats.interval,
            "percent": percent.value,
            "interval": percent.interval,
            "ceiling_percent": ceiling,
        },
        "beyond_resampling": {"percent": beyond.value, "interval": beyond.interval},
        "origins": float(found["origins"].mean()),
        "resampled": float(found["resampled"].mean()),
        "verdict": _verdict(percent, beyond),
    }


def sampler_words(sampler: Sequential, chunk: int | None = None) -> str:
    """Name the sampler whose law the certificate is of.

    >>> sampler_words(Sequential(particles=64, check_every=5))
    'sequential Monte Carlo, N = 64, a look every 5 tokens, resampled below 0.5 N by strata'
    """
    where = "" if chunk is None else f" chunk by chunk, m = {chunk}"
    how = f"a look every {sampler.check_every} tokens, resampled below {sampler.share:g} N by {sampler.resampling}"
    return f"sequential Monte Carlo{where}, N = {sampler.particles}, {how}"


def _verdict(percent: Measurement, beyond: Measurement) -> str:
    """Say what the intervals show."""
    if percent.low is None or percent.high is None or beyond.low is None or beyond.high is None:
        return "the certificate has no interval: there is one document, or a text that the sampler cannot write"
    if percent.low <= 0:
        return "no gain of sequential Monte Carlo over the base is shown"
    if beyond.high < 0:
        return "plain resampling certifies more"
    return "no difference from plain resampling is shown" if beyond.low <= 0 else ""
