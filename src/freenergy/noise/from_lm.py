"""Noise that a language model draws.

    x_1, …, x_K ~ q(· | c),      q(x | c) = Π_t truncation(P_LM(· | c, x_<t))[x_t]

The negatives of a window depend on the seed and on the number of the window, never on the batch around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng, Streams
from freenergy.core.roles import Draws, Examples, LanguageModel, Model, NoiseState
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.activations import Trace, TracingLM
from freenergy.lm.token_log_probs import token_log_probs


@final
class FromLM:
    """Fresh draws from a language model, by default the base itself.

    ``together=False`` samples one window at a time, for models that draw somewhere else and take one seed per request.
    """

    kind = "base"

    def __init__(
        self, lm: LanguageModel, space: SequenceSpace, truncation: Truncation = ANCESTRAL, *, together: bool = True
    ) -> None:
        self.lm, self.space, self.truncation, self.together = lm, space, truncation, together

    def init(self, rng: Rng) -> NoiseState:
        """Returns no state: draws are independent."""
        return {}

    def draw(
        self, model: Model | None, state: NoiseState, data: Examples, num: int, rng: Rng
    ) -> tuple[NoiseState, Draws]:
        """Draws ``num`` continuations of each window's prefix."""

        def drawn(contexts: Sequences, numbers: list[int], space: SequenceSpace) -> Draws:
            runs = [slice(0, len(numbers))] if self.together else [slice(b, b + 1) for b in range(len(numbers))]
            streams = [stream_of(rng, numbers[run]) for run in runs]
            parts = [
                self.lm.sample(contexts[run], num, space, stream, self.truncation)
                for run, stream in zip(runs, streams, strict=True)
            ]
            return Draws.cat(parts, dim=0)

        return state, draws_by_room(data, self.space, drawn)

    def draw_traced(
        self, data: Examples, num: int, rng: Rng, layers: Sequence[int], *, after: bool = False
    ) -> tuple[Draws, Trace]:
        """Draws as ``draw`` does, and returns the trace of each datum and its draws, [B, 1 + num]."""
        assert isinstance(self.lm, TracingLM), "ask isinstance(lm, TracingLM) first"
        rooms = data.rooms if data.rooms is not None else torch.full_like(data.rows, self.space.length)
        parts, traces, places = list[Draws](), list[Trace](), list[Tensor]()
        for length in rooms.unique().tolist():
            at = (rooms == length).nonzero().flatten()
            x, space = data.x[at], replace(self.space, length=length)
            x = Continuations(x.contexts.trimmed(), x.tokens[:, :, :length], x.lengths)
            stream = stream_of(rng, data.rows[at].tolist())
            how = (x.contexts, num, space, stream, self.truncation, layers, x)
            draws, trace = self.lm.sample_traced(*how, after=after)
            parts.append(draws)
            traces.append(trace.padded(self.space.length))
            places.append(at)
        draws, trace, back = Draws.cat(parts, dim=0), Trace.cat(traces, dim=0), torch.cat(places).argsort()
        draws = Draws(draws.x[back], draws.log_base[back], draws.log_proposal[back])
        return draws, Trace(*(numbers[back] for numbers in trace))

    def log_noise(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Returns log q(x | c); −inf where a token was dropped by the truncation."""
        if self.truncation.is_identity:
            return self.lm.log_prob(x)
        return token_log_probs(self.lm, x, truncation=self.truncation).log_prob.sum(-1)


@final
class Learned:
    """Draws of a language model whose weights learn the data (dynamic noise-contrastive estimation, Wang and Ou 2018).

        max over φ of   mean log q_φ(x⁺ | c)          next to the objective, in which q_φ stands without gradient

    The nearer q_φ comes to the data, the more each negative teaches, and the fewer are needed. ``rate`` is its learning
    rate relative to the energy's.

    ``module`` holds the weights of ``lm``, whose ``log_prob`` carries their gradient. ``base`` scores the draws.
    """

    kind = "learned"

    def __init__(
        self, lm: LanguageModel, module: nn.Module, base: LanguageModel, space: SequenceSpace, *, rate: float = 1.0
    ) -> None:
        self.lm, self.module, self.base, self.space, self.rate = lm, module.requires_grad_(True), base, space, rate

    def init(self, rng: Rng) -> NoiseState:
        """Returns no state: what is learned is in the weights."""
        return {}

    @torch.no_grad()
    def draw(
        self, model: Model | None, state: NoiseState, data: Examples, num: int, rng: Rng
    ) -> tuple[NoiseState, Draws]:
        """Draws ``num`` continuations of each window's prefix from q_φ as it is now."""

        def drawn(contexts: Sequences, numbers: list[int], space: SequenceSpace) -> Draws:
            return self.lm.sample(contexts, num, space, stream_of(rng, numbers))

        draws = draws_by_room(data, self.space, drawn)
        return state, Draws(draws.x, self.base.log_prob(draws.x), draws.log_proposal)

    def log_noise(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Returns log q_φ(x | c), with the gradient of φ."""
        return self.lm.log_prob(x)


def draws_by_room(
    data: Examples, space: SequenceSpace, drawn: Callable[[Sequences, list[int], SequenceSpace], Draws]
) -> Draws:
    """Returns draws for all windows, where windows of one maximum length are drawn together."""
    if data.rooms is None:
        return drawn(data.x.contexts, data.rows.tolist(), space)
    parts, places = list[Draws](), list[Tensor]()
    for length in data.rooms.unique().tolist():
        at = (data.rooms == length).nonzero().flatten()
        some = replace(space, length=length)
        parts.append(drawn(data.x.contexts[at].trimmed(), data.rows[at].tolist(), some))
        places.append(at)
    together, back = Draws.cat(parts, dim=0), torch.cat(places).argsort()
    return Draws(together.x[back], together.log_base[back], together.log_proposal[back])


def stream_of(rng: Rng, numbers: list[int]) -> Rng:
    """Returns the stream in which context b of a batch is the window ``numbers[b]``."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return rng.shift(contexts=numbers[0])
    return _Numbered([rng.shift(contexts=number) for number in numbers])


class _Numbered(Streams):
    """The streams of windows that do not follow one another."""

    def child(self, *keys: int | str) -> Streams:
        # anything but rows would depend on the batch
        raise UserError("this language model draws from streams of its own: use FromLM(…, together=False)")
