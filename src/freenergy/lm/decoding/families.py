"""A causal language model of transformers, taken apart into plain weights.

    x ← x + out(attention(qkv(norm(x)))),     x ← x + down(act(up(norm(x)))),     logits = head · norm(x)

Known are Llama (and Mistral, Qwen2), GPT-2 and GPT-NeoX. Matrices that are used together (queries, keys and values;
gate and up) are laid side by side in memory once, and the model's own parameters become views of them: nothing is held
twice. Anything unusual (a window that bites, another activation, adapters, quantised weights) gives None.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

Activation = Literal["swiglu", "gelu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = (torch.float32, torch.float64)
_SOME = range(16, 256)  # rows for which Wᵀ·xᵀ is up to twice as fast; below it is slower, above there is no difference
_OUTPUTS = 512  # of a wide product at once
_STEADY = ("default", "linear", "llama3", "yarn")  # rotations that do not depend on the length of the text


@final
@dataclass(frozen=True, slots=True)
class Affine:
    """x · W + b."""

    weight: Float[Tensor, "inputs outputs"]
    bias: Float[Tensor, " outputs"] | None

    def __call__(self, x: Float[Tensor, "R inputs"]) -> Float[Tensor, "R outputs"]:
        """Return the product; of some rows by feature, as a transposed view."""
        if not is_by_feature(x):
            return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)
        if self.bias is None:
            return torch.mm(self.weight.t(), x.t()).t()
        return torch.addmm(self.bias.unsqueeze(1), self.weight.t(), x.t()).t()

    def write(self, x: Float[Tensor, "R inputs"], out: Float[Tensor, "R outputs"]) -> None:
        """Compute x · W + b into the given memory, some outputs at a time: a wide product is faster that way."""
        for weight, to in zip(self.weight.split(_OUTPUTS, dim=1), out.split(_OUTPUTS, dim=1), strict=True):
            torch.mm(x, weight, out=to)
        if self.bias is not None:
            out.add_(self.bias)

    def add_to(self, x: Float[Tensor, "R outputs"], h: Float[Tensor, "R inputs"]) -> None:
        """Compute x += h · W + b, in place."""
        x.addmm_(h, self.weight)
        if self.bias is not None:
            x.add_(self.bias)

    def by_output(self) -> "Affine":
        """Return the same, with the weights of an output side by side: a copy, unless they already are."""
        return Affine(self.weight.t().contiguous().t(), self.bias)


def is_by_feature(x: Float[Tensor, "R features"]) -> bool:
    """Tell whether activations of this many rows are multiplied faster as Wᵀ·xᵀ than as x·W."""
    return x.device.type == "cpu" and len(x) in _SOME


class Norm(NamedTuple):
    """LayerNorm, or RMSNorm where there is no bias."""

    weight: Float[Tensor, " E"]
    bias: Float[Tensor, " E"] | None
    eps: float


class Layer(NamedTuple):
    """One block of the decoder."""

    norm: Norm
    norm_up: Norm
    qkv: Affine
    out: Affine
    up: Affine  # of SwiGLU: the gate, then what it lets through
    down: Affine

    def map(self, change: Callable[[Affine], Affine]) -> "Layer":
        """Return the same network with other products."""
        return self._replace(qkv=change(self.qkv), out=change(self.out), up=change(self.up), down=change(self.down))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A decoder of E features, H heads of D features in K groups that share their keys and values."""

    layers: list[Layer]
    embedding: Float[Tensor, "V E"]
    norm: Norm
    head: Affine
    heads: int
    groups: int
    activation: Activation
    scaling: float  # of the products of queries and keys
    positions: Float[Tensor, "places E"] | None = None
    rotation: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None  # places [...] → cos, sin [..., D']
    by_head: bool = False  # qkv's outputs are q, k, v of the first head, of the second, …; else all q, all k, all v
    parallel: bool = False  # attention and feed-forward read the same x

    @property
    def width(self) -> int:
        """Return D, the features per head."""
        return self.layers[0].out.weight.shape[0] // self.heads

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.embedding.device

    def split(self, qkv: Float[Tensor, "R outputs"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [R, H, D], keys and values [R, K, D], as views."""
        H, K, D = self.heads, self.groups, self.width
        if self.by_head:
            return qkv.view(-1, H, 3, D).unbind(2)  # type: ignore[return-value]
        q, k, v = qkv.view(-1, H + 2 * K, D).split([H, K, K], dim=1)
        return q, k, v


def take_apart(model: PreTrainedModel) -> DecoderWeights | None:
    """Return the model's weights as they lie now, or None where this is not one of the families, plain as they come."""
    try:
        read = _FAMILIES.get(model.config.model_type)
        return None if read is None or model.dtype not in _DTYPES else read(model, model.config)
    except (AttributeError, KeyError, _UnknownError):
        return None


class _UnknownError(Exception):
    """Something about the model is not what we know."""


def _require(*facts: bool) -> None:
    if not all(facts):
        raise _UnknownError


def _llama(model: Any, config: Any) -> DecoderWeights:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    _require(config.hidden_act == "silu", window is None or window >= config.max_position_embeddings)
    _require(kinds == {"full_attention"} or window is not None)
    body, rotation = model.model, _rotation(model.model)  # before the weights are laid out again
    read = _layer("input_layernorm", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj",
                  "post_attention_layernorm", "mlp.gate_proj mlp.up_proj", "mlp.down_proj")  # fmt: skip
    return DecoderWeights(
        layers=[read(layer) for layer in body.layers],
        embedding=body.embed_tokens.weight.detach(),
        norm=_norm(body.norm),
        head=_affine(model.lm_head),
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        activation="swiglu",
        scaling=body.layers[0].self_attn.scaling,
        rotation=rotation,
    )


def _gpt2(model: Any, config: Any) -> DecoderWeights:
    _require(not config.add_cross_attention, not config.scale_attn_by_inverse_layer_idx)
    body, read = model.transformer, _layer("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    return DecoderWeights(
        layers=[read(layer) for layer in body.h],
        embedding=body.wte.weight.detach(),
        positions=body.wpe.weight.detach(),
        norm=_norm(body.ln_f),
        head=_affine(model.lm_head),
        heads=config.n_head,
        groups=config.n_head,
        activation=_ACTIVATIONS[config.activation_function],
        scaling=body.h[0].attn.scaling,
    )


def _neox(model: Any, config: Any) -> DecoderWeights:
    body = model.gpt_neox
    read = _layer("input_layernorm", "attention.query_key_value", "attention.dense",
                  "post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")  # fmt: skip
    return DecoderWeights(
        layers=[read(layer) for layer in body.layers],
        embedding=body.embed_in.weight.detach(),
        norm=_norm(body.final_layer_norm),
        head=_affine(model.embed_out if hasattr(model, "embed_out") else model.lm_head),
        heads=config.num_attention_heads,
        groups=config.num_attention_heads,
        activation=_ACTIVATIONS[config.hidden_act],
        scaling=body.layers[0].attention.scaling,
        rotation=_rotation(body),
        by_head=True,
        parallel=config.use_parallel_residual,
    )


_FAMILIES: dict[str, Callable[[Any, Any], DecoderWeights]] = {
    "llama": _llama, "mistral": _llama, "qwen2": _llama, "gpt2": _gpt2, "gpt_neox": _neox,
}  # fmt: skip


def _rotation(body: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return cos and sin by the model's own module; both halves of the features turn by the same angles."""
    _require(body.rotary_emb.rope_type in _STEADY)
    return partial(body.rotary_emb, body.layers[0].input_layernorm.weight)


def _layer(norm: str, qkv: str, out: str, norm_up: str, up: str, down: str) -> Callable[[Any], Layer]:
    """Return what reads a block whose modules have these names; those with a space between are laid side by side."""

    def found(block: Any, names: str) -> list[Any]:
        return [block.get_submodule(name) for name in names.split()]

    def read(block: Any) -> Layer:
        products = (_affine(*found(block, names)) for names in (qkv, out, up, down))
        return Layer(_norm(*found(block, norm)), _norm(*found(block, norm_up)), *products)

    return read


def _norm(module: Any) -> Norm:
    if hasattr(module, "variance_epsilon"):  # RMSNorm
        return Norm(module.weight.detach(), None, module.variance_epsilon)
    _require(type(module) is torch.nn.LayerNorm, module.bias is not None)
    return Norm(module.weight.detach(), module.bias.detach(), module.eps)


def _affine(*modules: Any) -> Affine:
    if type(modules[0]) is Conv1D:
        return Affine(modules[0].weight.detach(), modules[0].bias.detach())
    _require(all(type(module) is torch.nn.Linear for module in modules))
    biases = [module.bias for module in modules]
    _require(all(bias is None for bias in biases) or all(bias is not None for bias in biases))
    weight = _side_by_side([module.weight for module in modules])
    return Affine(weight.t(), None if biases[0] is None else _side_by_side(biases))


def _side_by_side(parts: Sequence[torch.nn.Parameter]) -> Tensor:
    """Return one tensor of which the parts are views; copy unless they already are."""
    if len(parts) == 1:
        return parts[0].detach()
    rows = [len(part) for part in parts]
    starts = [part.data_ptr() for part in parts]
    sizes = [part.numel() * part.element_size() for part in parts]
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if ends[:-1] == starts[1:] and len(storages) == 1 and all(part.is_contiguous() for part in parts):
        return parts[0].detach().as_strided((sum(rows), *parts[0].shape[1:]), parts[0].stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split(rows), strict=True):
        part.data = view
    return whole
