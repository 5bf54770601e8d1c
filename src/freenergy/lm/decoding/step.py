"""One more token of B × N candidates, at the speed of matrix products.

    h = layers(x_t | prefix, x_<t)  [R, E],        logits = head · h  [R, V]

The weights are plain matrices (``families``), keys and values lie where they are used (``memory``), and all parts of a
step are done by ``kernels``: plain torch (``plain``), or compiled where a compiler was found (``fused``).

Legend: R = B·N rows, E features, K layers chosen, H width of the states.
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.truncation import normalised
from freenergy.lm.decoding.families import DecoderWeights, Layer
from freenergy.lm.decoding.fused import Fused
from freenergy.lm.decoding.memory import Memory
from freenergy.lm.decoding.plain import PlainSteps
from freenergy.lm.editing import Edit, applied
from freenergy.lm.network_steps import First
from freenergy.lm.stepping import exchanged

Kernels = PlainSteps | Fused  # the parts of a step; each has activations laid out in its own way


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
        x = self.kernels.enter(self._embedded(tokens))
        seen = {0: self.rows(x).clone()} if 0 in self.layers else {}
        for i, layer in enumerate(self.network.layers):
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
        """Apply one layer, in place."""
        network, kernels = self.network, self.kernels
        seen = kernels.attend(network, self.memory, i, kernels.qkv(kernels.norm(x, layer.norm), layer.qkv))
        if not network.parallel:
            kernels.add(x, layer.out, seen)
        inner = kernels.up(kernels.norm(x, layer.norm_up), layer.up, network.activation)
        if network.parallel:
            kernels.add(x, layer.out, seen)
        kernels.add(x, layer.down, inner)
