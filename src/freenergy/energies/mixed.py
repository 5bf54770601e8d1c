"""The energy of a sentence by a network, alone or on top of discrete features: mixed features (section 3.3.2, Ou 2024).

    E(x) = −U(x),        U(x) = λ · f(x) + s · h(x) + b        x a whole sentence with its EOS, else E = +inf

f are patterns of words and classes (``Discrete``), h is one of the heads of ``heads``. ``Mixed`` plays both roles, as
``Discrete`` does: an ``Energy`` for samplers and servers, and the potential of a ``RandomField``.

    energy.json   energy.safetensors   discrete/        settings; the head; the weights of patterns, if any
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from safetensors.torch import load_file, save_file
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, overwritable_folder, read_json, write_json
from freenergy.core.roles import LanguageModel
from freenergy.core.sentences import Sentences
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.energies.discrete import Discrete, sentence_numbers
from freenergy.energies.features import ARRAYS, CONFIG
from freenergy.energies.heads import HeadSettings, NeuralHead
from freenergy.energies.module import EnergyModule

KIND, _DISCRETE = "mixed", "discrete"
_PLACES = 20_000  # that the network reads at once, padding included


@final
class Mixed(EnergyModule):
    """−λ · f(x) − s · h(x) − b of whole sentences of 1 … ``longest`` words."""

    def __init__(self, head: NeuralHead, discrete: Discrete | None, bias: float, *, eos: int, longest: int) -> None:
        super().__init__()
        if discrete is not None and discrete.features.vocab_size != head.vocab_size:
            raise UserError(
                f"the head knows {head.vocab_size} words and the features {discrete.features.vocab_size}: make both of "
                "one vocabulary"
            )
        self.head, self.discrete, self.bias, self.eos, self.longest = head, discrete, bias, eos, longest

    def potential(self, text: Sentences) -> Float64[np.ndarray, " R"]:
        """Return U of each sentence."""
        found = head_potential(self.head, text) + self.bias
        return found if self.discrete is None else found + self.discrete.potential(text)

    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Return −U of context and continuation as one sentence."""
        return -sentence_numbers(x, self.eos, self.longest, self.potential)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, completely or not at all."""
        with atomic_write(overwritable_folder(folder, CONFIG)) as aside:
            aside.mkdir()
            save_file({name: value.contiguous() for name, value in self.head.state_dict().items()}, aside / ARRAYS)
            if self.discrete is not None:
                self.discrete.save_pretrained(aside / _DISCRETE)
            record = {"kind": KIND, "settings": asdict(self.head.settings), "vocab_size": self.head.vocab_size}
            record |= {"bias": self.bias, "eos": self.eos, "longest": self.longest}
            write_json(aside / CONFIG, record | {"has_features": self.discrete is not None})

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, base: LanguageModel | None = None, tokenizer: Tokenizer | None = None
    ) -> "Mixed":
        """Load what ``save_pretrained`` wrote; a tokenizer with another vocabulary is refused."""
        record: dict[str, Any] = read_json(Path(folder) / CONFIG)
        size = int(record["vocab_size"])
        if tokenizer is not None and tokenizer.vocab_size != size:
            raise UserError(
                f"the energy in {folder} knows {size} words and the tokenizer {tokenizer.vocab_size}: "
                "take the tokenizer of its run"
            )
        head = NeuralHead(HeadSettings(**record["settings"]), size)
        head.load_state_dict(load_file(Path(folder) / ARRAYS))
        has_features = bool(record["has_features"])
        discrete = Discrete.from_pretrained(Path(folder) / _DISCRETE, tokenizer=tokenizer) if has_features else None
        sizes = {"eos": int(record["eos"]), "longest": int(record["longest"])}
        return cls(head.eval(), discrete, float(record["bias"]), **sizes)


def padded(text: Sentences, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the tokens [R, T] of some sentences, and where there are any."""
    sizes = np.diff(text.bounds)[rows]
    place = np.arange(int(sizes.max(initial=0)))
    mask = place < sizes[:, None]
    at = np.minimum(text.bounds[:-1][rows][:, None] + place, max(len(text.tokens) - 1, 0))
    return torch.from_numpy(np.where(mask, text.tokens[at], 0).astype(np.int64)), torch.from_numpy(mask)


@torch.no_grad()
def head_potential(head: NeuralHead, text: Sentences) -> Float64[np.ndarray, " R"]:
    """Return s · h of each sentence; sentences of like lengths are read together."""
    sizes, found = np.diff(text.bounds), np.zeros(text.num)
    order = np.argsort(sizes, kind="stable")
    first = 0
    while first < text.num:
        last = first + 1
        while last < text.num and (last + 1 - first) * sizes[order[last]] <= _PLACES:
            last += 1
        rows = order[first:last]
        found[rows] = (head.scale * head.potential(*padded(text, rows))).double().numpy()
        first = last
    return found
