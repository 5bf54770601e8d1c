"""What a trained network says: translations by search and energy re-sampling, and how likely it finds the truth.

    search:       argmax over y of log q(y | x), by beams
    re-sampling:  y_1 … y_K ~ q(· | x);    y_i is taken with probability ∝ e^{S_i},    S = log Σ_v e^{f(v; x, y_<last)}

With Eq. 4 of E-ARM, p(y) ∝ q(y_<last) · e^{f(y_last; y_<last)} = q(y) · e^S at the last token of y, so e^S is the
weight of a draw of q (section D.4, after Bakhtin et al. 2021). Candidates of several lengths are weighed each at its
own last token. ``highest`` takes the largest S in place of a draw; K = 0 of the paper's Table 9 is beam search.

How likely a network finds the true translation, word by word, after the truth and after its own words:

    true prefix:   log q(x_t | source, x_<t)            teacher forcing, as in training
    own prefix:    log q(x_t | source, ŷ_<t)            ŷ = the network's own greedy translation, as in use

The paper counts the true words that E-ARM finds likelier than a baseline (Table 8, after Zhang et al. 2019) and does
not say after which words. Ours is free running, because exposure bias is what a network's own words do to it. Beyond
the end of ŷ there is nothing to predict, so the places are t ≤ |ŷ| with EOS. Words are tokens of the shared vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors.numpy import load_file, save_file
from torch import Tensor

from freenergy.apps.translation.pairs import EncodedPairs, by_length, padded, sources
from freenergy.apps.translation.translator import Source, Translator
from freenergy.core.files import atomic_write, corruption_as_user_error
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.lm.networks.causal import inference
from freenergy.lm.networks.protocol import Network

Sentences = list[list[int]]  # tokens, with EOS if the sentence is complete
LogProbs = list[np.ndarray]  # of each sentence, place by place


class Resampled(NamedTuple):
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


def log_probs(
    network: Network, pairs: EncodedPairs, prefixes: Sequence[list[int]], tokens: int, progress: Progress, label: str
) -> LogProbs:
    """log q of the true token at every place of ``prefixes`` that the truth has too."""
    found: LogProbs = [np.zeros(0, dtype=np.float32)] * len(pairs)
    with inference(network.module), torch.no_grad(), progress.track(label, len(pairs), "sentences") as advance:
        for rows in by_length([len(ids) for ids in prefixes], tokens):
            batch, (read, _) = pairs.batch(rows), padded([prefixes[i] for i in rows])
            T = min(read.shape[1], batch.tokens.shape[1])
            logits = network.logits(batch.given, read[:, :T]).cpu()
            true = logits.gather(-1, batch.tokens[:, :T].unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
            for row, values in zip(rows, true.numpy(), strict=True):
                found[row] = values[: min(len(prefixes[row]), len(pairs.target[row]))].copy()
            advance(len(rows))
    return found


def likelier(
    ours: Sequence[LogProbs], others: Sequence[LogProbs]
) -> tuple[Float[np.ndarray, " sentences"], Float[np.ndarray, " sentences"]]:
    """In each sentence, over the seeds: the true words that ours finds likelier, and those that both were asked for."""
    more, asked = (np.zeros(len(ours[0])) for _ in range(2))
    for a, b in zip(ours, others, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            places = min(len(x), len(y))
            more[i] += (x[:places] > y[:places]).sum()
            asked[i] += places
    return more, asked


def save_log_probs(path: Path, values: dict[str, LogProbs]) -> None:
    """Write log-probabilities by name, each as one long array with the number of places of every sentence."""
    arrays = {f"{name}.log_prob": np.concatenate(found) for name, found in values.items()}
    arrays |= {f"{name}.places": np.array([len(found) for found in values[name]]) for name in values}
    with atomic_write(path) as temporary:
        save_file(arrays, temporary)


def load_log_probs(path: Path) -> dict[str, LogProbs]:
    """Read them back."""
    with corruption_as_user_error(path, "measure the network again"):
        arrays = load_file(path)
    names = sorted(name.removesuffix(".places") for name in arrays if name.endswith(".places"))
    ends = {name: np.cumsum(arrays[f"{name}.places"])[:-1] for name in names}
    return {name: np.split(arrays[f"{name}.log_prob"], ends[name]) for name in names}
