"""A causal language model of Hugging Face, with or without a memory.

    logits(g, x)[t] = f(· ; memory, g, x_<t),        g = the token before the block

With ``memory`` = M the network reads on, block after block of each row, and sees the keys and values of the last M
tokens before the block, without a gradient: the recurrence of Transformer-XL (Dai et al. 2019). Theirs keeps the states
and computes the keys again; ours keeps the keys, which with rotary places know how far away they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng


@final
class CausalNetwork:
    """A ``PreTrainedModel`` with a language-model head; ``rows`` is the batch size, which a memory has to know."""

    def __init__(self, model: PreTrainedModel, *, memory: int = 0, rows: int = 0) -> None:
        self.module, self.memory, self.rows = model, memory, rows
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        if memory and config.model_type not in ("gpt_neox", "llama"):
            raise UserError(
                f"a memory needs rotary places, which {config.model_type} has not: take a preset of another family, "
                "or memory = 0"
            )
        self._keys = [torch.zeros(shape) for shape in self._shapes(config)] if memory else []
        # tokens before the block, in all and in the memory: positions keep counting, the memory fills up to M
        self._counts = torch.zeros(2, dtype=torch.int64)
        self._fresh: tuple[int, list[Tensor]] | None = None  # tokens of a block that was read, and what it leaves

    def logits(self, given: Int[Tensor, "rows 1"], tokens: Int[Tensor, "rows T"]) -> Float[Tensor, "rows T V"]:
        """Return the logits of each token, by what comes before it."""
        read = torch.cat([given, tokens[:, :-1]], dim=1).to(self.module.device)
        if not self.memory:
            plain: Tensor = self.module(read, use_cache=False).logits
            return plain
        cache = self._cache(len(read))
        logits: Tensor = self._read(read, cache).logits
        if self._fresh is None:  # what is read first in a step is the text; what follows may be made up
            self._fresh = read.shape[1], _tensors(cache, self.memory)
        return logits

    @torch.no_grad()
    def draw(
        self, given: Int[Tensor, "rows 1"], known: Int[Tensor, "rows P"], length: int, rng: Rng
    ) -> tuple[Int[Tensor, "rows K"], Bool[Tensor, "rows K"]]:
        """Draw ``length`` tokens after the known ones; all of them count, since a stream continues after EOS."""
        with inference(self.module):
            read, cache = torch.cat([given, known], dim=1).to(self.module.device), self._cache(len(given))
            drawn: list[Tensor] = []
            for k in range(length):
                logits = self._read(read, cache).logits[:, -1].float()
                read = rng.child("token", k).categorical(logits).unsqueeze(1)
                drawn.append(read)
        tokens = torch.cat(drawn, dim=1).to(known.device)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    @property
    def state(self) -> dict[str, Tensor]:
        """Return the memory, live: a checkpoint keeps it, and fills it again."""
        counts = {"counts": self._counts} if self.memory else {}
        return counts | {f"memory.{i}": keys for i, keys in enumerate(self._keys)}

    def remember(self) -> None:
        """Take the block that was read first since the last call into the memory."""
        if self._fresh is None:
            return
        tokens, tensors = self._fresh
        kept = tensors[0].shape[2]
        for memory, fresh in zip(self._keys, tensors, strict=True):
            memory[:, :, self.memory - kept :] = fresh
        self._counts += torch.tensor([tokens, kept - int(self._counts[1])])
        self._fresh = None

    def forget(self) -> None:
        """Reset: the next block has nothing before it."""
        self._counts.zero_()
        for keys in self._keys:
            keys.zero_()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within this block another text is read from its beginning; afterwards the memory is what it was."""
        kept, counts, fresh = self._keys, self._counts, self._fresh
        self._keys, self._counts = [torch.zeros_like(keys[:1]) for keys in kept], torch.zeros_like(counts)
        self._fresh = None
        try:
            yield
        finally:
            self._keys, self._counts, self._fresh = kept, counts, fresh

    def _read(self, tokens: Int[Tensor, "rows S"], cache: DynamicCache) -> Any:
        start = int(self._counts[0]) + cache.get_seq_length() - int(self._counts[1])
        place = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.module(tokens, position_ids=place, past_key_values=cache, use_cache=True)

    def _cache(self, rows: int) -> DynamicCache:
        """Return the memory as the model wants it, a copy."""
        cache, kept = DynamicCache(), int(self._counts[1])
        if kept:
            device = self.module.device
            for layer in range(len(self._keys) // 2):
                keys, values = (each[:rows, :, self.memory - kept :] for each in self._keys[2 * layer : 2 * layer + 2])
                cache.update(keys.to(device), values.to(device), layer)
        return cache

    def _shapes(self, config: Any) -> list[tuple[int, int, int, int]]:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return [(self.rows, heads, self.memory, width)] * (2 * config.num_hidden_layers)


@contextmanager
def inference(module: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off within this block."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def _tensors(cache: DynamicCache, max_tokens: int) -> list[Tensor]:
    """Return keys and values of the last ``max_tokens`` tokens, layer by layer."""
    layers: list[Any] = cache.layers
    return [each[:, :, -max_tokens:].detach().cpu() for layer in layers for each in (layer.keys, layer.values)]
