"""Is a model one that can be decoded fast? Its own forward pass answers.

    Σ_t log P(x_t | c, x_<t) by the fast steps  =  the same by a plain forward pass, to 5e-4

Two short contexts of different length tell. Where they differ, or the architecture is not known, there is no decoder
and the caller keeps its own way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from freenergy.core.sequences import Continuations
from freenergy.lm.decoding import fused
from freenergy.lm.decoding.families import Affine, DecoderWeights, take_apart
from freenergy.lm.decoding.plain import PlainSteps
from freenergy.lm.decoding.sampling import rows_at_once
from freenergy.lm.decoding.step import FastStepper, Kernels
from freenergy.lm.editing import Edit
from freenergy.lm.network_steps import TOLERANCE, First, log_prob_whole, read, telling_example


@final
class Decoder:
    """Makes fast steppers of a model whose numbers were checked."""

    def __init__(self, model: PreTrainedModel, *, is_compiled: bool) -> None:
        self.model, self.is_compiled = model, is_compiled
        self._places: tuple[int, ...] = ()
        self._network: DecoderWeights | None = None
        self._state: tuple[int, ...] = ()  # of the weights that were copied
        self._laid_out: DecoderWeights | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, *, compiled: bool = False) -> "Decoder | None":
        """Return a decoder of the model, or None where its architecture is not known or its numbers would differ.

        ``compiled`` asks for compiled parts, which there are for float32 on a CPU and where there is a compiler. They
        are used for contexts with many candidates.
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
            decoder.is_compiled = compiled and decoder._gives(plain, x, decoder.kernels)
            return decoder

    @property
    def kernels(self) -> Kernels:
        """Return those for many candidates."""
        return self.kernels_for(fused.FEWEST)

    def kernels_for(self, num: int) -> Kernels:
        """Return the faster ones for ``num`` candidates of each context."""
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

    def rows_at_once(self, length: int) -> int:
        """Return how many candidates of ``length`` tokens to sample at once."""
        return rows_at_once(self.network, length)

    def contexts_at_once(self, num: int, length: int) -> int:
        """Return the number of contexts per batch of ``num`` candidates; compiled steps allocate whole blocks."""
        if not isinstance(self.kernels_for(num), PlainSteps):
            num = -(-num // fused.LANES) * fused.LANES
        return max(1, self.rows_at_once(length) // num)

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
            kernels = self.kernels_for(num) if self.rows_at_once(length) >= fused.LANES else PlainSteps()
            return FastStepper(self._by_output(network), first, num, length, layers, kernels, edit())

        return stepper

    def _by_output(self, network: DecoderWeights) -> DecoderWeights:
        """Return the weights as a CPU multiplies them fastest; copies are kept while the weights do not change."""
        if network.device.type != "cpu":
            return network
        state = tuple(number for weight in self.model.parameters() for number in _state(weight))
        if self._laid_out is None or self._state != state:
            self._laid_out = replace(network, layers=[layer.map(Affine.by_output) for layer in network.layers])
            self._state = state
        return self._laid_out

    def _gives(self, plain: Float[Tensor, "B N"], x: Continuations, kernels: Kernels) -> bool:
        try:
            return torch.allclose(self._log_prob(x, kernels), plain, rtol=0, atol=TOLERANCE)
        except (RuntimeError, IndexError, TypeError):
            return False

    def _log_prob(self, x: Continuations, kernels: Kernels) -> Float[Tensor, "B N"]:
        _, N, L = x.tokens.shape
        stepper = FastStepper(self.network, read(self.model, x.contexts), N, L, (), kernels)
        log_p = [stepper.first().unsqueeze(1).expand(-1, N, -1)]
        log_p += [stepper.step(x.tokens[:, :, t]) for t in range(L - 1)]
        return torch.stack(log_p, dim=2).gather(-1, x.tokens.unsqueeze(-1)).squeeze(-1).double().sum(-1)


def _places(model: PreTrainedModel) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in model.parameters())


def _state(weight: Tensor) -> tuple[int, int]:
    """Return a state that changes when the weight is moved or written to, unless through ``.data``."""
    return weight.data_ptr(), weight._version
