"""How varied and how new text is: real text and text of both models side by side (Fig. 2, right, of Deng et al. 2020).

    distinct_n   = K / T          of T n-grams in the text, K are different ones
    repetition   = share of the 4-grams that end in a continuation and stood before in its window
    unseen_n     = share of the n-grams that do not stand in the training text

The longer a text, the fewer of its n-grams are new to it, so texts are compared at equal numbers of tokens: each is its
windows' continuations in one order, cut where the shortest text ends. A model's text is one continuation per window; it
is drawn several times over, each time counted on its own, and the shares are averaged.

Intervals are over documents. Repetition and unseen are ratios of sums (``perplexity.rate``). K is not a sum: with u_d
the n-grams that document d alone has, K falls by u_d without it, so the interval of K/T reaches as far as that of
Σ u_d / Σ t_d (the jackknife at a fixed size of text). A bootstrap would take documents twice, which are then all
repetition.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from freenergy.core.progress import Advance, Progress
from freenergy.core.sequences import Continuations
from freenergy.corpus import Corpus
from freenergy.corpus.deduplicate import Stream, repeated
from freenergy.evaluation.perplexity import Measurement, measured_rate, rate

ORDERS = (2, 3, 4)
REPETITION = 4


class CountedText(NamedTuple):
    """R versions of a text: W continuations each, with their windows' prefixes and documents."""

    x: Continuations  # [W, R]
    documents: Integer[np.ndarray, " W"]


def training_text(corpus: Corpus) -> Stream:
    """The training text, read piece by piece."""
    tokens = corpus.stream("train")
    return Stream(
        read=lambda first, stop: np.asarray(tokens[first:stop]), size=len(tokens), documents=corpus.documents("train")
    )


def text_statistics(texts: dict[str, CountedText], train: Stream, progress: Progress) -> dict[str, Any]:
    """``distinct``, ``repetition`` and ``unseen`` of each text, each as [share, low, high]."""
    budget = min(int(text.x.lengths.sum(0).min()) for text in texts.values())
    with progress.track("statistics of text", len(texts) * len(ORDERS) * train.size, "tokens") as advance:
        return {
            name: {
                "distinct": {str(n): distinct(text, n, budget).to_json() for n in ORDERS},
                "repetition": repetition(text).to_json(),
                "unseen": {str(n): unseen(text, n, train, advance).to_json() for n in ORDERS},
                "windows": text.x.shape[0],
                "tokens": budget,
                "versions": text.x.shape[1],
            }
            for name, text in texts.items()
        }


def distinct(text: CountedText, n: int, budget: int) -> Measurement:
    """K / T within the first ``budget`` tokens, averaged over the versions."""
    documents = np.unique(text.documents, return_inverse=True)[1]
    D = int(documents.max()) + 1
    K = T = 0.0
    alone, size = np.zeros(D), np.zeros(D)
    for r in range(text.x.shape[1]):
        grams, window = _ngrams(text.x, r, n, budget)
        of = documents[window]
        _, which = np.unique(grams, axis=0, return_inverse=True)
        which = which.reshape(-1)
        pairs = np.unique(np.stack([which, of]), axis=1) if len(of) else np.zeros((2, 0), np.int64)
        holders = np.bincount(pairs[0], minlength=1)  # documents that have each n-gram
        K, T = K + len(np.unique(which)), T + len(of)
        alone += np.bincount(pairs[1][holders[pairs[0]] == 1], minlength=D)
        size += np.bincount(of, minlength=D)
    if not T:
        return Measurement(None, None, None)
    reach = rate(alone, size)[1]
    return Measurement(K / T, *((None, None) if reach is None else (max(K / T - reach, 0.0), min(K / T + reach, 1.0))))


def repetition(text: CountedText, n: int = REPETITION) -> Measurement:
    """Share of the n-grams ending in the continuations that stood earlier in the same window, prefix included."""
    (W, R), before = text.x.shape, np.zeros(text.x.shape[0])
    total = np.zeros(W)
    starts = text.x.contexts.lengths.tolist()
    for i, row in enumerate(text.x.joined().lists()):
        w = i // R
        seen: set[tuple[int, ...]] = set()
        for end in range(n, len(row) + 1):
            gram = tuple(row[end - n : end])
            if end > starts[w]:
                total[w] += 1
                before[w] += gram in seen
            seen.add(gram)
    return _share(before, total, text.documents)


def unseen(text: CountedText, n: int, train: Stream, advance: Advance) -> Measurement:
    """Share of the n-grams inside the continuations that the training stream does not hold."""
    (W, R), rows = text.x.shape, text.x.flat().lists()
    tokens = np.array([token for row in rows for token in row], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    known, _ = repeated(Stream(read=lambda a, b: tokens[a:b], size=len(tokens), documents=bounds), [train], n, advance)
    held = np.add.reduceat(np.append(known, False).astype(np.int64), bounds[:-1]) * (np.diff(bounds) > 0)
    total = np.maximum(np.diff(bounds) - n + 1, 0)
    return _share((total - held).reshape(W, R).sum(1), total.reshape(W, R).sum(1), text.documents)


def _ngrams(
    x: Continuations, r: int, n: int, budget: int
) -> tuple[Integer[np.ndarray, "T n"], Integer[np.ndarray, " T"]]:
    """The n-grams of version r of a text within its first ``budget`` tokens, and the window of each."""
    tokens, lengths = x.tokens[:, r].cpu().numpy(), x.lengths[:, r].cpu().numpy()
    kept = np.clip(budget - (np.cumsum(lengths) - lengths), 0, lengths)
    if tokens.shape[1] < n:
        return np.zeros((0, n), np.int64), np.zeros(0, np.int64)
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n, axis=1)
    inside: Bool[np.ndarray, "W places"] = np.arange(grams.shape[1]) + n <= kept[:, None]
    return grams[inside], np.nonzero(inside)[0]


def _share(
    part: Float[np.ndarray, " W"] | Integer[np.ndarray, " W"],
    total: Float[np.ndarray, " W"] | Integer[np.ndarray, " W"],
    documents: Integer[np.ndarray, " W"],
) -> Measurement:
    d = np.unique(documents, return_inverse=True)[1]
    found = measured_rate(np.bincount(d, part), np.bincount(d, total))
    if found.low is None or found.high is None:
        return found
    return Measurement(found.value, max(found.low, 0.0), min(found.high, 1.0))
