"""An energy that reads prefix and continuation in both directions.

    E(c, x) = w · pool(h(c, x)) + b,      h the last hidden states of a bidirectional network

It is the BiT of Deng et al. (2020). The network is the base's own with the causal mask removed, one that first learned
to fill masks on the corpus, or a pretrained encoder, which reads text through its own tokenizer (``crossing``).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations, Soft
from freenergy.corpus import Tokenizer
from freenergy.energies.batching import ahead, in_batches, portions, rows_in_batches, wants_gradients
from freenergy.energies.int8 import Int8Energy, Int8Settings
from freenergy.energies.retokenize import Apart, Crossing, Together
from freenergy.energies.saving import copied, headless, network_of, read_record, rebuilt, saved, without_head
from freenergy.energies.settings import BuildInputs
from freenergy.energies.trunk import States, readable
from freenergy.lm.load import locate_model
from freenergy.lm.presets import Shape, preset, shape_in, shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BitEnergy(Int8Settings):
    """A bidirectional trunk; pooled states to a scalar.

    ``start``: "encoder" is a pretrained encoder with its own tokenizer (``encoder`` names it), "base" the base's
    weights with the causal mask removed, "scratch" a network of ``preset`` that first learns to fill masks.
    """

    kind: Literal["bit"] = "bit"
    start: Literal["encoder", "base", "scratch"] = "base"
    encoder: str = ""
    preset: str = "tiny"
    mask_share: float = 0.15  # of tokens, while a scratch trunk learns to fill masks
    prefix_once: bool = False  # the prefix's states do not see the continuation, and are computed once for N candidates

    def __post_init__(self) -> None:
        Int8Settings.__post_init__(self)
        if (self.start == "encoder") != bool(self.encoder):
            raise UserError(
                f'start is "{self.start}" and encoder {self.encoder!r}: an encoder goes with "encoder" alone'
            )
        check_range(self, "mask_share", above=0, below=1)

    def build(self, inputs: BuildInputs) -> "Bit":
        """Start as the encoder, as a copy of the base, or as a network that has learned to fill masks."""
        if self.start == "encoder":
            return Bit.from_encoder(self, locate_model(self.encoder, inputs.progress), inputs.corpus.tokenizer)
        if self.start == "base":
            return Bit.from_base(self, inputs.base)
        return Bit.from_trunk(self, inputs.train_masked_trunk(self.preset, self.mask_share, self.dropout))

    @property
    def trains_masked_trunk(self) -> bool:
        """Return whether its network first learns to fill masks."""
        return self.start == "scratch"

    @property
    def reads_base(self) -> bool:
        """Return whether its network starts as the base's."""
        return self.start == "base"

    @property
    def shares_prefix(self) -> bool:
        """Return whether a prefix is read once for all its continuations."""
        return self.prefix_once

    def fingerprints(self, stage: Path, progress: Progress) -> list[str]:
        """Fingerprint the encoder."""
        if self.start != "encoder":
            return []
        from freenergy.lm.checkpoints import checkpoint_fingerprint

        return [checkpoint_fingerprint(locate_model(self.encoder, progress))]

    def citations(self) -> dict[str, str]:
        """Cite masked language models where the trunk is one."""
        return {} if self.start == "base" else {"devlin2019bert": "masked language models"}

    def trunk(self, base: Shape | None, vocab_size: Callable[[], int]) -> Shape | None:
        """Return the shape of the encoder, of the preset (with a mask in its vocabulary), or of the base."""
        if self.start == "encoder":
            return shape_in(locate_model(self.encoder))
        if self.start == "scratch":
            return shape_of(preset(self.preset).config(vocab_size=vocab_size() + 1, eos=0))
        return base


