"""What a joint model gains over its base on held-out text, for sure.

    g = −E(x) − log[(e^{−E(x)} + Σ_{i<n} e^{−E(x_i)}) / n],   x_i ~ P_LM(· | c)
    G = Σ_d g_d / Σ_d t_d nats a token,       perplexity of the joint = perplexity of the base · exp(−G)

In expectation the certified perplexity is an upper bound on that of the text which importance resampling with n
candidates emits (``partition.certificate``). g is a difference between joint and base on the same window, so its
interval over documents d (of t_d tokens) is a paired one. No g is above log n: few candidates certify little.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from freenergy.evaluation.perplexity import Measurement, rate, ratio
from freenergy.partition import certified_gain, effective_sample_size
from freenergy.progress import Progress
from freenergy.protocols import LanguageModel
from freenergy.storage import whole
from freenergy.training.feature_cache import FeatureCache

_NEAR_CEILING = 0.8
_MOST_NATS = 700.0  # a token: e to more is no number


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedReport:
    """Base and joint on the same windows; perplexities are per token."""

    base: Measurement
    certified: Measurement
    nats_per_sequence: Measurement
    percent: Measurement  # less perplexity than the base
    nce_accuracy: float  # of E < 0 for real text and E > 0 for the base's, each half
    pair_accuracy: float
    ess: float  # mean effective number of the n − 1 draws
    largest_share: float  # mean share of the heaviest draw
    candidates: int
    windows: int
    documents: int
    ceiling_percent: float  # what log n nats a sequence would be
    note: str

    def to_json(self) -> dict[str, Any]:
        """As JSON-like values."""
        return asdict(self)


def score_windows(
    base: LanguageModel, energy: nn.Module, cache: FeatureCache, folder: Path, progress: Progress, *, rows: int = 256
) -> dict[str, Tensor]:
    """log P_LM of each window's own continuation, and the energies of it (first) and of its draws; kept on disk.

    What was scored before a crash is not scored again.
    """
    found = []
    with progress.track("energies of candidates", len(cache.contrast), "windows") as advance:
        for chunk in cache.chunks():
            path = folder / f"{int(chunk[0]):05d}.safetensors"
            if not path.is_file():
                data = cache.contrast.all(chunk).candidates(slice(0, 1))
                numbers = {
                    "log_base": base.log_prob(data)[:, 0].double().cpu(),
                    "energy": cache.energies(energy, chunk, rows),
                    "tokens": data.lengths[:, 0].double(),
                }
                with whole(path) as aside:
                    save_file(numbers, aside)
            found.append(load_file(path))
            advance(len(chunk))
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def certify(
    log_base: Float[Tensor, " W"], energy: Float[Tensor, "W n"], tokens: Float[Tensor, " W"], documents: np.ndarray
) -> CertifiedReport:
    """The report on W windows, n candidates each, the true continuation first."""
    W, n = energy.shape
    gain = certified_gain(energy[:, :1], energy[:, 1:])
    d = np.unique(documents, return_inverse=True)[1]
    log_p, g, t, count = (
        np.bincount(d, values.numpy()) for values in (log_base, gain, tokens, torch.ones(W, dtype=torch.float64))
    )
    weights = -energy[:, 1:]
    real, drawn = energy[:, :1], energy[:, 1:]
    nats = _around(rate(g, count), lambda value: value)
    return CertifiedReport(
        base=ratio(log_p, t),
        certified=ratio(log_p + g, t),
        nats_per_sequence=nats,
        percent=_around(rate(g, t), lambda value: 100 * (1 - math.exp(min(-value, _MOST_NATS)))),
        nce_accuracy=(_share_below(real, torch.zeros(())) + _share_below(-drawn, torch.zeros(()))) / 2,
        pair_accuracy=_share_below(real, drawn),
        ess=effective_sample_size(weights).mean().item(),
        largest_share=weights.softmax(1).amax(1).mean().item(),
        candidates=n,
        windows=W,
        documents=len(t),
        ceiling_percent=100 * (1 - math.exp(-math.log(n) * W / t.sum())),
        note=_note(nats, n),
    )


def _around(found: tuple[float | None, float | None], scale: Any) -> Measurement:
    """A rate and its interval on another scale that rises with it."""
    H, reach = found
    if H is None or reach is None:
        return Measurement(None if H is None else scale(H), None, None)
    return Measurement(scale(H), scale(H - reach), scale(H + reach))


def _share_below(values: Tensor, others: Tensor) -> float:
    return ((values < others).double() + (values == others).double() / 2).mean().item()


def _note(gain: Measurement, n: int) -> str:
    value = gain.value or 0.0
    if value > _NEAR_CEILING * math.log(n):
        return f"the gain is near log {n} = {math.log(n):.2f} nats, the most that {n} candidates can certify"
    if gain.low is not None and gain.low <= 0:
        return "the interval holds 0: no gain is shown"
    return ""
