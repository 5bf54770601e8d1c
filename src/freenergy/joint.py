"""The joint model: a language model and an energy that corrects it.

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c),      log_score = log_base − energy = log P(x | c) + log Z(c)

``log_score`` ranks continuations of one context exactly, since Z(c) is the same for all of them; between contexts it
does not compare. The pair is saved in one folder, in Hugging Face's manner, with a model card.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.base.opening import open_base, save_base
from freenergy.card import model_card
from freenergy.corpus import Tokenizer
from freenergy.energies.checked import energies_in_parts
from freenergy.energies.opening import load_energy
from freenergy.errors import UserError
from freenergy.protocols import Energy, LanguageModel
from freenergy.sequences import Continuations
from freenergy.storage import own_folder, read_json, whole, write_json, write_text

RECORD = "joint.json"


@final
@dataclass(frozen=True, slots=True)
class JointScores:
    """Both halves of a joint model's score of continuations, float64."""

    log_base: Float[Tensor, "batch num"]
    energy: Float[Tensor, "batch num"]

    @property
    def log_score(self) -> Float[Tensor, "batch num"]:
        """log P_LM − E: not normalised."""
        return self.log_base - self.energy


@final
class JointModel:
    """P(x | c) ∝ P_LM(x | c) · exp(−E(c, x))."""

    def __init__(self, base: LanguageModel, energy: Energy, tokenizer: Tokenizer | None = None) -> None:
        self.base = base
        self.energy = energy.eval() if isinstance(energy, nn.Module) else energy
        self.tokenizer = tokenizer

    @torch.no_grad()
    def scores(self, x: Continuations) -> JointScores:
        """log P_LM and E of each continuation."""
        for tokens in (x.contexts.tokens[x.contexts.mask], x.tokens[x.mask]):
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.base.vocab_size:
                raise UserError(
                    f"a token id is not below {self.base.vocab_size}: encode the text with the tokenizer of this model"
                )
        return JointScores(self.base.log_prob(x).double().cpu(), energies_in_parts(self.energy, x))

    def log_score(self, x: Continuations) -> Float[Tensor, "B N"]:
        """log P_LM(x | c) − E(c, x): ranks the continuations of one context, exactly."""
        return self.scores(x).log_score

    def save_pretrained(self, folder: str | Path, *, facts: dict[str, Any] | None = None) -> None:
        """Write base, energy, tokenizer and a model card into one folder, whole or not at all.

        ``facts`` are what is known of the pair (how it was trained and measured); they are kept and told by the card.
        """
        if self.tokenizer is None:
            raise UserError("this joint model has no tokenizer: pass one to JointModel before saving it")
        save_energy: Any = getattr(self.energy, "save_pretrained", None)
        if save_energy is None:
            raise UserError(f"the energy {type(self.energy).__name__} has no save_pretrained: give it one, then save")
        with whole(own_folder(folder, RECORD)) as aside:
            save_base(self.base, aside)
            save_energy(aside / "energy")
            self.tokenizer.save(aside / "tokenizer")
            record = {"kind": "joint", "tokenizer": self.tokenizer.fingerprint, "facts": facts or {}}
            write_json(aside / RECORD, record)
            write_text(aside / "README.md", model_card(self.base, self.energy, facts or {}))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "JointModel":
        """Load what ``save_pretrained`` has written."""
        folder = Path(folder)
        if not (folder / RECORD).is_file():
            raise UserError(f"there is no joint model in {folder}: give a folder that save_pretrained has made")
        tokenizer = Tokenizer.from_pretrained(folder / "tokenizer")
        if tokenizer.fingerprint != read_json(folder / RECORD).get("tokenizer"):
            raise UserError(f"the tokenizer in {folder} is not the one of the joint model: save it again")
        base = open_base(folder, tokenizer)
        return cls(base, load_energy(folder / "energy", base=base, tokenizer=tokenizer), tokenizer)
