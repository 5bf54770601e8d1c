"""Ways to translate with a trained network: greedy and beam search, and top-K energy re-sampling.

    search:       argmax over y of log q(y | x), by beams
    re-sampling:  y_1 … y_K ~ q(· | x);    y_i is taken with probability ∝ e^{S_i},    S = log Σ_v e^{f(v; x, y_<last)}

With Eq. 4 of E-ARM, p(y) ∝ q(y_<last) · e^{f(y_last; y_<last)} = q(y) · e^S at the last token of y, so e^S is the
weight of a draw of q (section D.4, after Bakhtin et al. 2021). Candidates of several lengths are weighed each at its
own last token. ``highest`` takes the largest S in place of a draw; K = 0 of the paper's Table 9 is beam search.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.apps.translation.batches import by_length, sources
from freenergy.apps.translation.translator import Source, Translator
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.lm.networks.causal import inference

Sentences = list[list[int]]  # tokens, with EOS if the sentence is complete


@final
@dataclass(frozen=True, slots=True)
class Resampled:
    """Of K candidates for every source: one drawn by weight, the one with the largest S, and the first draw."""

    drawn: Sentences
    highest: Sentences
    first: Sentences


@final
@dataclass(frozen=True, slots=True)
class Decoding:
    """Decodes in batches of about ``tokens`` source tokens, translations of at most ``longest`` tokens."""

    network: Translator
    longest: int
    tokens: int

    def search(self, sentences: Sequence[list[int]], beams: int, progress: Progress) -> Sentences:
        """Translate by beam search; one beam is greedy search."""
        label = "greedy translation" if beams == 1 else f"translation with {beams} beams"
        found = _empty(len(sentences))
        with progress.track(label, len(sentences), "sentences") as advance:
            for rows in by_length([len(ids) for ids in sentences], self.tokens):
                decoded = self.network.decode(sources(sentences, rows), self.longest, beams=beams)
                _fill(found, rows, _lists(*decoded))
                advance(len(rows))
        return found

    def resample(
        self, sentences: Sequence[list[int]], numbers: Sequence[int], rng: Rng, progress: Progress
    ) -> dict[int, Resampled]:
        """Choose one of K draws of q for every source, for each K; a smaller K uses the first draws of a larger one."""
        max_k = max(numbers)
        found = {K: Resampled(*(_empty(len(sentences)) for _ in range(3))) for K in numbers}
        with progress.track(f"re-sampling from {max_k} candidates", len(sentences), "sentences") as advance:
            for number, rows in enumerate(by_length([len(ids) for ids in sentences], max(1, self.tokens // max_k))):
                own, given = rng.child("batch", number), sources(sentences, rows)
                tokens, mask, S = candidates(self.network, given, max_k, self.longest, own.child("draws"))
                lists = _lists(tokens.flatten(0, 1), mask.flatten(0, 1))
                for K, kept in found.items():
                    drawn = own.child("choice", K).categorical(S[:, :K])
                    ways = ((kept.drawn, drawn), (kept.highest, S[:, :K].argmax(1)), (kept.first, 0 * drawn))
                    for sentences_of_way, chosen in ways:
                        _fill(sentences_of_way, rows, [lists[i * max_k + k] for i, k in enumerate(chosen.tolist())])
                advance(len(rows))
        return found


def candidates(
    network: Translator, given: Source, K: int, longest: int, rng: Rng
) -> tuple[Int[Tensor, "rows K T"], Bool[Tensor, "rows K T"], Float[Tensor, "rows K"]]:
    """Return K draws of q for every source, their mask, and S at their last token."""
    rows, many = len(given.tokens), given.repeated(K)
    tokens, mask = network.draw(many, many.tokens[:, :0], longest, rng)
    with inference(network.module), torch.no_grad():
        log_sum = network.logits(many, tokens).logsumexp(-1)
    last = (mask.sum(1) - 1).unsqueeze(1)
    S = log_sum.gather(1, last).squeeze(1)
    return tokens.unflatten(0, (rows, K)), mask.unflatten(0, (rows, K)), S.unflatten(0, (rows, K))


def _lists(tokens: Int[Tensor, "rows T"], mask: Bool[Tensor, "rows T"]) -> Sentences:
    return [row[counts].tolist() for row, counts in zip(tokens, mask, strict=True)]


def _empty(count: int) -> Sentences:
    return [[] for _ in range(count)]


def _fill(found: Sentences, rows: Sequence[int], lists: Sentences) -> None:
    for row, ids in zip(rows, lists, strict=True):
        found[row] = ids
