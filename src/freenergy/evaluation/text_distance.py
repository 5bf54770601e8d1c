"""How far the text of a model is from human text, as the base's network sees it: a kernel distance with its interval.

    MMD²(P, Q) = E k(x, x') + E k(y, y') − 2 E k(x, y),      k(x, y) = (x · y / F + 1)³

x are mean hidden states of human texts and y those of a model's texts after the same prefixes, standardised by the
human ones. The estimate is the U-statistic over pairs of different documents (Gretton et al. 2012, Lemma 6; the kernel
is that of Bińkowski et al. 2018): unbiased also for few texts, where a distance of fitted laws (MAUVE, Fréchet) is not,
so it may come out below 0 for texts that are as good as human.

    T = Σ_{d ≠ e} h_de / Σ_{d ≠ e} c_de,     h = k(x, x') + k(y, y') − k(x, y') − k(x', y),     c the number of pairs

Each document moves T by 2 (Σ_e h_de − T Σ_e c_de) / Σ c, from which the interval follows, also that of a difference:
how much nearer than the base a model comes.

Legend: W texts of each, F features, D documents.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from freenergy.core.sequences import Continuations
from freenergy.evaluation.perplexity import Measurement, reach_of
from freenergy.lm.activations import TracingLM

_BATCH_SIZE = 32  # texts that are read at once


class Distance(NamedTuple):
    """An estimate of MMD², and by how much each document moves it."""

    value: float
    moved: Float[np.ndarray, " D"]

    @classmethod
    def of(
        cls, human: Float[np.ndarray, "W F"], model: Float[np.ndarray, "W F"], documents: Integer[np.ndarray, " W"]
    ) -> "Distance | None":
        """Estimate the distance of two sets of texts after the same prefixes; None of fewer than two documents."""
        d = np.unique(documents, return_inverse=True)[1]
        h = _kernel(human, human) + _kernel(model, model) - _kernel(human, model) - _kernel(model, human)
        member = np.equal.outer(np.arange(d.max() + 1), d).astype(float)
        h, pairs = member @ h @ member.T, np.outer(member.sum(1), member.sum(1))
        others = 1 - np.eye(len(pairs))
        total = (pairs * others).sum()
        if not total:
            return None
        value = float((h * others).sum() / total)
        return cls(value, 2 * ((h - value * pairs) * others).sum(1) / total)

    def measured(self) -> Measurement:
        """The distance with its 95 % interval."""
        return _measured(self.value, self.moved)


def _kernel(a: Float[np.ndarray, "W F"], b: Float[np.ndarray, "W F"]) -> Float[np.ndarray, "W W"]:
    values: np.ndarray = (a @ b.T / a.shape[1] + 1) ** 3
    return values


def _measured(value: float, moved: Float[np.ndarray, " D"]) -> Measurement:
    reach = reach_of(moved)
    return Measurement(value, None, None) if reach is None else Measurement(value, value - reach, value + reach)


def mean_states(lm: TracingLM, x: Continuations) -> Float[np.ndarray, "W F"]:
    """Read one text of each context; the mean state of the last layer, from which its next tokens were predicted."""
    parts = [x[w : w + _BATCH_SIZE] for w in range(0, len(x.contexts), _BATCH_SIZE)]
    return np.concatenate([lm.trace(part, (lm.num_layers,)).states[:, 0, 0].cpu().numpy() for part in parts])


def distances_to_human(
    states: Mapping[str, Float[np.ndarray, "W F"]], names: Sequence[str], documents: Integer[np.ndarray, " W"]
) -> dict[str, Any]:
    """Return each writer's distance to human text, and how much nearer it is than the second of ``names``.

    ``names`` has human text first and the base second.
    """
    human = states[names[0]]
    mean, scale = human.mean(0), human.std(0)
    scale = np.where(scale > 0, scale, 1.0)
    z = {name: (states[name] - mean) / scale for name in names}
    found = {name: Distance.of(z[names[0]], z[name], documents) for name in names[1:]}
    if any(distance is None for distance in found.values()):
        return {}
    known = {name: distance for name, distance in found.items() if distance is not None}
    base = known[names[1]]
    return {
        name: {
            "distance": each.measured().to_json(),
            "nearer": _measured(base.value - each.value, base.moved - each.moved).to_json(),
        }
        for name, each in known.items()
    }
