"""Is a model one that can be decoded fast? Its own forward pass answers.

    Σ_t log P(x_t | c, x_<t) by the fast steps  =  the same by a plain forward pass, to 5e-4

Two short contexts of different length tell. Where they differ, or the architecture is not known, there is no decoder
and the caller keeps its own way.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from freenergy.base.decoding import fused
from freenergy.base.decoding.families import Affine, Layer, Network, Norm, take_apart
from freenergy.base.decoding.plain import Plain
from freenergy.base.decoding.sampling import rows_at_once
from freenergy.base.decoding.step import FastStepper, Kernels
from freenergy.base.network_steps import TOLERANCE, First, log_prob_whole, read, telling_example
from freenergy.sequences import Continuations


@final
class Decoder:
    """Makes fast steppers of a model whose numbers were checked."""

    def __init__(self, model: PreTrainedModel, *, is_compiled: bool) -> None:
        self.model, self.is_compiled = model, is_compiled
        self._laid_out: tuple[tuple[int, ...], list[Layer]] = ((), [])  # what for, and copies of the weights

    @classmethod
    def of(cls, model: PreTrainedModel, *, compiled: bool = False) -> "Decoder | None":
        """A decoder of the model, or None where its architecture is not known or its numbers would differ.

        ``compiled`` asks for compiled parts, which there are for float32 on a CPU and where there is a compiler. They
        are used for contexts with many candidates.
        """
        if take_apart(model) is None:
            return None
        decoder = cls(model, is_compiled=compiled)
        ways = [decoder.kernels_for(num) for num in (1, fused.FEWEST)]
        return decoder if all(decoder._equals_plain(kernels) for kernels in ways[: 1 + compiled]) else None

    @property
    def kernels(self) -> Kernels:
        """Those for many candidates."""
        return self.kernels_for(fused.FEWEST)

    def kernels_for(self, num: int) -> Kernels:
        """The faster ones for ``num`` candidates of each context."""
        weight = self.network.embedding
        fits = self.is_compiled and weight.device.type == "cpu" and weight.dtype == torch.float32
        return (fused.kernels() if fits and num >= fused.FEWEST else None) or Plain()

    @property
    def knows_weights(self) -> bool:
        """Whether the weights, as they are now, can be decoded with."""
        return take_apart(self.model) is not None

    @property
    def network(self) -> Network:
        """The weights as they are now."""
        network = take_apart(self.model)
        assert network is not None, "the model was taken apart before"
        return network

    def rows_at_once(self, length: int) -> int:
        """How many candidates of ``length`` tokens to sample at once."""
        return rows_at_once(self.network, length)

    def starting(self, first: First, length: int, layers: tuple[int, ...] = ()) -> Callable[[int], FastStepper]:
        """What makes steppers of any number of continuations of contexts that have been read."""
        network = self.network

        def stepper(num: int) -> FastStepper:
            kernels = self.kernels_for(num)
            weights = self._for(network, kernels, len(first.log_p) * num)
            return FastStepper(weights, first, num, length, layers, kernels)

        return stepper

    def _for(self, network: Network, kernels: Kernels, rows: int) -> Network:
        """The weights as the kernels multiply them fastest; copies are kept as long as the weights stay as they are."""
        is_plain = isinstance(kernels, Plain)
        if is_plain and not network.can_pack:
            return network
        state = (is_plain, *_state(network))
        if self._laid_out[0] != state:
            change = partial(Affine.packed_for, rows=rows) if is_plain else Affine.by_output
            self._laid_out = (state, [layer.map(change) for layer in network.layers])
        return replace(network, layers=self._laid_out[1])

    @torch.no_grad()
    def _equals_plain(self, kernels: Kernels) -> bool:
        x = telling_example(self.model)
        if self.model.config.max_position_embeddings < x.joined().tokens.shape[1]:
            return False
        try:
            fast = self._log_prob(x, kernels)
        except (RuntimeError, IndexError, TypeError):
            return False
        return torch.allclose(fast, log_prob_whole(self.model, x, rows=8), rtol=0, atol=TOLERANCE)

    def _log_prob(self, x: Continuations, kernels: Kernels) -> Float[Tensor, "B N"]:
        _, N, L = x.tokens.shape
        stepper = FastStepper(self.network, read(self.model, x.contexts), N, L, (), kernels)
        log_p = [stepper.first().unsqueeze(1).expand(-1, N, -1)]
        log_p += [stepper.step(x.tokens[:, :, t]) for t in range(L - 1)]
        return torch.stack(log_p, dim=2).gather(-1, x.tokens.unsqueeze(-1)).squeeze(-1).double().sum(-1)


def _state(network: Network) -> tuple[int, ...]:
    """Changes whenever weights of the layers are moved or written to."""
    parts: list[Affine | Norm] = []
    for layer in network.layers:
        parts += [layer.norm, layer.qkv, layer.out, layer.norm_up, layer.up, layer.down]
    tensors = [tensor for part in parts for tensor in (part.weight, part.bias) if tensor is not None]
    return tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor._version))
