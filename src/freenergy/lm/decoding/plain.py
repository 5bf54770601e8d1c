"""The parts of a decoding step, in plain torch.

    softmax([q·K_p, q·K_x]) · [V_p; V_x]  =  w_p · V_p + w_x · V_x,     [w_p, w_x] = softmax([q·K_p, q·K_x])

The scores of prefix and suffix stand side by side under one softmax; the prefix is multiplied once for all candidates
of a context, the suffix candidate by candidate, stretch by stretch. Some numbers of rows are kept by feature, since
products are faster that way (``families.is_by_feature``).

Legend: as in ``memory``; R = B·N rows, T suffix tokens in the stretches that are begun.
"""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, silu

from freenergy.lm.decoding.families import Activation, Affine, DecoderWeights, Norm, is_by_feature
from freenergy.lm.decoding.memory import Memory


@final
class PlainSteps:
    """All that a step does, on activations [R, features]."""

    lanes: int | None = None

    def enter(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "R E"]:
        """Lay out the activations of B × N candidates as the other methods take them."""
        rows = x.flatten(0, 1)
        return rows.t().contiguous().t() if is_by_feature(rows) else rows

    def rows(self, x: Float[Tensor, "R E"], shape: tuple[int, int]) -> Float[Tensor, "R E"]:
        """Return the way back."""
        return x

    def norm(self, x: Float[Tensor, "R E"], how: Norm) -> Float[Tensor, "R E"]:
        """Apply LayerNorm or RMSNorm."""
        if how.bias is None:
            return rms_norm(x.contiguous(), x.shape[-1:], how.weight, how.eps)  # sums across memory are slow
        return layer_norm(x, x.shape[-1:], how.weight, how.bias, how.eps)

    def qkv(self, x: Float[Tensor, "R E"], product: Affine) -> Float[Tensor, "R outputs"]:
        """Compute queries, keys and values."""
        return product(x)

    def up(self, x: Float[Tensor, "R E"], product: Affine, how: Activation) -> Float[Tensor, "R inner"]:
        """Return the inner features of the feed-forward part."""
        x = product(x)
        if how == "swiglu":
            gate, through = x.chunk(2, dim=-1)
            return silu(gate).mul_(through)
        if how == "gelu":
            return gelu(x)
        # (1 + tanh z) / 2 = sigmoid(2z), and torch's sigmoid is twice as fast as its tanh
        inner = x.square().mul_(2 * 0.044715 * math.sqrt(2 / math.pi)).add_(2 * math.sqrt(2 / math.pi))
        return inner.mul_(x).sigmoid_().mul_(x)

    def add(self, x: Float[Tensor, "R E"], product: Affine, h: Float[Tensor, "R inner"]) -> None:
        """Compute x += h · W + b, in place."""
        product.add_to(x, h)

    def attend(
        self, network: DecoderWeights, memory: Memory, layer: int, qkv: Float[Tensor, "R outputs"]
    ) -> Float[Tensor, "R HD"]:
        """Attend from each row's new token to its context, past and itself; add it to the memory."""
        keys, values, t = memory.keys[layer], memory.values[layer], memory.filled
        _, B, K, N, W, D = values.shape
        G, P, now = network.heads // K, memory.prefix_keys[layer].shape[1], t // W
        q, k, v = (part.unflatten(0, (B, N)).transpose(1, 2) for part in network.split(qkv.contiguous()))
        queries = qkv.new_empty(B, K, N, G, D)
        _turn(q.unflatten(1, (K, G)).transpose(2, 3), memory, network.scaling, queries)
        _turn(k.unsqueeze(3), memory, 1.0, keys[now, :, :, :, t % W].unsqueeze(3))
        values[now, :, :, :, t % W] = v
        T = W * (now + 1)
        weights = qkv.new_empty(B * K, N * G, P + T)
        weights_p, weights_x = weights[:, :, :P], weights.view(B * K * N, G, P + T)[:, :, P:]
        weights_p.copy_(torch.bmm(queries.view(B * K, N * G, D), memory.prefix_keys[layer].transpose(1, 2)))
        stretches = weights_x.split(W, dim=2)
        for some, seen in zip(keys.flatten(1, 3), stretches, strict=False):
            seen.copy_(torch.bmm(queries.view(B * K * N, G, D), some.transpose(1, 2)))
        weights_x[:, :, t + 1 :] = -math.inf
        if memory.unseen is not None:
            weights.view(B, K * N * G, P + T)[:, :, :P] += memory.unseen.unsqueeze(1)
        torch.softmax(weights, -1, out=weights)
        out = torch.bmm(weights_p, memory.prefix_values[layer]).view(B * K * N, G, D)
        for some, seen in zip(values.flatten(1, 3), stretches, strict=False):
            out.baddbmm_(seen, some)
        return out.view(B, K, N, G * D).transpose(1, 2).reshape(B * N, K * G * D)


def _turn(x: Float[Tensor, "B K N G D"], memory: Memory, factor: float, out: Float[Tensor, "B K N G D"]) -> None:
    """Write factor · x to ``out``, turned by the angles of its place."""
    half = 0
    if memory.angles is not None:
        cos, sin = (factor * angle[memory.filled].view(-1, 1, 1, 1, angle.shape[-1]) for angle in memory.angles)
        half = cos.shape[-1]
        a, b = x[..., :half], x[..., half : 2 * half]
        torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., half : 2 * half]).addcmul_(a, sin)
    if 2 * half < x.shape[-1]:
        torch.mul(x[..., 2 * half :], factor, out=out[..., 2 * half :])
