"""Low-rank additions to the weights of a network (Hu et al. 2022), trained by the loop and merged at the end.

    W' = W + (α / r) · B A,        A [r × in] random, B [out × r] = 0 at first; only A and B learn

The additions are peft's layers. The loop trains them as one module of their own, so that a checkpoint holds A, B and
their moments and not the frozen network; merged, the network has the shape and the speed that it had before.
"""

import warnings
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.training.settings import TuneSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@final
class LoraNetwork:
    """A causal network of which only the additions learn; the network itself is changed in place."""

    def __init__(self, model: "PreTrainedModel", settings: TuneSettings, rng: Rng) -> None:
        self._adapted, layers = _adapted(model, settings, rng)
        self._network = CausalNetwork(model)
        self.vocab_size = self._network.vocab_size
        self.module = nn.ModuleList(
            [nn.ModuleList([layer.lora_A, layer.lora_B, layer.lora_dropout]) for layer in layers]
        )

    def logits(self, given: Int[Tensor, "rows 1"], tokens: Int[Tensor, "rows T"]) -> Float[Tensor, "rows T V"]:
        """Return the logits of each token, by what comes before it."""
        return self._network.logits(given, tokens)

    def draw(
        self, given: Int[Tensor, "rows 1"], known: Int[Tensor, "rows P"], length: int, rng: Rng
    ) -> tuple[Int[Tensor, "rows K"], Bool[Tensor, "rows K"]]:
        """Draw ``length`` tokens after the known ones."""
        return self._network.draw(given, known, length, rng)

    def merge(self) -> "PreTrainedModel":
        """Return the plain network with W' for W."""
        merged: PreTrainedModel = self._adapted.merge_and_unload()
        return merged.requires_grad_(True)


def _adapted(model: "PreTrainedModel", settings: TuneSettings, rng: Rng) -> tuple[Any, list[Any]]:
    """Put the layers of peft in place; return its model, which can merge them, and the layers."""
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise UserError(
            'method = "lora" needs peft: pip install \'freenergy[tune]\', or set base.tune.method = "full"'
        ) from None
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore", UserWarning)  # GPT-2 stores its weights transposed, which peft finds out itself
        torch.manual_seed(rng.integer())  # draws A
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            reason = " ".join(str(error).split())[:160]
            raise UserError(
                f"LoRA finds no layers to adapt ({reason}): set base.tune.targets to names of linear layers, or leave "
                "it out"
            ) from None
    return adapted, [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
