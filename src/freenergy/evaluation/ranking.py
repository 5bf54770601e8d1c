"""Can the model tell real text from draws? What a practitioner feels of a gain in nats.

    rules          likelihood: log P_LM / tokens        energy: −E        model: (log P_LM − E) / tokens
    first          how often the real text has the highest score among the n candidates of its prefix; ties are shared
    pairs          how often the real text beats one draw of the same prefix; a tie is a half
    detection      AUC = P(score(real) > score(draw)), texts of any two prefixes: one threshold for all (of at most
                   2,000 windows)

Intervals are over documents: first and pairs are means, AUC is a ratio of sums over pairs of documents, which is
resampled by document on both sides at once.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.scored import Scored
from freenergy.evaluation.bootstrap import FEWEST, ends_of
from freenergy.evaluation.perplexity import Counts, Measurement
from freenergy.evaluation.text_statistics import Share

RULES = ("likelihood", "energy", "model")
_RESAMPLES = 2_000
_MOST = 2_000  # windows whose pairs are all held


def ranking_numbers(scores: Scored) -> Float[Tensor, "W rules 4"]:
    """Return for each window and rule: first, pairs, the score of the real text and that of the first draw."""
    tokens = scores.x.lengths.double().clamp(min=1).cpu()
    by_rule = (scores.log_base / tokens, -scores.energy, scores.log_score / tokens)
    return torch.stack([_of_rule(values) for values in by_rule], dim=1)


def _of_rule(values: Float[Tensor, "W n"]) -> Float[Tensor, "W 4"]:
    real, drawn = values[:, :1], values[:, 1:]
    ties = (drawn == real).sum(1).double()
    first = (drawn <= real).all(1).double() / (1 + ties)
    pairs = ((drawn < real).double() + (drawn == real).double() / 2).mean(1)
    return torch.stack([first, pairs, real[:, 0], drawn[:, 0]], dim=1)


def ranking_of(numbers: Float[Tensor, "W rules 4"], counts: Counts, draws: int, rng: Rng) -> dict[str, Any]:
    """Report each rule; chance is 1/n for ``first`` and one half for the others."""
    found: dict[str, Any] = {"candidates": draws + 1, "chance": {"first": 1 / (draws + 1), "pairs": 0.5, "auc": 0.5}}
    for k, rule in enumerate(RULES):
        first, pairs, real, drawn = numbers[:, k].numpy().T
        found[rule] = {
            "first": _share(first, counts).to_json(),
            "pairs": _share(pairs, counts).to_json(),
            "auc": detection(real, drawn, counts, rng.child(rule)).to_json(),
        }
    return found


def _share(values: Float[np.ndarray, " W"], counts: Counts) -> Measurement:
    return Share.of(counts.by_document(values), counts.by_document(np.ones(len(values)))).measured()


def detection(real: Float[np.ndarray, " W"], drawn: Float[np.ndarray, " W"], counts: Counts, rng: Rng) -> Measurement:
    """AUC of one score as a detector of machine text, with its 95 % interval over documents."""
    real, drawn, counts = real[:_MOST], drawn[:_MOST], counts[:_MOST]
    above = (real[:, None] > drawn[None, :]) + 0.5 * (real[:, None] == drawn[None, :])
    documents = np.unique(counts.documents, return_inverse=True)[1]
    D = int(documents.max()) + 1
    of_document = np.eye(D)[documents]
    won, pairs = of_document.T @ above @ of_document, np.outer(of_document.sum(0), of_document.sum(0))
    value = float(won.sum() / pairs.sum())
    if D < FEWEST:
        return Measurement(value, None, None)
    chosen = (rng.uniform(_RESAMPLES, D).numpy() * D).astype(np.int64)
    times = np.stack([np.bincount(row, minlength=D) for row in chosen]).astype(np.float64)
    auc = np.einsum("rd,de,re->r", times, won, times) / np.einsum("rd,de,re->r", times, pairs, times)
    low, high = np.quantile(auc, ends_of(D)).tolist()
    return Measurement(value, low, high)
