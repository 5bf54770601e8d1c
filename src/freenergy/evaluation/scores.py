"""What every number about a residual model is made of: windows with n candidates each, the true continuation first.

    Scored [W, n]:   log_base, energy, and log_weight = −E, since the candidates are draws of the base

All of an evaluation is computed from one pass over the candidates. What is slow to make is kept below the folder of the
evaluation in shards that are written atomically, and what was scored before a crash is not scored again:

    windows/<who>/      log P of windows' own texts, by the base and each baseline, some windows per shard
    certified/<who>/    the same of each baseline on the windows of the residual model
    rungs/<name>/       the same of the rungs below the base in use, on the windows that all rungs are compared on
    scores/             log P_LM and E of candidates, some windows per shard
    positions/          log P of each token, one window per shard (``evaluation.positions``)

Legend: <who> is ``base``, or the fingerprint of a baseline's name, since a baseline may be called base.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from freenergy.core.files import RERUN, corruption_as_user_error, fingerprint, read_tensors, write_tensors
from freenergy.core.progress import Progress
from freenergy.core.roles import LanguageModel
from freenergy.core.scored import Scored
from freenergy.corpus import Windows
from freenergy.lm.sample_only import relative_log_prob
from freenergy.models.residual import Residual
from freenergy.training.feature_cache import FeatureCache

WINDOWS = 4  # whose candidates are scored at once
_BATCH = 32


def scored_chunks(
    model: Residual, cache: FeatureCache, folder: Path, progress: Progress, *, rows: int = 256
) -> Iterator[Scored]:
    """Score the windows chunk by chunk: all of them may be more than memory holds."""
    with progress.track("energies of candidates", len(cache.contrast), "windows") as advance:
        for chunk in cache.chunks():
            write_scores(model, cache, folder, chunk, rows)
            numbers = read_tensors(scores_path(folder, chunk))
            log_base, energy = numbers["log_base"], numbers["energy"]
            yield Scored(x=cache.contrast.all(chunk), log_base=log_base, log_proposal=log_base, energy=energy)
            advance(len(chunk))


def scores_path(folder: Path, chunk: Int[Tensor, " chunk"]) -> Path:
    """Where the scores of a chunk are kept."""
    return folder / f"{int(chunk[0]):05d}.safetensors"


def write_scores(model: Residual, cache: FeatureCache, folder: Path, chunk: Int[Tensor, " chunk"], rows: int) -> None:
    """Score one chunk of windows, unless that was done."""
    path = scores_path(folder, chunk)
    if path.is_file():
        return
    x = cache.contrast.all(chunk)
    store = cache.contrast.store
    of_draws, of_data = store.draws(chunk, x.contexts).log_base, store.data_log_prob(chunk)
    of_data = relative_log_prob(model.base, x.candidates(slice(0, 1))) if of_data is None else of_data.unsqueeze(1)
    numbers = {
        "log_base": torch.cat([of_data, of_draws], dim=1),
        "energy": cache.energies(model.energy, chunk, rows),
        "lengths": x.lengths.double(),
    }
    write_tensors(path, numbers)


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


def log_probs_folder(folder: Path, baseline: str | None, *, is_certified: bool = False) -> Path:
    """Of the base (None) or of a baseline; on the residual model's windows if ``is_certified``."""
    who = "base" if baseline is None else fingerprint(baseline)
    return folder / ("certified" if is_certified else "windows") / who


def write_log_probs(lm: LanguageModel, windows: Windows, some: Integer[np.ndarray, " some"], path: Path) -> None:
    """log P of the true continuations of some windows, unless that was done."""
    if not path.is_file():
        log_p = lm.log_prob(windows.continuations(some))[:, 0].double().cpu()
        write_tensors(path, {"log_prob": log_p.contiguous()})
