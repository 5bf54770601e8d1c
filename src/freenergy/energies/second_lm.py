"""An energy that holds a second language model, which stays as it is, against the base.

    E(c, x) = −w · z(φ(c, x)) − b,      φ = log Q(x | c) − log P_LM(x | c)

With w · z = φ the residual model is Q; in between it is a geometric mean of the two. Q is any causal language model: a
checkpoint or a served model. One that has other tokens reads the text: prefix and continuation are encoded each on its
own (``retokenize``), EOS crosses as EOS, and log Q is that of the tokens of x. φ is then not the ratio of two laws of
the same strings, but a feature like any other. For a base that only samples log P_LM is unknown, and φ = log Q(x | c).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json, write_json
from freenergy.core.progress import SILENT, Progress
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import Continuations
from freenergy.corpus import Tokenizer
from freenergy.energies.features import FeatureEnergy, read_settings
from freenergy.energies.retokenize import Crossing
from freenergy.energies.settings import BuildInputs, EnergySettings, Fit
from freenergy.lm.load import locate_model
from freenergy.lm.presets import Shape
from freenergy.lm.remote import API_KEY, RemoteLM
from freenergy.lm.sample_only import relative_log_prob

_SECOND = "second.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLMEnergy(EnergySettings):
    """The log-ratio of a second language model and the base; both stay as they are, and one weight is fitted."""

    fit: ClassVar[Fit] = "convex"
    kind: Literal["second-lm"] = "second-lm"
    path: str = ""  # a checkpoint: resource, Hugging Face id, folder or GGUF file; with ``url`` its tokenizer alone
    url: str = ""  # of a server with an OpenAI-style endpoint; without ``path`` its tokens are those of the corpus
    model: str = ""  # the name that the server knows it by

    def __post_init__(self) -> None:
        if not self.path and not self.url:
            raise UserError("a second language model is missing: set path to a checkpoint, or url to a server")

    def build(self, inputs: BuildInputs) -> "SecondLM":
        """Load the second model."""
        return SecondLM(self, inputs.base, second_model(self, inputs.corpus.tokenizer, inputs.progress))

    def fingerprints(self, stage: Path, progress: Progress) -> list[str]:
        """Fingerprint the weights of the second model; of a server nothing is known but its address."""
        return [] if self.url else [_fingerprint(self, progress)]

    def num_features(self, base: Shape | None) -> int:
        """Return 1."""
        return 1


class Second(NamedTuple):
    """The second model, how strings reach it where its tokens are others, and the name of its weights."""

    lm: LanguageModel
    crossing: Crossing | None
    fingerprint: str


def second_model(settings: SecondLMEnergy, tokenizer: Tokenizer, progress: Progress = SILENT) -> Second:
    """Load or reach the second model for text of this tokenizer."""
    own = _tokenizer(settings, tokenizer, progress)
    lm: LanguageModel
    if settings.url:
        key = os.environ.get(API_KEY)
        lm = RemoteLM(url=settings.url, model=settings.model, vocab_size=own.vocab_size, eos=own.eos, api_key=key)
    else:
        from freenergy.lm.huggingface import HuggingFaceLM

        lm = HuggingFaceLM.from_pretrained(locate_model(settings.path, progress), eos=own.eos)
    is_same = own.fingerprint == tokenizer.fingerprint
    crossing = None if is_same else Crossing(tokenizer, own.backend, cls=own.eos, sep=own.eos, unk=None)
    return Second(lm, crossing, _fingerprint(settings, progress))


def _tokenizer(settings: SecondLMEnergy, tokenizer: Tokenizer, progress: Progress) -> Tokenizer:
    """Return the tokenizer in the folder of the second model; a folder without one has the corpus' tokens."""
    from freenergy.lm.checkpoints import check_tokenizer, has_tokenizer

    if not settings.path:
        return tokenizer
    path = locate_model(settings.path, progress)
    if path.suffix == ".gguf" or has_tokenizer(path):
        return Tokenizer.from_pretrained(path)
    check_tokenizer(path, tokenizer)
    return tokenizer


def _fingerprint(settings: SecondLMEnergy, progress: Progress) -> str:
    from freenergy.lm.checkpoints import checkpoint_fingerprint

    if settings.url:
        return fingerprint([settings.url, settings.model])
    return checkpoint_fingerprint(locate_model(settings.path, progress))


@final
class SecondLM(FeatureEnergy):
    """w · (log Q − log P_LM)."""

    def __init__(self, settings: SecondLMEnergy, base: LanguageModel, second: Second) -> None:
        super().__init__(settings, ["log Q − log P"])
        self.base, self.second = base, second

    @property
    def fingerprint(self) -> str:
        """Fingerprint the settings and the second model."""
        return fingerprint([super().fingerprint, self.second.fingerprint])

    @torch.no_grad()
    def features(self, x: Continuations, *, leave_self_out: bool = False) -> Float[Tensor, "B N F"]:
        """Compute φ(x); ``leave_self_out`` changes nothing, as neither model holds counts."""
        log_base = relative_log_prob(self.base, x).to(self.weight.device)
        found: Tensor = self.log_second(x).to(self.weight.device) - log_base
        if not found.isfinite().all():
            raise UserError(
                "the second language model, or the base, gives some text the probability 0: take one that is smoothed"
            )
        return found.unsqueeze(-1)

    def log_second(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log Q(x | c), in the tokens of Q."""
        lm, crossing, _ = self.second
        return lm.log_prob(x if crossing is None else crossed(crossing, x)).double()

    def _save_more(self, folder: Path) -> None:
        write_json(folder / _SECOND, {"fingerprint": self.second.fingerprint})

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, base: LanguageModel, tokenizer: Tokenizer) -> "SecondLM":
        """Read what ``save_pretrained`` wrote; the second model is loaded from where it was, and must be the same."""
        settings = SecondLMEnergy(**read_settings(Path(folder), "second-lm"))
        second, record = second_model(settings, tokenizer), read_json(Path(folder) / _SECOND)
        if second.fingerprint != record["fingerprint"]:
            raise UserError(
                f"{settings.path} is not the second language model that the energy in {folder} was fitted with: put "
                "that one back, or train the energy again"
            )
        energy = cls(settings, base, second)
        energy._restore(Path(folder))
        return energy


def crossed(crossing: Crossing, x: Continuations) -> Continuations:
    """Return the same texts in the tokens of the second model, without the frame that ends them."""
    found = crossing.apart(x.to("cpu")).x
    return Continuations(found.contexts, found.tokens, found.lengths - 1)
