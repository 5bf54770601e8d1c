"""The ladder: what each rung gains over the one below it, on the same windows.

    rungs      P_0 = base,  then tuned,  then local,  last P_LM · e^{−E}
    log P_k    exact for a language model, certified for the energy (``evaluation.certified``)

    gain_k = 100 · (1 − exp(−Σ_w (log P_k − log P_{k−1})_w / Σ_w tokens_w))

A rung pays where the whole interval of its gain, which is paired over documents, lies above 0. The energy draws n
candidates for each text that it writes and the other rungs draw one: costs of training are reported, not those.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from freenergy.core.rng import Rng
from freenergy.evaluation.bootstrap import paired_bootstrap
from freenergy.evaluation.perplexity import Counts

ENERGY = "energy"  # the rung that is certified; all others are exact


def ladder(log_p: Mapping[str, Float[np.ndarray, " W"]], counts: Counts, rng: Rng) -> list[dict[str, Any]]:
    """Report on the rungs, from the lowest to the highest, by their log-probabilities of the same W windows."""
    rungs: list[dict[str, Any]] = []
    names = list(log_p)
    for name, below in zip(names, [None, *names], strict=False):
        token = counts.perplexity(log_p[name])
        row: dict[str, Any] = {"name": name, "kind": "certified" if name == ENERGY else "exact"}
        row |= {"perplexity": token.value, "interval": token.interval}
        for key, other in (("over_below", below), ("over_base", names[0] if below else None)):
            row[key] = None if other is None else _gain(log_p[name], log_p[other], counts, rng.child(name, key))
        rungs.append(row)
    return rungs


def _gain(a: Float[np.ndarray, " W"], b: Float[np.ndarray, " W"], counts: Counts, rng: Rng) -> dict[str, Any]:
    found = paired_bootstrap(a, b, counts.token, counts.documents, rng)
    return {"percent": found.value, "interval": found.interval}


def paid(row: Mapping[str, Any]) -> bool | None:
    """Whether a rung is shown to be better than the one below (True), worse (False), or neither (None)."""
    low, high = (row.get("over_below") or {}).get("interval") or (None, None)
    if low is None or high is None or low <= 0 <= high:
        return None
    return bool(low > 0)


def verdict(rungs: Sequence[Mapping[str, Any]]) -> str:
    """Say in one sentence which rungs have paid; empty where there is only the base.

    >>> row = {"name": "local", "over_below": {"percent": 25.5, "interval": [9.2, 38.8]}}
    >>> verdict([{"name": "base", "over_below": None}, row])
    'Paid: local took 25.5 % off the perplexity (9.2 to 38.8).'
    """
    words = {True: "Paid", None: "Not shown to pay", False: "Made it worse"}
    parts = []
    for outcome, head in words.items():
        rows = [row for row in rungs[1:] if paid(row) is outcome]
        if rows:
            parts.append(f"{head}: {', '.join(map(_taken_off, rows))}.")
    return " ".join(parts)


def _taken_off(row: Mapping[str, Any]) -> str:
    percent, (low, high) = row["over_below"]["percent"], row["over_below"]["interval"]
    if percent is None or low is None or high is None:
        return f"{row['name']} (too little text)"
    return f"{row['name']} took {percent:.1f} % off the perplexity ({low:.1f} to {high:.1f})".replace("-", "−")
