"""The energy of a sentence by discrete features: one weight per pattern of words and classes.

    E(x) = −λ · f(x) − b        x a whole sentence with its EOS; +inf where it was cut, has no word, or is too long

It is what the family ``random-field`` fits, and reads context and continuation as one sentence. ``Discrete`` plays both
roles: ``Energy`` for samplers and servers, and the potential U = −E of a ``RandomField``.

    energy.json   energy.safetensors     settings; weights, keys of the patterns, classes of the words
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from safetensors.numpy import load_file, save_file
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, overwritable_folder, read_json, write_json
from freenergy.core.roles import LanguageModel
from freenergy.core.sentences import Sentences
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.energies.features import ARRAYS, CONFIG
from freenergy.energies.module import EnergyModule
from freenergy.energies.sparse.features import SparseFeatures, SparseSettings

KIND = "discrete"


@final
class Discrete(EnergyModule):
    """−λ · f(x) − b of whole sentences of 1 … ``longest`` words."""

    def __init__(
        self, features: SparseFeatures, weights: Float64[np.ndarray, " F"], bias: float, *, longest: int
    ) -> None:
        super().__init__()
        if len(weights) != features.num:
            raise UserError(f"{len(weights)} weights for {features.num} features: give one each")
        self.features, self.weights, self.bias, self.longest = features, weights, bias, longest

    def potential(self, text: Sentences) -> Float64[np.ndarray, " R"]:
        """Return U = λ · f + b of each sentence."""
        return self.features.potential(text, self.weights) + self.bias

    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Return −U of context and continuation as one sentence."""
        return -sentence_numbers(x, self.features.eos, self.longest, self.potential)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, completely or not at all."""
        with atomic_write(overwritable_folder(folder, CONFIG)) as aside:
            aside.mkdir()
            arrays = self.features.arrays() | {"weights": self.weights}
            save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, aside / ARRAYS)
            record = {"kind": KIND, "settings": asdict(self.features.settings), "bias": self.bias}
            write_json(aside / CONFIG, record | {"eos": self.features.eos, "longest": self.longest})

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, base: LanguageModel | None = None, tokenizer: Tokenizer | None = None
    ) -> "Discrete":
        """Load what ``save_pretrained`` wrote; a tokenizer with another vocabulary is refused."""
        record: dict[str, Any] = read_json(Path(folder) / CONFIG)
        arrays = load_file(Path(folder) / ARRAYS)
        settings = dict(record["settings"])
        settings["types"] = tuple(settings["types"])
        weights = arrays.pop("weights")
        features = SparseFeatures.from_arrays(arrays, SparseSettings(**settings), eos=int(record["eos"]))
        if tokenizer is not None and tokenizer.vocab_size != features.vocab_size:
            raise UserError(
                f"the energy in {folder} knows {features.vocab_size} words and the tokenizer {tokenizer.vocab_size}: "
                "take the tokenizer of its run"
            )
        return cls(features, weights, float(record["bias"]), longest=int(record["longest"]))


def sentence_numbers(x: Continuations, eos: int, longest: int, potential: Any) -> Float[Tensor, "B N"]:
    """Return a potential of context and continuation as one sentence; −inf where that is not a whole sentence."""
    rows = x.joined()
    found = torch.full((len(rows),), -torch.inf, dtype=torch.float64)
    tokens, lengths = rows.tokens, rows.lengths
    # a context begins with the EOS of the document before: it is the start of the sentence, no word of it
    begins = (tokens[:, 0] == eos) & (lengths > 1) if tokens.shape[1] else torch.zeros(len(rows), dtype=torch.bool)
    keep = torch.arange(tokens.shape[1]) < lengths.unsqueeze(-1)
    if tokens.shape[1]:
        keep[:, 0] &= ~begins
    lengths = lengths - begins.long()
    inside = ((tokens == eos) & keep).sum(1)
    last = rows.tokens.gather(1, (rows.lengths - 1).clamp(min=0).unsqueeze(1))[:, 0] if tokens.shape[1] else lengths
    whole = (last == eos) & (inside == 1) & (lengths > 1) & (lengths <= longest + 1)
    if whole.any():
        flat = tokens[whole][keep[whole]].numpy()
        bounds = np.concatenate([[0], np.cumsum(lengths[whole].numpy())]).astype(np.int64)
        found[whole] = torch.from_numpy(potential(Sentences(flat, bounds)))
    return found.view(x.shape).to(x.tokens.device)
