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

Every statistic s is thus linearised over documents, s ≈ Σ_d a_d / Σ_d t_d, and so is how much nearer a model's text is
to human text than another's (h human, b base, m model), on the same windows:

    nearer = |s_b − s_h| − |s_m − s_h|
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from freenergy.core.progress import Advance, Progress
from freenergy.core.sequences import Continuations
from freenergy.corpus import Corpus
from freenergy.corpus.deduplicate import Stream, repeated
from freenergy.evaluation.perplexity import Measurement, reach_of

ORDERS = (2, 3, 4)
REPETITION = 4


class Share(NamedTuple):
    """A statistic between 0 and 1, and by how much each document moves it."""

    value: float | None
    moved: Float[np.ndarray, " D"]

    @classmethod
    def of(cls, amount: Float[np.ndarray, " D"], size: Float[np.ndarray, " D"], value: float | None = None) -> "Share":
        """Linearise Σ amount / Σ size over documents; ``value`` where that is not the statistic itself."""
        total = size.sum()
        if not total:
            return cls(None, np.zeros(len(size)))
        mean = amount.sum() / total
        return cls(float(mean) if value is None else value, (amount - mean * size) / total)

    def measured(self) -> Measurement:
        """The share with its 95 % interval, between 0 and 1."""
        reach = reach_of(self.moved)
        if self.value is None or reach is None:
            return Measurement(self.value, None, None)
        return Measurement(self.value, max(self.value - reach, 0.0), min(self.value + reach, 1.0))


def nearer(base: Share, model: Share, human: Share) -> Measurement:
    """How much nearer the model's text is to human text than the base's; negative where it is further away."""
    if base.value is None or model.value is None or human.value is None:
        return Measurement(None, None, None)
    of_base, of_model = base.value - human.value, model.value - human.value
    moved = np.sign(of_base) * (base.moved - human.moved) - np.sign(of_model) * (model.moved - human.moved)
    value, reach = abs(of_base) - abs(of_model), reach_of(moved)
    return Measurement(value, *((None, None) if reach is None else (value - reach, value + reach)))


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


Shares = dict[str, Share]  # "distinct 2", …, "repetition", "unseen 2", …


def shares_of_text(texts: dict[str, CountedText], train: Stream, progress: Progress) -> dict[str, Shares]:
    """All statistics of each text, in equal numbers of tokens."""
    budget = min(int(text.x.lengths.sum(0).min()) for text in texts.values())
    found: dict[str, Shares] = {}
    with progress.track("statistics of text", len(texts) * len(ORDERS) * train.size, "tokens") as advance:
        for name, text in texts.items():
            found[name] = {f"distinct {n}": distinct(text, n, budget) for n in ORDERS}
            found[name] |= {"repetition": repetition(text)}
            found[name] |= {f"unseen {n}": unseen(text, n, train, advance) for n in ORDERS}
    return found


def text_statistics(texts: dict[str, CountedText], shares: dict[str, Shares]) -> dict[str, Any]:
    """``distinct``, ``repetition`` and ``unseen`` of each text, each as [share, low, high]."""
    budget = min(int(text.x.lengths.sum(0).min()) for text in texts.values())
    by_order = {name: {str(n): f"{name} {n}" for n in ORDERS} for name in ("distinct", "unseen")}
    return {
        name: {
            **{key: {n: shares[name][of].measured().to_json() for n, of in by_order[key].items()} for key in by_order},
            "repetition": shares[name]["repetition"].measured().to_json(),
            "windows": text.x.shape[0],
            "tokens": budget,
            "versions": text.x.shape[1],
        }
        for name, text in texts.items()
    }


def nearer_to_human(shares: dict[str, Shares], model: str, base: str = "base") -> dict[str, list[float | None]]:
    """How much nearer to ``human`` one text is than another, statistic by statistic, as [nearer, low, high]."""
    human = shares["human"]
    return {name: nearer(shares[base][name], shares[model][name], human[name]).to_json() for name in human}


def distinct(text: CountedText, n: int, budget: int) -> Share:
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
    return Share.of(alone, size, K / T if T else None)


def repetition(text: CountedText, n: int = REPETITION) -> Share:
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


def unseen(text: CountedText, n: int, train: Stream, advance: Advance) -> Share:
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
) -> Share:
    d = np.unique(documents, return_inverse=True)[1]
    return Share.of(np.bincount(d, part), np.bincount(d, total))
