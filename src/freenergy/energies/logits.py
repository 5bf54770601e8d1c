"""The energy that a language model's own logits hold, when it was trained to be one (E-ARM).

    E(c, x) = −S(c, x_<K) = −log Σ_v e^{f(v; c, x_<K)},        f = the base's logits, K = the length of x

    P_LM(x | c) · e^{−E(c, x)} = q(x_<K | c) · e^{f(x_K; c, x_<K)}          (Eq. 4 of Wang et al. 2022)

It has no weights of its own, and nothing of it is learned here: the base has learned it (``base.earm``). A base that
was trained by cross-entropy alone has logits whose level says nothing.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal, final

from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.files import atomic_write, overwritable_folder, write_json
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.energies.batching import in_batches
from freenergy.energies.features import CONFIG, read_settings
from freenergy.energies.log_ratio import predicting, reader_of
from freenergy.energies.module import EnergyModule
from freenergy.energies.saving import network_of
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit
from freenergy.energies.trunk import States, readable


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEnergy(EnergySettings):
    """The level of the base's own logits, for a base that was trained with ``base.earm``; nothing is learned."""

    fit: ClassVar[Fit] = "none"
    kind: Literal["logits"] = "logits"

    @property
    def reads_base(self) -> bool:
        """Return True: it is the level of the base's logits."""
        return True

    def build(self, inputs: BuildInputs) -> "Logits":
        """Read the base, which has learned it."""
        return Logits(self, inputs.base)


@final
class Logits(EnergyModule):
    """−S at the last token; 0 for a continuation of none."""

    def __init__(self, settings: LogitsEnergy, base: LanguageModel) -> None:
        super().__init__()
        self.settings, self.eos = settings, base.eos
        # in a tuple, so that the base is not a part of this module: it is neither trained nor saved
        self._base = reader_of(network_of(base, settings.kind), settings.kind)

    def forward(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute E(c, x)."""
        trunk, head = self._base
        return in_batches(readable(x, self.eos, trunk.device), trunk, lambda states, part: _energy(states, head, part))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the settings, which are all there is."""
        with atomic_write(overwritable_folder(folder, CONFIG)) as aside:
            aside.mkdir()
            write_json(aside / CONFIG, {"kind": self.settings.kind, "settings": asdict(self.settings)})

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Logits":
        """Load it for the base whose logits it reads."""
        return cls(LogitsEnergy(**read_settings(Path(folder), "logits")), base)


def _energy(states: States, head: nn.Module, x: Continuations) -> Float[Tensor, "B N"]:
    B, N, L = x.tokens.shape
    if not L:
        return states.prefix.new_zeros(B, N)
    before = predicting(states, x)
    last = (x.lengths - 1).clamp(min=0).view(B, N, 1, 1).expand(B, N, 1, before.shape[-1])
    S: Tensor = head(before.gather(2, last).squeeze(2)).float().logsumexp(-1)
    return -S * (x.lengths > 0)
