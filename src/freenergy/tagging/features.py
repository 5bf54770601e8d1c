"""The classic CRF: a chain whose potentials are sums of weights of features.

    e_t(k) = Σ_{a ∈ attributes of t} w_{a,k},      A(j, k), start(k), end(k)  weights of pairs and ends
    min over w of   − Σ_s log p(y_s | x_s) + l1 · Σ |w| + l2 · Σ w² / 2

Convex, so L-BFGS finds the optimum without learning rate or randomness. With L1, w = u − v with u, v ≥ 0, and bounds of
L-BFGS-B give exact zeros. A weight exists for each attribute and tag that occur together in the training sentences.

    ∂/∂w_{a,k} = Σ_t X_ta · (p(y_t = k | x) − 1(y_t = k)) + l2 · w_{a,k}

Legend: N words of all sentences, A attributes, X [N, A] sparse zeros and ones, W [A, K].
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, corruption_as_user_error, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.structured import Allowed, LinearChain
from freenergy.tagging.laws import ChainLaw
from freenergy.tagging.reading import labels_of
from freenergy.tagging.sentences import Sentence, TagSet
from freenergy.tagging.settings import FeatureTagger
from freenergy.tagging.templates import attributes, parse

_WEIGHTS, _ATTRIBUTES = "weights.safetensors", "attributes.json"
_BLOCK = 256  # sentences per chain, of about the same length


@final
class FeatureModel:
    """A fitted chain of features."""

    def __init__(
        self, settings: FeatureTagger, attribute_numbers: dict[str, int], weights: dict[str, Tensor],
        allowed: Allowed | None,
    ) -> None:  # fmt: skip
        self.settings, self.numbers, self.weights, self.allowed = settings, attribute_numbers, weights, allowed
        self._templates = parse(settings.templates)

    def law(self, sentences: Sequence[Sentence]) -> ChainLaw:
        """Returns the law of the tags of a batch."""
        X = attribute_matrix(sentences, self._templates, self.numbers)
        lengths = [len(sentence) for sentence in sentences]
        e = pad_sequence(list(torch.from_numpy(X @ self.weights["emit"].numpy()).split(lengths)), batch_first=True)
        w, counts = self.weights, torch.tensor(lengths)
        chain = LinearChain(e, w["transitions"], start=w["start"], end=w["end"], lengths=counts, allowed=self.allowed)
        return ChainLaw(chain, chain, counts)

    def save(self, folder: Path) -> None:
        """Write the weights and the names of the attributes."""
        write_json(folder / _ATTRIBUTES, {"attributes": list(self.numbers)})
        with atomic_write(folder / _WEIGHTS) as aside:
            save_file({name: each.contiguous() for name, each in self.weights.items()}, aside)

    @classmethod
    def load(cls, folder: Path, settings: FeatureTagger, tags: TagSet, allowed: Allowed | None) -> "FeatureModel":
        """Read what ``save`` has written."""
        names = read_json(folder / _ATTRIBUTES)["attributes"]
        with corruption_as_user_error(folder / _WEIGHTS, "delete its folder and train again"):
            weights = load_file(folder / _WEIGHTS)
        return cls(settings, {name: number for number, name in enumerate(names)}, weights, allowed)


def attribute_matrix(sentences: Sequence[Sentence], templates: Any, numbers: dict[str, int]) -> Any:
    """Returns X, float32; attributes without a number are left out."""
    ends, found = [0], list[int]()
    for sentence in sentences:
        for own in attributes(sentence, templates):
            found += [number for name in own if (number := numbers.get(name)) is not None]
            ends.append(len(found))
    ones = np.ones(len(found), dtype=np.float32)
    return csr_matrix((ones, np.array(found, dtype=np.int32), np.array(ends)), shape=(len(ends) - 1, len(numbers)))


def fit_features(
    settings: FeatureTagger, sentences: Sequence[Sentence], tags: TagSet, allowed: Allowed | None, progress: Progress,
    *, partial: bool = False,
) -> tuple[FeatureModel, dict[str, int]]:  # fmt: skip
    """Fit the weights; returns the model, and how the fit went."""
    ordered = sorted(sentences, key=len)
    templates = parse(settings.templates)
    counts = Counter(name for sentence in ordered for own in attributes(sentence, templates) for name in own)
    numbers = {
        name: number for number, name in enumerate(sorted(n for n, c in counts.items() if c >= settings.min_count))
    }
    if not numbers:
        raise UserError(f"no attribute occurs {settings.min_count} times: set tagger.min_count lower")
    loss = _Objective(attribute_matrix(ordered, templates, numbers), ordered, tags, allowed, partial)
    with progress.track("fitting the chain", settings.iterations, "iterations") as advance:
        w, iterations = _minimise(loss, settings, lambda value: advance(1, f"{value / loss.words:.4f} nats per word"))
    weights = loss.weights(w)
    found = {"attributes": len(numbers), "weights": len(w), "not_zero": int((w != 0).sum()), "iterations": iterations}
    return FeatureModel(settings, numbers, weights, allowed), found


class _Block(NamedTuple):
    rows: slice
    lengths: Tensor
    y: Tensor
    sets: Tensor | None


@final
class _Objective:
    """− Σ log p(y | x) and its gradient in a flat vector: observed weights of W, then transitions, start, end."""

    def __init__(
        self, X: Any, sentences: Sequence[Sentence], tags: TagSet, allowed: Allowed | None, partial: bool
    ) -> None:
        self.X, self.Xt, self.K, self.allowed = X, X.T.tocsr(), len(tags), allowed
        self.words, self.blocks, row = X.shape[0], list[_Block](), 0
        for first in range(0, len(sentences), _BLOCK):
            some = sentences[first : first + _BLOCK]
            labels, lengths = labels_of(some, tags, partial=partial), torch.tensor([len(one) for one in some])
            end = row + int(lengths.sum())
            self.blocks.append(_Block(slice(row, end), lengths, labels.y, labels.sets))
            row = end
        self.observed = self._observed(partial)
        self.size = len(self.observed) + self.K * (self.K + 2)

    def _observed(self, partial: bool) -> Any:
        """Returns the flat places in W of attributes and tags that occur together."""
        one_hot = np.zeros((self.words, self.K), dtype=np.float32)
        for block in self.blocks:
            kept = torch.arange(block.y.shape[1]) < block.lengths.unsqueeze(1)
            sets = (
                torch.nn.functional.one_hot(block.y.clamp(min=0), self.K).bool() if block.sets is None else block.sets
            )
            one_hot[block.rows] = sets[kept].float().numpy()
        return np.flatnonzero((self.Xt @ csr_matrix(one_hot)).toarray().ravel())

    def weights(self, w: Float[np.ndarray, " size"]) -> dict[str, Tensor]:
        """Returns the vector as W, transitions, start and end, float32."""
        emit = np.zeros(self.X.shape[1] * self.K, dtype=np.float32)
        emit[self.observed] = w[: len(self.observed)]
        rest = torch.from_numpy(w[len(self.observed) :].astype(np.float32))
        pairs, start, end = rest.split([self.K**2, self.K, self.K])
        return {"emit": torch.from_numpy(emit).view(-1, self.K), "transitions": pairs.view(self.K, self.K).clone(),
                "start": start.clone(), "end": end.clone()}  # fmt: skip

    def __call__(self, w: Float[np.ndarray, " size"]) -> tuple[float, Float[np.ndarray, " size"]]:
        """Returns the value and the gradient."""
        own = self.weights(w)
        E = self.X @ own.pop("emit").numpy()
        total, slope, ends = 0.0, np.empty_like(E), {name: each.requires_grad_() for name, each in own.items()}
        for block in self.blocks:
            e = torch.from_numpy(E[block.rows]).requires_grad_()
            rows = pad_sequence(list(e.split(block.lengths.tolist())), batch_first=True)
            chain = LinearChain(
                rows,
                ends["transitions"],
                start=ends["start"],
                end=ends["end"],
                lengths=block.lengths,
                allowed=self.allowed,
            )
            log_p = chain.log_prob(block.y) if block.sets is None else chain.partial_log_prob(block.sets)
            value = -log_p.double().sum()
            value.backward()
            total += value.item()
            assert e.grad is not None, "it has just been computed"
            slope[block.rows] = e.grad.numpy()
        flat = (self.Xt @ slope).ravel()[self.observed]
        rest = [_gradient(ends[name]) for name in ("transitions", "start", "end")]
        return total, np.concatenate([flat, *rest]).astype(np.float64)


def _gradient(weights: Tensor) -> Any:
    return np.zeros(weights.numel()) if weights.grad is None else weights.grad.numpy().ravel()


def _minimise(
    loss: _Objective, settings: FeatureTagger, report: Callable[[float], None]
) -> tuple[Float[np.ndarray, " size"], int]:
    """Returns the optimum and the number of iterations."""
    n, l1, l2 = loss.size, settings.l1, settings.l2
    last = [0.0]

    def smooth(w: Any) -> tuple[float, Any]:
        value, gradient = loss(w)
        last[0] = value
        return value + l2 * float(w @ w) / 2, gradient + l2 * w

    def split(uv: Any) -> tuple[float, Any]:
        value, gradient = smooth(uv[:n] - uv[n:])
        return value + l1 * float(uv.sum()), np.concatenate([gradient + l1, l1 - gradient])

    options = {"maxiter": settings.iterations, "maxcor": 8, "ftol": 1e-7, "gtol": 1e-3}
    begin, bounds = (np.zeros(n), None) if l1 == 0 else (np.zeros(2 * n), [(0, None)] * (2 * n))
    found = minimize(smooth if l1 == 0 else split, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=options,
                     callback=lambda w: report(last[0]))  # fmt: skip
    return (found.x if l1 == 0 else found.x[:n] - found.x[n:]), int(found.nit)
