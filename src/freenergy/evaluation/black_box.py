"""The results of a base that only samples: certified nats per text, and no perplexity.

    gain(x) = −E(x) − log[(e^{−E(x)} + Σ_{i<n} e^{−E(x_i)}) / n]        nats per text, mean and interval over documents

Everything is computed relative to the base, whose log-probability is 0 by agreement (``lm.sample_only``). Gains in nats
per text are right as they are. A perplexity needs log P_LM, and a percentage of it is only of use next to it: they are
left out (None), and so are densities and log-probabilities of single texts.
"""

import math
from typing import Any

from jaxtyping import Float
from torch import Tensor

from freenergy.evaluation.certified import BOUNDS
from freenergy.evaluation.figure_numbers import steps
from freenergy.evaluation.perplexity import UNITS

CLAIM = "certified nats per text (perplexity is not claimed)"


def has_perplexity(evaluation: dict[str, Any]) -> bool:
    """Return whether an evaluation is of a base with probabilities."""
    return bool(evaluation.get("has_log_prob", True))


def nats_curve(gain: Float[Tensor, "W steps bounds"], draws: int, parts: float) -> list[dict[str, Any]]:
    """Return the gain in nats per text by each bound, against the number of draws.

    ``gain`` is relative to the base, of whole texts or of their chunks, of which a text has ``parts`` on average.
    """
    rows = []
    for m, found in zip(steps(draws), (parts * gain.mean(0)).tolist(), strict=True):
        finite = [value if math.isfinite(value) else None for value in found]
        rows.append({"draws": m, **dict(zip(BOUNDS, finite, strict=True))})
    return rows


def without_perplexity(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return an evaluation that was made relative to the base, without what only log P_LM would give."""
    unknown = {"perplexity": dict.fromkeys(UNITS), "interval": {unit: [None, None] for unit in UNITS}}
    kept = {key: value for key, value in evaluation.items() if key not in ("densities", "ladder", "ceiling_nats")}
    ranking = {rule: found for rule, found in evaluation["ranking"].items() if rule not in ("likelihood", "model")}
    return kept | {
        "has_log_prob": False,
        "base": {**evaluation["base"], **unknown, "nats_per_window": None},
        "joint": _residual(evaluation["joint"], evaluation["ceiling_nats"]),
        "ladder": [],
        "ranking": ranking,
        "samples": [{**sample, "log_base": None} for sample in evaluation["samples"]],
        "examples": [_example(example) for example in evaluation["examples"]],
    }


def _residual(joint: dict[str, Any], ceiling: float) -> dict[str, Any]:
    nothing = {bound: None for bound in BOUNDS}
    gain = {"percent": None, "interval": [None, None], "ceiling_percent": None}
    return joint | {
        "perplexity": nothing,
        "interval": {bound: [None, None] for bound in BOUNDS},
        "per_word": nothing,
        "per_byte": nothing,
        "base_perplexity": None,
        "base_interval": [None, None],
        "gain": {**joint["gain"], **gain, "ceiling_nats": ceiling},
    }


def _example(example: dict[str, Any]) -> dict[str, Any]:
    return {name: {**text, "log_base": None} if isinstance(text, dict) else text for name, text in example.items()}