@final
class Bit(Int8Energy):
    """An energy with ``network`` as its trunk; ``crossed`` counts retokenized strings, ``lost`` what they lost."""

    def __init__(
        self, settings: BitEnergy, network: "PreTrainedModel", *, eos: int, crossing: Crossing | None = None
    ) -> None:
        super().__init__(settings, network, "prefix_once" if settings.prefix_once else "bidirectional", eos=eos)
        self.crossing, self.prefix_once, self.crossed = crossing, settings.prefix_once, 0
        self.lost: Counter[str] = Counter()

    @classmethod
    def from_base(cls, settings: BitEnergy, base: LanguageModel) -> "Bit":
        """Begin as a copy of the base, with the causal mask removed."""
        return cls(settings, copied(without_head(network_of(base, settings.kind))), eos=base.eos)

    @classmethod
    def from_trunk(cls, settings: BitEnergy, model: "PreTrainedModel") -> "Bit":
        """Begin as a copy of a model that has learned to fill masks."""
        return cls(settings, copied(without_head(model)), eos=model.config.eos_token_id)

    @classmethod
    def from_encoder(cls, settings: BitEnergy, folder: str | Path, tokenizer: Tokenizer) -> "Bit":
        """Begin as a pretrained encoder, which reads the text of the corpus' tokens."""
        crossing = Crossing.from_folder(tokenizer, Path(folder))
        return cls(settings, load_encoder(Path(folder)), eos=tokenizer.eos, crossing=crossing)

    def forward(self, x: Continuations | Soft) -> Float[Tensor, "B N"]:
        """Compute E(c, x); of soft tokens with their gradient, whether or not the weights learn."""
        if isinstance(x, Soft) and self.crossing is not None:
            raise UserError("an encoder with its own tokenizer reads text, not soft tokens: take another start")
        x = readable(x, self.eos, self.trunk.device)
        if isinstance(x, Continuations) and not wants_gradients(self):
            return self._without_gradients(x)
        states = self.trunk(x) if isinstance(x, Soft) or self.crossing is None else self._through_text(x)
        energy: Tensor = self.readout(states)
        return energy

    def lossy(self, x: Continuations) -> Bool[Tensor, "B N"]:
        """Return which strings the energy cannot read exactly."""
        return torch.tensor([bool(reasons) for reasons in self._losses(x)], dtype=torch.bool).view(x.shape)

    def diagnose(self, validation: Callable[[], Continuations], progress: Progress) -> dict[str, Any]:
        """Report the share of strings that lose characters on their way to the encoder's tokenizer, and why."""
        if self.crossing is None:
            return {}
        lost = self._losses(validation())
        losses, share = Counter(reason for reasons in lost for reason in reasons), sum(map(bool, lost)) / len(lost)
        if share:
            progress.say(
                f"{100 * share:.2g} % of the continuations lose characters on their way to the encoder's tokenizer "
                f"({', '.join(sorted(losses))}): it scores what is left of them"
            )
        return {"lossy_share": share, "losses": dict(losses)}

    def _losses(self, x: Continuations) -> list[frozenset[str]]:
        if self.crossing is None:
            return [frozenset()] * (x.shape[0] * x.shape[1])
        return self.crossing.together(readable(x, self.eos, torch.device("cpu"))).losses

    def _through_text(self, x: Continuations) -> States:
        """Read all strings at once, for training."""
        (B, N), device = x.shape, self.trunk.device
        crossed = self._taken(self._cross(x))
        if isinstance(crossed, Apart):
            states = self.trunk(crossed.x.to(device))
            return States(states.prefix, crossed.in_prefix.unsqueeze(1).to(device), states.x, crossed.in_x.to(device))
        whole = self.trunk.whole(crossed.rows.to(device)).view(B, N, -1, self.trunk.width)
        return States(whole, crossed.in_prefix.to(device), whole, crossed.in_x.to(device))

    def _without_gradients(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Read in batches; a thread retokenizes the next strings while the network reads the current ones."""
        if self.crossing is None:
            return in_batches(x, self.trunk, lambda states, _: self.readout(states))
        E = torch.zeros(x.shape, dtype=self.trunk.dtype, device=self.trunk.device)
        places = portions(*x.shape)
        crossed = ahead(lambda place: self._cross(x[place[0]].candidates(place[1])), places)
        for (b, n), part in zip(places, crossed, strict=True):
            E[b, n] = self._read(self._taken(part))
        return E

    def _cross(self, x: Continuations) -> Apart | Together:
        assert self.crossing is not None
        return self.crossing.apart(x) if self.prefix_once else self.crossing.together(x)

    def _read(self, crossed: Apart | Together) -> Float[Tensor, "B N"]:
        device, shape = self.trunk.device, crossed.in_x.shape[:2]
        if isinstance(crossed, Apart):
            marks = (crossed.in_prefix.to(device), crossed.in_x.to(device))
            return in_batches(crossed.x.to(device), self.trunk, lambda states, _: self.readout(states), marks)
        marks = (crossed.in_prefix.flatten(0, 1), crossed.in_x.flatten(0, 1))
        return rows_in_batches(crossed.rows, *marks, self.trunk, self.readout).view(shape)

    def _taken(self, crossed: Apart | Together) -> Apart | Together:
        """Count what was lost, and refuse what does not fit."""
        self.crossed += len(crossed.losses)
        for lost in crossed.losses:
            self.lost.update(lost)
        needed, limit = crossed.longest, self.trunk.max_length
        if limit is not None and needed > limit:
            raise UserError(
                f"prefix and continuation are {needed} tokens of the encoder, which reads {limit}: set corpus.prefix "
                "lower"
            )
        return crossed

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the energy, completely or not at all; with an encoder's tokenizer where there is one."""
        special = None if self.crossing is None else self.crossing.special
        with saved(folder, self, self.settings, self.trunk.network, special=special, ranges=self.ranges) as aside:
            if self.crossing is not None:
                self.crossing.save(aside / "tokenizer")

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "Bit":
        """Return the energy as it was saved."""
        record, crossing = read_record(folder), None
        if record["special"] is not None:
            crossing = Crossing.from_saved(tokenizer, Path(folder) / "tokenizer", record["special"])
        energy = cls(BitEnergy(**record["settings"]), rebuilt(folder), eos=base.eos, crossing=crossing)
        energy._fill(folder)
        return energy


def load_encoder(folder: Path) -> "PreTrainedModel":
    """Load an encoder in float32: safetensors only, never its own code."""
    from transformers import AutoModel

    try:
        loaded: Any = AutoModel.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{folder} does not load as an encoder ({reason}): fetch it again") from error
    network, info = loaded
    lost = sorted(key for key in map(str, [*info["missing_keys"], *info["mismatched_keys"]]) if "pooler" not in key)
    if lost:
        raise UserError(f"{folder} lacks {len(lost)} of its weights (the first is {lost[0]}): fetch it again")
    return headless(network)
