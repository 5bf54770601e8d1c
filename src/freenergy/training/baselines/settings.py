"""Which baselines: the object is its configuration, and the union of these types is the registry.

``longer`` is P_LM trained for more steps (the same compute), ``balm`` a bigger network from scratch (the same
parameters), ``ralm`` a second network whose logits are added (Eq. 6), ``local`` the features of an energy used place by
place. All sum to one over the vocabulary at every place.
"""

import re
from dataclasses import dataclass, field
from typing import Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.training.settings import Optimisation

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,49}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBaseline:
    """The settings of every baseline: each learns from blocks of text."""

    kind: str
    name: str
    block: int = 160  # tokens of a training row
    validation_tokens: int = 50_000  # of the validation text, read for early stopping
    optimisation: Optimisation = field(default_factory=lambda: Optimisation(steps=400, warmup=50, validate_every=50))

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(f"name is {self.name[:60]!r}: take up to 50 letters, digits, dots, dashes and underscores")
        check_range(self, "block", "validation_tokens", at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkBaseline(TrainedBaseline):
    """The settings of a baseline that is a transformer."""

    dropout: float = 0.0

    def __post_init__(self) -> None:
        TrainedBaseline.__post_init__(self)
        check_range(self, "dropout", at_least=0, below=1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LongerBaseline(NetworkBaseline):
    """The base's own network, trained on with a schedule of its own; for a pretrained base that is fine-tuning."""

    kind: Literal["longer"] = "longer"
    name: str = "longer"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BalmBaseline(NetworkBaseline):
    """A bigger network of the shape of ``preset``, trained from scratch on the same text.

    ``parameters``: "match" widens the shape until it has as many parameters as the base and ``extra`` more; "preset"
    takes it as it is.
    """

    kind: Literal["balm"] = "balm"
    name: str = "balm"
    preset: str = ""  # none given: the preset that the base was trained by
    parameters: Literal["match", "preset"] = "match"
    extra: int | None = None  # parameters of the energy; none given: as many again as the base has
    optimisation: Optimisation = field(default_factory=Optimisation)

    def __post_init__(self) -> None:
        NetworkBaseline.__post_init__(self)
        if self.extra is not None and (self.extra < 0 or self.parameters == "preset"):
            raise UserError(
                f'extra is {self.extra} and parameters "{self.parameters}": extra is 0 or more, and goes with "match"'
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RalmBaseline(NetworkBaseline):
    """The residual auto-regressive model: a second network, initially a copy of the base, whose logits are added."""

    kind: Literal["ralm"] = "ralm"
    name: str = "ralm"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBaseline(TrainedBaseline):
    """The features of a linear energy, used place by place.

    "ngram": a mix of n-grams of the training text, cache and copies, fitted to validation windows. "probe": the base's
    hidden states and the entropy of its predictions, trained on training text. "both": the second, the first on it.
    """

    kind: Literal["local"] = "local"
    name: str = "local"
    features: Literal["ngram", "probe", "both"] = "ngram"
    order: int = 5  # of the longest n-gram model; all shorter ones are features too
    windows: int = 50  # of the validation text, whose tokens the n-gram weights are fitted to
    layers: tuple[int, ...] = ()  # hidden states that are read; none given: those of the probe energy
    rank: int = 64  # of the map from states to the vocabulary

    def __post_init__(self) -> None:
        TrainedBaseline.__post_init__(self)
        check_range(self, "windows", "rank", at_least=1)
        check_range(self, "order", at_least=1, at_most=8)


BaselineSettings = LongerBaseline | BalmBaseline | RalmBaseline | LocalBaseline


def check_baselines(baselines: tuple[BaselineSettings, ...]) -> None:
    """Refuses two baselines with the same name."""
    names = [each.name for each in baselines]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"two baselines are named {twice[0]!r}: give each a name of its own")
