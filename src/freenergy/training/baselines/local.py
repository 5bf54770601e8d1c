"""The local counterparts of linear energies: their features, used place by place.

The base's own states (a probe), trained on text:

    f(v | h) = (U · A · z(h))_v + (a + b · H(p) / log V) · log p(v)

z are the hidden states of the layers that a probe energy reads, each scaled to mean 0 and variance 1; p is the law that
is corrected, H its entropy: the second term tempers it, more or less where it is unsure. U, a and b start at 0.

Counts of the training text and of the window (n-grams):

    f(v | h) = Σ_k w_k · log p_k(v | h) + w · log(1 + c(v)) + w · [c(v) > 0] + w · log p(v)

p_k is the n-gram model of order k = 1 … n counted on the training text, c(v) how often v stands in h. The weights start
at 0 and are the maximum of the likelihood of validation windows, since the counts know the training text by heart:

    max over w of   mean over places of log P(x_t | h) − λ · ‖w‖² / 2

which is concave in w. There are few weights and each look at them costs a sum over the vocabulary at every place, so
Newton's steps (with a trust region) take the place of many small ones.

Legend: m places, F features, V vocabulary, K layers of width H, r rank.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from safetensors.torch import save_file
from scipy.optimize import minimize
from torch import Tensor, nn

from freenergy.core.files import atomic_write, read_tensors
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences
from freenergy.lm.ngram import NgramLM
from freenergy.training.baselines.residual import Correction, Places, Reading, before, targets

_L2 = 1e-6  # keeps the maximum unique where two features say the same
_NUMBERS = 2**23  # of all features of some places, held at once: 64 MB
_WEIGHTS = "weights.safetensors"
_ROWS = 64


@final
class LocalProbe(nn.Module):
    """A low-rank map from hidden states to the vocabulary, and a temperature."""

    def __init__(self, *, layers: int, width: int, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(rank, layers * width))
        self.U = nn.Parameter(torch.zeros(vocab_size, rank))
        self.a_b = nn.Parameter(torch.zeros(2))

    def start(self, rng: Rng) -> None:
        """Draw A; with U = 0 it says nothing yet."""
        rank, width = self.A.shape
        with torch.no_grad():
            self.A.copy_(rng.normal(rank, width) / math.sqrt(width))

    def forward(self, rows: Sequences, reading: Reading) -> Correction:
        """Returns f at places where log P is ``log_p``."""
        return lambda at, log_p: self.f(reading.states(at), log_p)

    def f(self, states: Float[Tensor, "m K H"], log_p: Float[Tensor, "m V"]) -> Float[Tensor, "m V"]:
        """f from states and from the law that is corrected."""
        z = nn.functional.layer_norm(states, states.shape[-1:]).flatten(1).to(self.A)
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        a, b = self.a_b
        tempered: Tensor = (a + b * entropy / math.log(log_p.shape[1])) * log_p
        return z @ self.A.T @ self.U.T + tempered

    def save(self, path: Path) -> None:
        """Write the weights, completely or not at all."""
        with atomic_write(path) as aside:
            save_file({name: weight.detach().contiguous() for name, weight in self.named_parameters()}, aside)

    @classmethod
    def open(cls, path: Path) -> "LocalProbe":
        """Read what ``save`` wrote."""
        weights = read_tensors(path)
        rank, width = weights["A"].shape
        probe = cls(layers=1, width=width, rank=rank, vocab_size=len(weights["U"]))
        probe.load_state_dict(weights)
        return probe


@final
class LocalNgram(nn.Module):
    """Weights of a few log-probabilities and counts."""

    def __init__(self, models: list[NgramLM]) -> None:
        super().__init__()
        self.models = models
        orders = [f"order {lm.order}" for lm in models]
        self.names = [*orders, "log(1 + count in the window)", "is in the window", "log p"]
        self.weight = nn.Parameter(torch.zeros(len(self.names), dtype=torch.float64))

    def forward(self, rows: Sequences, reading: Reading) -> Correction:
        """Returns f at places where log P is ``log_p``."""

        def f(at: Places, log_p: Tensor) -> Tensor:
            total = torch.zeros_like(log_p, dtype=torch.float64)
            for w, feature in zip(self.weight, self._features(rows, at, log_p), strict=True):
                total = total + w * feature
            return total

        return f

    def features(self, rows: Sequences, at: Places, log_p: Float[Tensor, "m V"]) -> Float64[Tensor, "F m V"]:
        """All features, float64."""
        return torch.stack(list(self._features(rows, at, log_p)))

    def _features(self, rows: Sequences, at: Places, log_p: Float[Tensor, "m V"]) -> Iterator[Tensor]:
        """One at a time: together they fill the memory."""
        read = before(rows, at)
        for lm in self.models:
            yield lm.next_log_probs(read).double()
        count = torch.zeros(log_p.shape, dtype=torch.float64, device=log_p.device)
        count.scatter_add_(1, read.tokens, read.mask.double())
        yield count.log1p()
        yield (count > 0).double()
        yield log_p.double()

    def save(self, folder: Path) -> None:
        """Write the counts and the weights, completely or not at all."""
        with atomic_write(folder) as aside:
            for lm in self.models:
                lm.save_pretrained(aside / f"order-{lm.order}")
            save_file({"weight": self.weight.detach()}, aside / _WEIGHTS)

    @classmethod
    def open(cls, folder: Path, order: int) -> "LocalNgram":
        """Read what ``save`` wrote."""
        ngram = cls([NgramLM.from_pretrained(folder / f"order-{k}") for k in range(1, order + 1)])
        ngram.load_state_dict(read_tensors(folder / _WEIGHTS))
        return ngram


@final
class _LocalProblem:
    """Minus the mean log-likelihood of validation windows, with its slope and curvature."""

    def __init__(
        self,
        ngram: LocalNgram,
        read: Callable[[Sequences], Callable[[Places], Tensor]],
        x: Continuations,
        progress: Callable[[], None],
    ) -> None:
        self.ngram, self.progress = ngram, progress
        parts = [targets(x[b : b + _ROWS]) for b in range(0, len(x.contexts), _ROWS)]
        self.parts = [(rows, at, tokens, read(rows)) for rows, at, tokens, _ in parts]
        self.places = sum(len(tokens) for _, _, tokens, _ in parts)
        self._last: tuple[bytes, float, np.ndarray, np.ndarray] | None = None

    def value_and_slope(self, w: Float64[np.ndarray, " F"]) -> tuple[float, Float64[np.ndarray, " F"]]:
        """What is made small, and its gradient."""
        value, slope, _ = self._at(w)
        return value, slope

    def curvature(self, w: Float64[np.ndarray, " F"]) -> Float64[np.ndarray, "F F"]:
        """Its Hessian: the covariance of the features under P."""
        return self._at(w)[2]

    def _at(self, w: Float64[np.ndarray, " F"]) -> tuple[float, np.ndarray, np.ndarray]:
        """All three from one pass, kept until another w is asked for."""
        if self._last is None or self._last[0] != w.tobytes():
            self._last = (w.tobytes(), *self._pass(w))
        return self._last[1:]

    @torch.no_grad()
    def _pass(self, w: Float64[np.ndarray, " F"]) -> tuple[float, np.ndarray, np.ndarray]:
        F, weight = len(w), torch.from_numpy(w)
        value, slope, curvature = 0.0, torch.zeros(F).double(), torch.zeros(F, F).double()
        size = max(1, _NUMBERS // (F * self.ngram.models[0].vocab_size))
        for rows, places, all_tokens, log_probs in self.parts:
            for at, tokens in zip(places.split(size), all_tokens.split(size), strict=True):
                log_p = log_probs(at).double()
                phi = self.ngram.features(rows, at, log_p)
                score = log_p + torch.einsum("f,fmv->mv", weight, phi)
                log_z = score.logsumexp(1)
                value += float((log_z - score.gather(1, tokens.unsqueeze(1)).squeeze(1)).sum())
                weighted = phi * (score - log_z.unsqueeze(1)).exp()
                mean = weighted.sum(2)
                at_datum = phi.gather(2, tokens.view(1, -1, 1).expand(F, -1, 1)).squeeze(2)
                slope += (mean - at_datum).sum(1)
                curvature += weighted.flatten(1) @ phi.flatten(1).T - mean @ mean.T
        self.progress()
        M = self.places
        penalty, more = _L2 * float(w @ w) / 2, _L2 * np.eye(F)
        return value / M + penalty, slope.numpy() / M + _L2 * w, curvature.numpy() / M + more


def fit_ngram_weights(
    ngram: LocalNgram, read: Callable[[Sequences], Callable[[Places], Tensor]], x: Continuations, progress: Progress
) -> dict[str, Any]:
    """Set the weights to the maximum of the likelihood of ``x``; ``read`` is that of the law that is corrected."""
    with progress.track("fitting n-gram weights", None, "passes") as advance:
        problem = _LocalProblem(ngram, read, x, lambda: advance(1))
        start = np.zeros(len(ngram.names))
        before_fit = problem.value_and_slope(start)[0]
        found = minimize(
            problem.value_and_slope, start, jac=True, hess=problem.curvature, method="trust-exact",
            options={"gtol": 1e-7, "maxiter": 100},
        )  # fmt: skip
    with torch.no_grad():
        ngram.weight.copy_(torch.from_numpy(found.x))
    return {
        "places": problem.places,
        "iterations": int(found.nit),
        "converged": bool(np.abs(found.jac).max() < 1e-4),
        "nats_per_token_before": before_fit,
        "nats_per_token_fitted": float(found.fun),
        "weights": {name: float(w) for name, w in zip(ngram.names, found.x, strict=True)},
    }
