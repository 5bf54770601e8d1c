"""The weights of a local mix, fitted to held-out text by Newton's steps.

    min over w of   − mean over places of log P(x_t | h) + λ · ‖w‖² / 2,
    slope = mean of E_P φ − φ(x_t) + λ w,      curvature = mean of Cov_P φ + λ,      P ∝ P_LM · e^{w · φ}

which is convex. The text is held out, since the counts know by heart what they were counted on. φ has the dense terms
a = log P_LM (also times the entropy) and b = log p_1, and the sparse ones s, so sums over the vocabulary are those of
the dense part, corrected at the cells (row, token) that have sparse terms: with d = (1 + w_a) a + w_b b,

    Σ_v e^{d(v) + w · s(v)} f(v) = Σ_v e^{d(v)} f(v) + Σ_cells (e^{w · s} − 1) e^d f,      f = 1, a, b, a², a b, b²

Legend: m places, V vocabulary, C cells, F terms, D of them dense and S sparse.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float64, Int64
from scipy.optimize import minimize
from scipy.sparse import csr_array

from freenergy.core.progress import Progress, Silent
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.lm.adapted import ENTROPY, UNIGRAM, relative_entropy
from freenergy.lm.local_counts import LocalCounts
from freenergy.lm.local_terms import LocalState, LocalTerms
from freenergy.lm.stepping import begin, started

_SILENT = Silent()
_ROWS = 64  # windows that are read at once


class _Places(NamedTuple):
    """Places of held-out text: what the base predicts there, and every sparse term."""

    log_p: np.ndarray  # [m, V], in the precision of the base
    entropy: Float64[np.ndarray, " m"]  # of the base's prediction, 1 where it is uniform
    datum: Int64[np.ndarray, " m"]  # the token that came
    row: Int64[np.ndarray, " C"]  # of each cell, ascending
    token: Int64[np.ndarray, " C"]
    sparse: csr_array  # [C, S]
    of_datum: Float64[np.ndarray, "m S"]


class LocalFit(NamedTuple):
    """Weights by name, and how they were found; nats per token are of the text that they were fitted to."""

    weights: dict[str, float]
    places: int
    iterations: int
    has_converged: bool
    nats_before: float
    nats_fitted: float

    def summary(self) -> dict[str, Any]:
        """Return the fit as JSON-like values."""
        return {
            "places": self.places,
            "iterations": self.iterations,
            "converged": self.has_converged,
            "nats_per_token_before": self.nats_before,
            "nats_per_token_fitted": self.nats_fitted,
            "weights": self.weights,
        }


def fit_local_mix(
    base: LanguageModel,
    counts: LocalCounts,
    names: Sequence[str],
    x: Continuations,
    *,
    l2: float,
    progress: Progress = _SILENT,
) -> LocalFit:
    """Returns the weights of these names that make the continuations ``x`` most likely."""
    problem = LocalProblem(base, counts, names, x, l2=l2, progress=progress)
    start = np.zeros(len(names))
    with progress.track("fitting the local mix", None, "passes") as advance:
        problem.on_pass = lambda: advance(1)
        before = problem.value_and_slope(start)[0]
        found = minimize(
            problem.value_and_slope, start, jac=True, hess=problem.curvature, method="trust-exact",
            options={"gtol": 1e-7, "maxiter": 100},
        )  # fmt: skip
    penalty = l2 * float(found.x @ found.x) / 2
    return LocalFit(
        weights={name: float(w) for name, w in zip(names, found.x, strict=True)},
        places=problem.num_places,
        iterations=int(found.nit),
        has_converged=bool(np.abs(found.jac).max() < 1e-4),
        nats_before=before,
        nats_fitted=float(found.fun) - penalty,
    )


@final
class LocalProblem:
    """What is made small, with its slope and curvature; weights follow ``names``, the first of which is log p."""

    def __init__(
        self,
        base: LanguageModel,
        counts: LocalCounts,
        names: Sequence[str],
        x: Continuations,
        *,
        l2: float,
        progress: Progress = _SILENT,
    ) -> None:
        self.l2 = l2
        self.on_pass: Callable[[], object] = lambda: None
        self.log_unigram = counts.log_unigram
        self.tempers, self.has_unigram = ENTROPY in names, UNIGRAM in names
        self.num_dense = 1 + self.tempers + self.has_unigram
        terms = [LocalTerms(counts, {name: 1.0}) for name in names[self.num_dense :]]
        self.parts: list[_Places] = []
        with progress.track("reading held-out text", float(len(x.contexts)), "windows") as advance:
            for b in range(0, len(x.contexts), _ROWS):
                some = x[b : b + _ROWS].trimmed()
                self.parts += _read(base, counts, terms, some)
                advance(float(len(some.contexts)))
        self.num_places = sum(len(part.datum) for part in self.parts)
        self._last: tuple[bytes, float, np.ndarray, np.ndarray] | None = None

    def value_and_slope(self, w: Float64[np.ndarray, " F"]) -> tuple[float, Float64[np.ndarray, " F"]]:
        """Returns what is made small, and its gradient."""
        value, slope, _ = self._at(w)
        return value, slope

    def curvature(self, w: Float64[np.ndarray, " F"]) -> Float64[np.ndarray, "F F"]:
        """Returns its Hessian."""
        return self._at(w)[2]

    def _at(self, w: Float64[np.ndarray, " F"]) -> tuple[float, np.ndarray, np.ndarray]:
        """Returns all three from one pass, kept until another w is asked for."""
        if self._last is None or self._last[0] != w.tobytes():
            value, slope, curvature, F = 0.0, np.zeros(len(w)), np.zeros((len(w), len(w))), len(w)
            for part in self.parts:
                more = self._of_part(part, w)
                value, slope, curvature = value + more[0], slope + more[1], curvature + more[2]
            M, penalty = self.num_places, self.l2 * float(w @ w) / 2
            kept = value / M + penalty, slope / M + self.l2 * w, curvature / M + self.l2 * np.eye(F)
            self._last = (w.tobytes(), *kept)
            self.on_pass()
        return self._last[1:]

    def _of_part(self, part: _Places, w: Float64[np.ndarray, " F"]) -> tuple[float, np.ndarray, np.ndarray]:
        """Returns Σ over places of −log P, of its gradient and of its Hessian."""
        D, m, maps = self.num_dense, len(part.datum), self._maps(part)
        u, X = self._one_a_b(part, part.row, part.token), part.sparse.toarray()
        moments, top, e = self._dense_part(part, w[:D] @ maps)
        e_full = e * np.exp(X @ w[D:])
        products = np.einsum("ci,cj->cij", u, u).reshape(len(u), 9)
        moments += (_by_row(e_full - e, part.row, m) @ products).reshape(m, 3, 3)
        Z, E = moments[:, 0, 0], moments / moments[:, :1, :1]
        p = e_full / Z[part.row]
        phi = np.concatenate([np.einsum("cdi,ci->cd", maps[part.row], u[:, 1:]), X], axis=1)
        mean_dense = np.einsum("mdi,mi->md", maps, E[:, 0, 1:])
        mean = np.concatenate([mean_dense, _by_row(p, part.row, m) @ X], axis=1)
        second = phi.T @ (p[:, None] * phi)  # where a sparse term is involved, the cells are all there is
        second[:D, :D] = np.einsum("mdi,mij,mej->de", maps, E[:, 1:, 1:], maps)
        u_x = self._one_a_b(part, np.arange(m), part.datum)
        phi_x = np.concatenate([np.einsum("mdi,mi->md", maps, u_x[:, 1:]), part.of_datum], axis=1)
        value = (np.log(Z) + top - u_x[:, 1] - phi_x @ w).sum()
        return float(value), (mean - phi_x).sum(0), second - mean.T @ mean

    def _maps(self, part: _Places) -> Float64[np.ndarray, "m D 2"]:
        """Returns, for every place, the matrix that makes the dense terms of (a, b)."""
        ones, nothing = np.ones(len(part.datum)), np.zeros(len(part.datum))
        rows = [[ones, nothing]] + [[part.entropy, nothing]] * self.tempers + [[nothing, ones]] * self.has_unigram
        return np.array(rows).transpose(2, 0, 1)

    def _one_a_b(self, part: _Places, row: np.ndarray, token: np.ndarray) -> Float64[np.ndarray, "n 3"]:
        """Returns (1, a, b) at some tokens of some places."""
        a, b = part.log_p[row, token].astype(np.float64), self.log_unigram[token]
        return np.stack([np.ones(len(a)), a, b], axis=1)

    def _dense_part(
        self, part: _Places, change: Float64[np.ndarray, "m 2"]
    ) -> tuple[Float64[np.ndarray, "m 3 3"], Float64[np.ndarray, " m"], Float64[np.ndarray, " C"]]:
        """Returns Σ_v e^d (1, a, b)(1, a, b)ᵀ of every place, the largest d, taken off, and e^d at the cells."""
        a, b = torch.from_numpy(part.log_p).double(), torch.from_numpy(self.log_unigram)
        by_a, by_b = torch.from_numpy(change).unsqueeze(2).unbind(1)
        d = (1 + by_a) * a + by_b * b
        top = d.amax(1)
        e = (d - top.unsqueeze(1)).exp_()
        ea, bs = e * a, torch.stack([torch.ones_like(b), b, b * b], dim=1)
        (one, B, BB), (A, AB, _) = (e @ bs).unbind(1), (ea @ bs).unbind(1)
        moments = torch.stack([one, A, B, A, (ea * a).sum(1), AB, B, AB, BB], dim=1).unflatten(1, (3, 3))
        return moments.numpy(), top.numpy(), e.numpy()[part.row, part.token]


def _by_row(values: Float64[np.ndarray, " C"], row: Int64[np.ndarray, " C"], m: int) -> csr_array:
    """Returns the matrix that sums cells, times their values, over each of m rows."""
    return csr_array((values, (row, np.arange(len(row)))), shape=(m, len(row)))


@torch.no_grad()
def _read(base: LanguageModel, counts: LocalCounts, terms: Sequence[LocalTerms], x: Continuations) -> Iterator[_Places]:
    """Yields the places of some windows, step by step."""
    contexts = started(x.contexts, base.eos)
    stepper, state = begin(base, contexts, 1, x.tokens.shape[2]), LocalState(counts, contexts, x.tokens.shape[2])
    log_p = stepper.first()
    for t in range(x.tokens.shape[2]):
        if t:
            log_p = stepper.step(x.tokens[:, :, t - 1].to(log_p.device)).squeeze(1)
            state.advance(x.tokens[:, :, t - 1])
        is_there = x.mask[:, 0, t].cpu()
        yield _places(log_p.cpu()[is_there], is_there.numpy(), x.tokens[:, 0, t].cpu()[is_there].numpy(), state, terms)


def _places(
    log_p: torch.Tensor,
    is_there: np.ndarray,
    datum: Int64[np.ndarray, " m"],
    state: LocalState,
    terms: Sequence[LocalTerms],
) -> _Places:
    """Returns the rows of a step that have a token there, with all cells of all terms brought together."""
    m, V = log_p.shape
    number = np.cumsum(is_there) - 1  # of a row among those
    columns = []
    for f, term in enumerate(terms):
        row, token, value = term.cells(state, slice(None))
        kept = is_there[row]
        columns.append((number[row[kept]] * V + token[kept], np.full(int(kept.sum()), f), value[kept]))
    at, term_of, value = (np.concatenate(each) for each in zip(*columns, strict=True)) if columns else _NO_CELLS
    own = np.arange(m) * V + datum  # cells of the tokens that came are there, with or without terms
    cells, inverse = np.unique(np.concatenate([at, own]), return_inverse=True)
    sparse = csr_array((value, (inverse[: len(at)], term_of)), shape=(len(cells), len(terms)))
    of_datum = sparse[inverse[len(at) :]].toarray()
    row, token = np.divmod(cells, V)
    return _Places(log_p.numpy(), relative_entropy(log_p.double()).numpy(), datum, row, token, sparse, of_datum)


_NO_CELLS = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
