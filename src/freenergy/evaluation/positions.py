"""Where in a continuation the residual model gains (Fig. 1 of Deng et al. 2020).

    log P(x_t | c, x_<t) = log P_LM(x_t | c, x_<t) + log Z(c, x_≤t) − log Z(c, x_<t)        (Eq. 5)
    gain at t = 100 · (1 − exp(−mean of (log P − log P_LM)))

Each log Z is estimated from completions that the base draws (``partition.step_log_probs``). That is L times the draws
of a perplexity, so it is done for few windows; each is kept on disk when it is done.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from safetensors.torch import save_file
from torch import Tensor

from freenergy.core.files import atomic_write, read_tensors
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, SequenceSpace
from freenergy.evaluation.perplexity import measured_percent, ratio
from freenergy.models.residual import Residual
from freenergy.partition import step_log_probs


def by_position(
    model: Residual,
    x: Continuations,
    documents: Integer[np.ndarray, " B"],
    space: SequenceSpace,
    draws: int,
    folder: Path,
    rng: Rng,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Rows with ``position`` (from 1), perplexities of ``base`` and ``joint``, ``gain_percent`` and its interval."""
    steps = []
    with progress.track("gain by position", x.shape[0], "windows") as advance:
        for b in range(x.shape[0]):
            write_position(model, x[b : b + 1], space, draws, position_path(folder, b), rng.child(b))
            steps.append(read_tensors(position_path(folder, b)))
            advance(1)
    longest = max((len(found["base"]) for found in steps), default=0)
    return [_row(t, steps, documents) for t in range(longest)]


def position_path(folder: Path, b: int) -> Path:
    """Where the steps of a window are kept, below the folder of the evaluation."""
    return folder / "positions" / f"{b:05d}.safetensors"


def write_position(model: Residual, x: Continuations, space: SequenceSpace, draws: int, path: Path, rng: Rng) -> None:
    """Write log P_LM and log P of each token of one window, unless they are there."""
    if not path.is_file():
        # exact at the last place where all tokens of the vocabulary cost no more than the draws of the other places
        exact_last = model.base.vocab_size <= space.length * draws
        found = step_log_probs(model, x, space, rng, draws=draws, exact_last=exact_last)
        with atomic_write(path) as aside:
            save_file({"base": found.log_base[found.mask], "joint": found.estimate[found.mask]}, aside)


def _row(t: int, steps: list[dict[str, Tensor]], documents: Integer[np.ndarray, " B"]) -> dict[str, Any]:
    """One position, over the windows that reach it."""
    there = [b for b, found in enumerate(steps) if len(found["base"]) > t]
    d = np.unique(documents[there], return_inverse=True)[1]
    base, joint = (
        np.bincount(d, torch.stack([steps[b][name][t] for b in there]).numpy()) for name in ("base", "joint")
    )
    n = np.bincount(d).astype(np.float64)
    gain = measured_percent(joint - base, n)
    return {
        "position": t + 1,
        "base": ratio(base, n).value,
        "joint": ratio(joint, n).value,
        "gain_percent": gain.value,
        "interval": gain.interval,
        "windows": len(there),
    }
