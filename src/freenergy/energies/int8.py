"""The linear layers of a trained trunk in int8: another energy, close to the one that was trained, and faster.

    y_o = Σ_i W_oi · x_i + b_o   ≈   s_x · s_o · Σ_i (q_i − z) · k_oi  +  b_o
    q_i = round(x_i / s_x) + z,      k_oi = round(W_oi / s_o)

s_o is one scale for each output. s_x and z belong to the layer: 0 … 127 cover the range that its inputs had on texts
that were shown once (seven bits, as processors without VNNI add pairs of larger products wrongly). They are fixed then,
so the energy is a function of the string alone: scales that are computed for every batch would make it depend on
whatever else is in the batch. This energy is *the* energy, for data and draws alike.

The float32 weights stay, and are what is saved, together with the ranges.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.sequences import Continuations
from freenergy.energies.module import EnergyModule
from freenergy.energies.saving import fill, read_record
from freenergy.energies.settings import EnergySettings, Fit, Over, Pool
from freenergy.energies.trunk import Reading, Readout, Trunk
from freenergy.lm.presets import set_dropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

Ranges = dict[str, tuple[float, float]]  # of the inputs of each layer, by its name in the network
_STEPS = 127
_MARGIN = 0.1  # of a range, on either side: other texts go a little further


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Settings(EnergySettings):
    """Settings of an energy of pooled states, whose trunk can be read in int8."""

    fit: ClassVar[Fit] = "gradient"
    pool: Pool = "mean"
    over: Over = "continuation"  # which states are pooled
    dropout: float = 0.0
    int8: bool = False  # once it is trained its linear layers are read in int8, on a CPU

    def __post_init__(self) -> None:
        check_range(self, "dropout", at_least=0, below=1)

    @property
    def reads_int8(self) -> bool:
        """Return whether its network is quantised once it is trained."""
        return self.int8


class Int8Energy(EnergyModule):
    """E = w · pool(h) + b of a trunk that can be read in int8."""

    def __init__(self, settings: Int8Settings, network: "PreTrainedModel", reading: Reading, *, eos: int) -> None:
        super().__init__()
        self.settings, self.eos = settings, eos
        self.ranges: Ranges | None = None  # of what its layers read, where they read it in int8
        if settings.int8:
            check_int8(network)
        set_dropout(network, settings.dropout)
        self.trunk = Trunk(network, reading)
        self.readout = Readout(self.trunk.width, pool=settings.pool, over=settings.over, dtype=network.dtype)
        self.readout.to(network.device)

    def _fill(self, folder: str | Path) -> None:
        """Read the weights, and the ranges if there are any."""
        fill(folder, self)
        ranges = read_record(folder).get("ranges")
        if ranges is not None:
            put_in_int8(self, ranges)


@final
class Int8Linear(nn.Module):
    """A linear layer that reads in int8; ``is_exact`` makes it read in float32 again."""

    def __init__(self, layer: "nn.Linear | Conv1D", low: float, high: float) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.is_exact, self._turned = False, not isinstance(layer, nn.Linear)
        low, high = min(low, 0.0), max(high, 0.0)
        wider = _MARGIN * (high - low)
        self._scale = max((high - low + 2 * wider) / _STEPS, 1e-12)
        self._zero = round((wider - low) / self._scale)
        self._packed = _packed(self._matrix.detach(), None if layer.bias is None else layer.bias.detach())

    @property
    def _matrix(self) -> Float[Tensor, "out in"]:
        return self.weight.t() if self._turned else self.weight

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """Compute W·x + b."""
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            raise UserError("an energy in int8 has no gradients: train it in float32 (int8 = false), then quantise it")
        if x.device.type != "cpu" or x.dtype != torch.float32:
            raise _misplaced(x.device, x.dtype)
        if self.is_exact:
            return nn.functional.linear(x, self._matrix, self.bias)
        read = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y: Tensor = read(x.contiguous(), self._scale, self._zero, self._packed)
        return y


def quantised(energy: nn.Module, x: Continuations) -> Int8Energy:
    """Quantise the trunk of the energy in place, for good; ``x`` are texts such as it will read.

    Some dozens of strings are enough. ``save_pretrained`` and ``load_energy`` give the same bits again.
    """
    if not isinstance(energy, Int8Energy):
        raise UserError(f"a {type(energy).__name__} is not read in int8: quantise a bit or a unit energy")
    if any(isinstance(layer, Int8Linear) for layer in energy.trunk.network.modules()):
        raise UserError("the energy is in int8 already: quantise it once")
    put_in_int8(energy, measured(energy, x))
    return energy


def put_in_int8(energy: Int8Energy, ranges: Mapping[str, Any]) -> None:
    """Replace the trunk's layers, whose inputs have these ranges."""
    network = energy.trunk.network
    check_int8(network)
    for name, (low, high) in ranges.items():
        above, _, last = name.rpartition(".")
        layer: Any = network.get_submodule(name)
        setattr(network.get_submodule(above), last, Int8Linear(layer, float(low), float(high)))
    energy.requires_grad_(False).eval()
    energy.ranges = dict(ranges)
    energy.settings = replace(energy.settings, int8=True)


@torch.no_grad()
def measured(energy: Int8Energy, x: Continuations) -> Ranges:
    """Return the smallest and the largest input of each linear layer of the trunk while the energy reads ``x``."""
    from transformers.pytorch_utils import Conv1D

    ranges: Ranges = {}

    def watch(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        low, high = (value.item() for value in inputs[0].aminmax())
        before = ranges.get(name, (low, high))
        ranges[name] = (min(low, before[0]), max(high, before[1]))

    network = energy.trunk.network
    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    hooks = [layer.register_forward_pre_hook(partial(watch, name)) for name, layer in layers.items()]
    training = energy.training
    try:
        energy.eval()(x)
    finally:
        energy.train(training)
        for hook in hooks:
            hook.remove()
    return ranges


@torch.no_grad()
def int8_error(energy: Int8Energy, x: Continuations) -> tuple[float, float]:
    """Measure the difference between int8 and float32 energies of ``x``: its maximum and root mean square."""
    layers = [layer for layer in energy.trunk.network.modules() if isinstance(layer, Int8Linear)]
    if not layers:
        raise UserError("the energy is not in int8, so it has no error of that: pass it to quantised first")
    found = energy(x).double()
    try:
        for layer in layers:
            layer.is_exact = True
        away = found - energy(x).double()
    finally:
        for layer in layers:
            layer.is_exact = False
    return away.abs().max().item(), away.square().mean().sqrt().item()


def check_int8(network: "PreTrainedModel") -> None:
    """Refuse what int8 cannot be read on, before anything is trained for it."""
    if network.device.type != "cpu" or network.dtype != torch.float32:
        raise _misplaced(network.device, network.dtype)
    if not {"x86", "fbgemm"} & set(torch.backends.quantized.supported_engines):
        raise UserError("this processor has no int8 layers in torch: leave int8 = false")


def _packed(weight: Float[Tensor, "out in"], bias: Tensor | None) -> Any:
    scale = (weight.abs().amax(1) / _STEPS).clamp(min=1e-12).double()
    whole = (weight / scale.unsqueeze(1)).round().to(torch.int8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these tensors will go; their successor is another package
        zero = torch.zeros(len(scale), dtype=torch.long)
        made = torch._make_per_channel_quantized_tensor(whole, scale, zero, 0)
        return torch.ops.quantized.linear_prepack(made, bias)


def _misplaced(device: torch.device, dtype: torch.dtype) -> UserError:
    return UserError(f"int8 is read on a CPU from float32, not on {device.type} from {dtype}: set int8 = false")
