"""One more token of B × N candidates, at the speed of matrix products.

    h = layers(x_t | prefix, x_<t)  [R, E],        logits = head · h  [R, V]

A decoder is compared with a plain forward pass before it is used. Where Σ_t log P(x_t | c, x_<t) differs by more than
5e-4, or the architecture is not known, there is none and the caller keeps its own way.

Legend: R = B·N rows, E features, K layers chosen, H width of the states.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from freenergy.core.sequences import Continuations
from freenergy.core.truncation import normalised
from freenergy.lm.decoding import fused
from freenergy.lm.decoding.families import Affine, DecoderWeights, Layer, take_apart
from freenergy.lm.decoding.memory import Memory, stretches
from freenergy.lm.decoding.plain import PlainSteps
from freenergy.lm.editing import Edit, applied
from freenergy.lm.network_steps import TOLERANCE, First, log_prob_whole, read, telling_example
from freenergy.lm.stepping import exchanged

_MEMORY = 3 * 2**28  # bytes for the keys and values of the candidates that are sampled at once
_ROWS = 512  # candidates at once where memory allows

Kernels = PlainSteps | fused.Fused  # the parts of a step; each has activations laid out in its own way


@final
class FastStepper:
    """Reads one token of each candidate at a time; the prefix stays in one copy."""

    def __init__(
        self,
        network: DecoderWeights,
        first: First,
        num: int,
        length: int,
        layers: tuple[int, ...] = (),
        kernels: Kernels | None = None,
        edit: Edit | None = None,
    ) -> None:
        self.network, self.kernels, self.layers = network, kernels or PlainSteps(), layers
        self.edit, self.shape = edit, (len(first.log_p), num)
        self.log_first = first.log_p if edit is None else applied(edit, first.log_p)
        self.memory = Memory.after(first.prefix, network, num, length, lanes=self.kernels.lanes)
        self.states = first.states.unsqueeze(1)

    def first(self) -> Float[Tensor, "B V"]:
        """Compute log P of the first token."""
        return self.log_first

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        """Read a token of each candidate."""
        scores = self.network.head(self.rows(self.advance(tokens)))
        log_p = normalised(scores) if self.edit is None else applied(self.edit, scores)
        return log_p.view(*tokens.shape, -1)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, "B N"]) -> Tensor:
        """Read a token of each candidate; what the head makes the logits of the next one from."""
        return self._read(tokens, len(self.network.layers))

    @torch.no_grad()
    def end(self, tokens: Int[Tensor, "B N"]) -> None:
        """Read the last token of each candidate for the states after it: nothing above the layers that are shown."""
        self._read(tokens, max(self.layers, default=0))

    def _read(self, tokens: Int[Tensor, "B N"], highest: int) -> Tensor:
        """Read a token of each candidate up to a layer, and keep the states that are shown."""
        x = self.kernels.enter(self._embedded(tokens))
        seen = {0: self.rows(x).clone()} if 0 in self.layers else {}
        for i, layer in enumerate(self.network.layers[:highest]):
            self._through(i, layer, x)
            if i + 1 in self.layers:
                seen[i + 1] = self.rows(x).clone()
        hidden = self.kernels.norm(x, self.network.norm)
        self.memory.filled += 1
        if self.edit is not None:
            self.edit.advance(tokens)
        if self.layers:
            seen[len(self.network.layers)] = self.rows(hidden)
            self.states = torch.stack([seen[layer] for layer in self.layers], dim=1).unflatten(0, tokens.shape)
        return hidden

    def rows(self, x: Tensor) -> Float[Tensor, "R E"]:
        """Return activations as rows, whatever layout the kernels use."""
        return self.kernels.rows(x, self.shape)

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Replace candidate n of context b by candidate rows[b, n]; all share the prefix."""
        self.memory.select(rows)
        if self.edit is not None:
            self.edit.select(rows)
        self.states = exchanged(self.states, rows)

    def _embedded(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N E"]:
        x = self.network.embedding[tokens]
        if self.network.positions is not None:
            x += self.network.positions[self.memory.lengths + self.memory.filled].unsqueeze(1)
        return x

    def _through(self, i: int, layer: Layer, x: Tensor) -> None:
        network, kernels = self.network, self.kernels
        seen = kernels.attend(network, self.memory, i, kernels.qkv(kernels.norm(x, layer.norm), layer.qkv))
        if not network.parallel:
            kernels.add(x, layer.out, seen)
        inner = kernels.up(kernels.norm(x, layer.norm_up), layer.up, network.activation)
        if network.parallel:
            kernels.add(x, layer.out, seen)
        kernels.add(x, layer.down, inner)


def rows_at_once(network: DecoderWeights, length: int) -> int:
    """Return how many candidates to sample at once: enough to keep the processor busy, few enough to stay near it."""
    keys = network.groups * network.width * len(network.layers) * math.prod(stretches(length))
    rows = max(1, min(_ROWS, _MEMORY // (2 * keys * network.embedding.element_size())))
    return rows if rows < fused.LANES else rows - rows % fused.LANES


@final
class Decoder:
    """Makes fast steppers of a model whose numbers were checked."""

    def __init__(self, model: PreTrainedModel, *, is_compiled: bool) -> None:
        self.model, self.is_compiled = model, is_compiled
        self._places: tuple[int, ...] = ()
        self._network: DecoderWeights | None = None
        self._state: tuple[tuple[int, int], ...] = ()  # of the weights that were copied
        self._laid_out: DecoderWeights | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, *, compiled: bool = False) -> "Decoder | None":
        """Return a decoder of the model, or None where its architecture is not known or its numbers would differ.

        ``compiled`` asks for compiled parts, which there are for float32 on a CPU, for contexts with many candidates.
        """
        decoder = cls(model, is_compiled=compiled)
        if not decoder.knows_weights:
            return None
        x = telling_example(model)
        if model.config.max_position_embeddings < x.joined().tokens.shape[1]:
            return None
        with torch.no_grad():
            plain = log_prob_whole(model, x, rows=8)
            if not decoder._gives(plain, x, PlainSteps()):
                return None
            decoder.is_compiled = compiled and decoder._gives(plain, x, decoder.kernels_for())
            return decoder

    def kernels_for(self, num: int = fused.FEWEST) -> Kernels:
        """Return the faster ones for ``num`` candidates of each context, or for many."""
        weight = self.network.embedding
        fits = self.is_compiled and weight.device.type == "cpu" and weight.dtype == torch.float32
        return (fused.kernels() if fits and num >= fused.FEWEST else None) or PlainSteps()

    @property
    def knows_weights(self) -> bool:
        """Return whether the weights, as they are now, can be decoded with."""
        return self._taken_apart() is not None

    @property
    def network(self) -> DecoderWeights:
        """Return the weights as they are now."""
        network = self._taken_apart()
        assert network is not None, "ask knows_weights first"
        return network

    def _taken_apart(self) -> DecoderWeights | None:
        """Take the network apart again only where weights have moved; views stay right while they are written to."""
        if self._places != _places(self.model):
            self._network = take_apart(self.model)
            self._places = _places(self.model)  # taking apart may lay weights side by side
        return self._network

    def contexts_at_once(self, num: int, length: int) -> int:
        """Return the number of contexts per batch of ``num`` candidates; compiled steps allocate whole blocks."""
        if not isinstance(self.kernels_for(num), PlainSteps):
            num = -(-num // fused.LANES) * fused.LANES
        return max(1, rows_at_once(self.network, length) // num)

    def starting(
        self,
        first: First,
        length: int,
        layers: tuple[int, ...] = (),
        edit: Callable[[], Edit | None] = lambda: None,
    ) -> Callable[[int], FastStepper]:
        """Return what makes steppers of any number of continuations of contexts that have been read."""
        network = self.network

        def stepper(num: int) -> FastStepper:
            kernels = self.kernels_for(num) if rows_at_once(self.network, length) >= fused.LANES else PlainSteps()
            return FastStepper(self._by_output(network), first, num, length, layers, kernels, edit())

        return stepper

    def _by_output(self, network: DecoderWeights) -> DecoderWeights:
        """Return the weights as a CPU multiplies them fastest; copies are kept while the weights do not change."""
        if network.device.type != "cpu":
            return network
        # changes when a weight is moved or written to, unless through ``.data``
        state = tuple((weight.data_ptr(), weight._version) for weight in self.model.parameters())
        if self._laid_out is None or self._state != state:
            self._laid_out = replace(network, layers=[layer.map(Affine.by_output) for layer in network.layers])
            self._state = state
        return self._laid_out

    def _gives(self, plain: Float[Tensor, "B N"], x: Continuations, kernels: Kernels) -> bool:
        """Return whether steps give the same log-probabilities as a plain forward pass."""
        _, N, L = x.tokens.shape
        try:
            stepper = FastStepper(self.network, read(self.model, x.contexts), N, L, (), kernels)
            log_p = [stepper.first().unsqueeze(1).expand(-1, N, -1)]
            log_p += [stepper.step(x.tokens[:, :, t]) for t in range(L - 1)]
            found = torch.stack(log_p, dim=2).gather(-1, x.tokens.unsqueeze(-1)).squeeze(-1).double().sum(-1)
            return torch.allclose(found, plain, rtol=0, atol=TOLERANCE)
        except (RuntimeError, IndexError, TypeError):
            return False


def _places(model: PreTrainedModel) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in model.parameters())
