"""The hidden Markov model: the generative partner of the chain, counted.

    p(x, y) = p(y_1) Π_t p(y_t | y_{t−1}) p(x_t | y_t) p(end | y_T),      p(y | x) ∝ p(x, y)

Its posterior is a linear chain whose potentials are log-probabilities, and log Z is log p(x). Counts are smoothed by
adding a little to each. Rare words count as a signature (ending and shape), which unknown words have too.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, corruption_as_user_error, read_json, write_json
from freenergy.structured import Allowed, LinearChain
from freenergy.tagging.laws import ChainLaw
from freenergy.tagging.sentences import Sentence, TagSet
from freenergy.tagging.settings import HiddenMarkov
from freenergy.tagging.templates import shape_of

_WEIGHTS, _SYMBOLS, _UNKNOWN = "weights.safetensors", "symbols.json", "\N{REPLACEMENT CHARACTER}"


def signature(word: str) -> str:
    """Returns what a rare word counts as.

    >>> signature("Walking")
    '\ufffdXxx~ing'
    """
    return f"{_UNKNOWN}{shape_of(word)}~{word[-3:].lower()}"


@final
class HiddenMarkovModel:
    """A counted model; ``symbols`` are words and signatures, the last is any other."""

    def __init__(self, symbols: dict[str, int], weights: dict[str, Tensor], allowed: Allowed | None) -> None:
        self.symbols, self.weights, self.allowed = symbols, weights, allowed

    @classmethod
    def count(
        cls,
        settings: HiddenMarkov,
        sentences: Sequence[Sentence],
        tags: TagSet,
        allowed: Allowed | None,
        *,
        partial: bool,
    ) -> "HiddenMarkovModel":
        """Returns the model that these sentences count."""
        if partial:
            raise UserError('a hidden Markov model counts whole taggings: label every word, or take kind = "neural"')
        seen = Counter(word for sentence in sentences for word in sentence.words)
        common = sorted(word for word, count in seen.items() if count > settings.rare)
        rare = sorted({signature(word) for word, count in seen.items() if count <= settings.rare})
        symbols = {symbol: number for number, symbol in enumerate([*common, *rare, _UNKNOWN])}
        K = len(tags)
        emit = torch.full((len(symbols), K), settings.emission_smoothing, dtype=torch.float64)
        pairs = torch.full((K + 1, K + 1), settings.transition_smoothing, dtype=torch.float64)  # K is both ends
        for sentence in sentences:
            y = torch.tensor([K, *(tags.number(tag) for tag in sentence.tags), K])
            pairs.index_put_((y[:-1], y[1:]), torch.ones(len(y) - 1, dtype=torch.float64), accumulate=True)
            x = torch.tensor(
                [symbols.get(word, symbols.get(signature(word), len(symbols) - 1)) for word in sentence.words]
            )
            emit.index_put_((x, y[1:-1]), torch.ones(len(x), dtype=torch.float64), accumulate=True)
        pairs[K, K] = 0  # no sentence is empty
        p = (pairs / pairs.sum(1, keepdim=True)).log()
        weights = {"emit": (emit / emit.sum(0)).log(), "transitions": p[:K, :K], "start": p[K, :K], "end": p[:K, K]}
        return cls(symbols, weights, allowed)

    def law(self, sentences: Sequence[Sentence]) -> ChainLaw:
        """Returns the posterior of the tags; its log Z is log p(x)."""
        other = len(self.symbols) - 1
        x = [
            torch.tensor([self.symbols.get(word, self.symbols.get(signature(word), other)) for word in sentence.words])
            for sentence in sentences
        ]
        e, lengths = (
            pad_sequence([self.weights["emit"][each] for each in x], batch_first=True),
            torch.tensor(list(map(len, x))),
        )
        A, start, end = (self.weights[name].contiguous() for name in ("transitions", "start", "end"))
        chain = LinearChain(e, A, start=start, end=end, lengths=lengths, allowed=self.allowed)
        return ChainLaw(chain, chain, lengths)

    def save(self, folder: Path) -> None:
        """Write the log-probabilities and the symbols."""
        write_json(folder / _SYMBOLS, {"symbols": list(self.symbols)})
        with atomic_write(folder / _WEIGHTS) as aside:
            save_file({name: each.contiguous() for name, each in self.weights.items()}, aside)

    @classmethod
    def load(cls, folder: Path, settings: HiddenMarkov, tags: TagSet, allowed: Allowed | None) -> "HiddenMarkovModel":
        """Read what ``save`` has written."""
        names = read_json(folder / _SYMBOLS)["symbols"]
        with corruption_as_user_error(folder / _WEIGHTS, "delete its folder and train again"):
            return cls({name: number for number, name in enumerate(names)}, load_file(folder / _WEIGHTS), allowed)
