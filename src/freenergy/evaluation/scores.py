"""What every number about a residual model is made of: the scores of windows' own texts and of draws beside them.

    log w = log P_LM(x) − log q(x) − E(x)        q the law of the draws; log w = −E where q is P_LM
    log P(x) = log P_LM(x) − E(x) − log Z

All of an evaluation is computed from one pass: W windows, n candidates each, the true continuation first. The pass is
kept on disk chunk by chunk, and what was scored before a crash is not scored again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from safetensors.torch import save_file
from torch import Tensor, nn

from freenergy.core.files import RERUN, atomic_write, corruption_as_user_error, read_tensors
from freenergy.core.progress import Progress
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Windows
from freenergy.evaluation.perplexity import Counts
from freenergy.training.feature_cache import FeatureCache

_BATCH = 32


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScores:
    """W windows, n candidates each, the true continuation first; float64."""

    log_base: Float[Tensor, "W n"]
    energy: Float[Tensor, "W n"]
    lengths: Float[Tensor, "W n"]
    counts: Counts  # of the true continuations
    log_proposal: Float[Tensor, "W n"] | None = None  # None where the draws are the base's own

    @property
    def log_weight(self) -> Float[Tensor, "W n"]:
        """log P_LM − log q − E."""
        if self.log_proposal is None:
            return -self.energy
        return self.log_base - self.log_proposal - self.energy

    @property
    def log_score(self) -> Float[Tensor, "W n"]:
        """log P_LM − E: log P but for log Z."""
        return self.log_base - self.energy

    @property
    def draws(self) -> int:
        """How many draws there are beside each true continuation: n − 1."""
        return self.energy.shape[1] - 1


def score_windows(
    base: LanguageModel, energy: nn.Module, cache: FeatureCache, folder: Path, progress: Progress, *, rows: int = 256
) -> dict[str, Tensor]:
    """``log_base``, ``energy`` and ``lengths`` [W, n] of each window's own continuation (first) and of its draws."""
    found = list(scored_chunks(base, energy, cache, folder, progress, rows=rows))
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def scored_chunks(
    base: LanguageModel, energy: nn.Module, cache: FeatureCache, folder: Path, progress: Progress, *, rows: int = 256
) -> Iterator[dict[str, Tensor]]:
    """The same, one chunk of windows after the other: all of them may be more than memory holds."""
    with progress.track("energies of candidates", len(cache.contrast), "windows") as advance:
        for chunk in cache.chunks():
            write_scores(base, energy, cache, folder, chunk, rows)
            yield read_tensors(scores_path(folder, chunk))
            advance(len(chunk))


def scores_path(folder: Path, chunk: Int[Tensor, " chunk"]) -> Path:
    """Where the scores of a chunk are kept."""
    return folder / f"{int(chunk[0]):05d}.safetensors"


def write_scores(
    base: LanguageModel,
    energy: nn.Module,
    cache: FeatureCache,
    folder: Path,
    chunk: Int[Tensor, " chunk"],
    rows: int,
) -> None:
    """Score one chunk of windows, unless that was done."""
    path = scores_path(folder, chunk)
    if path.is_file():
        return
    x = cache.contrast.all(chunk)
    of_draws = cache.contrast.store.draws(chunk, x.contexts).log_base
    of_data = base.log_prob(x.candidates(slice(0, 1))).double().cpu()
    numbers = {
        "log_base": torch.cat([of_data, of_draws], dim=1),
        "energy": cache.energies(energy, chunk, rows),
        "lengths": x.lengths.double(),
    }
    with atomic_write(path) as aside:
        save_file(numbers, aside)


def window_log_probs(
    lm: LanguageModel,
    windows: Windows,
    rows: Integer[np.ndarray, " W"],
    folder: Path,
    label: str,
    progress: Progress,
) -> Float[np.ndarray, " W"]:
    """log P of the true continuations of these windows under a language model, kept on disk."""
    found, done = np.zeros(len(rows)), 0
    with progress.track(f"perplexity of {label}", len(rows), "windows") as advance:
        for path, some in log_prob_shards(rows, folder):
            write_log_probs(lm, windows, some, path)
            with corruption_as_user_error(path, RERUN):
                found[done : done + len(some)] = read_tensors(path)["log_prob"].reshape(len(some)).numpy()
            done += len(some)
            advance(len(some))
    return found


def log_prob_shards(
    rows: Integer[np.ndarray, " W"], folder: Path
) -> Iterator[tuple[Path, Integer[np.ndarray, " some"]]]:
    """The shards in which log-probs of these windows are kept, and the windows of each."""
    for first in range(0, len(rows), _BATCH):
        yield folder / f"{first:05d}.safetensors", rows[first : first + _BATCH]


def write_log_probs(lm: LanguageModel, windows: Windows, some: Integer[np.ndarray, " some"], path: Path) -> None:
    """log P of the true continuations of some windows, unless that was done."""
    if not path.is_file():
        log_p = lm.log_prob(windows.continuations(some))[:, 0].double().cpu()
        with atomic_write(path) as aside:
            save_file({"log_prob": log_p.contiguous()}, aside)
