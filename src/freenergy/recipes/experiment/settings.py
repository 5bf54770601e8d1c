"""What an experiment can be told: the subject, the base, how its training goes on, and the rows of the table.

base:      cross-entropy from fresh weights                          row:  the base's weights, then its own teaching
control:   the row without E-ARM, for as many steps as cost the same CPU
"""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, Literal, final

from freenergy.core.errors import UserError
from freenergy.corpus.settings import BytePairTokenizer, CorpusSettings, PretrainedTokenizer, WordTokenizer
from freenergy.training.lm_loss import LanguageModelLoss
from freenergy.training.settings import Optimisation


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageSubject:
    """Running text, learned in blocks; perplexity of the test text, and of windows with energy re-sampling."""

    MEASURING: ClassVar[tuple[str, ...]] = ("split", "certified_windows", "candidates")

    kind: Literal["language"] = "language"
    corpus: CorpusSettings
    tokenizer: BytePairTokenizer | WordTokenizer | PretrainedTokenizer = field(default_factory=BytePairTokenizer)
    preset: str = "tiny"
    start: str = ""  # a checkpoint's path or name, where weights are not fresh; then the preset is not used
    block: int = 160  # tokens of a training row
    known: int | None = None  # first tokens of a row that a fake row shares with it; none given: the corpus' prefix
    memory: int = 0  # tokens before the block that are seen without gradient; the text is then read in its order
    lanes: int = 16  # rows of a batch, where there is a memory
    dropout: float = 0.0
    validation_tokens: int = 50_000
    split: Literal["validation", "test"] = "test"
    certified_windows: int = 0  # on which re-sampling by E-ARM's energy of whole texts is measured
    candidates: int = 64  # n of that certificate, the true text among them

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("validation_tokens", 1), ("memory", 0), ("lanes", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}: set it to {least} or more")
        if self.known is not None and not 0 <= self.known < self.block:
            raise UserError(f"known is {self.known}: set it to at least 0 and below block, which is {self.block}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}: set it to at least 0 and below 1")
        if self.certified_windows < 0 or self.candidates < 3:
            raise UserError(
                f"certified_windows is {self.certified_windows} and candidates {self.candidates}: set them to at least "
                "0 and 3"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The training that all rows go on from; rows from scratch take its optimisation."""

    optimisation: Optimisation = field(default_factory=Optimisation)
    teaching: LanguageModelLoss = field(default_factory=LanguageModelLoss)

    def __post_init__(self) -> None:
        if self.teaching.earm is not None:
            raise UserError("the base has E-ARM: leave base.teaching.earm out, and give E-ARM to a row")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """How rows go on: a fresh optimiser, so a short warm-up."""

    optimisation: Optimisation = field(default_factory=lambda: Optimisation(steps=400, warmup=20, validate_every=50))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    name: str
    teaching: LanguageModelLoss = field(default_factory=LanguageModelLoss)
    scratch: bool = False  # from fresh weights with the base's optimisation, and not from the base
    control: bool = False  # also the same without E-ARM, for the same CPU

    def __post_init__(self) -> None:
        if self.control and self.teaching.earm is None:
            raise UserError(
                f"the row {self.name!r} has a control but no E-ARM: a control is a row without its E-ARM, so leave "
                "control out or give it teaching.earm"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Rows for start epochs and weights of E-ARM; ``full`` crosses every epoch with every weight.

    Otherwise one of the two varies while the other is that of ``teaching.earm``. One control serves all: it costs what
    the costliest of them costs.
    """

    teaching: LanguageModelLoss
    start_epochs: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    full: bool = True
    scratch: bool = True
    control: bool = True

    def __post_init__(self) -> None:
        if self.teaching.earm is None:
            raise UserError("study.teaching has no E-ARM: give it study.teaching.earm, whose settings are to vary")
        if not self.start_epochs and not self.weights:
            raise UserError("the study varies nothing: set study.start_epochs or study.weights")
        for name in ("start_epochs", "weights"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise UserError(f"study.{name} names a value twice: leave one of them out")

    def points(self) -> list[tuple[float, float]]:
        """Start epoch and weight of every row."""
        assert self.teaching.earm is not None
        epoch, weight = self.teaching.earm.start_epoch, self.teaching.earm.weight
        epochs, weights = self.start_epochs or (epoch,), self.weights or (weight,)
        if self.full:
            return list(product(epochs, weights))
        return list(dict.fromkeys([*((e, weight) for e in epochs), *((epoch, w) for w in weights)]))

    def at(self, start_epoch: float, weight: float) -> LanguageModelLoss:
        """The teaching of one point."""
        assert self.teaching.earm is not None
        return replace(self.teaching, earm=replace(self.teaching.earm, start_epoch=start_epoch, weight=weight))


def parted(settings: Any) -> tuple[dict[str, str], dict[str, str]]:
    """A subject's settings that decide what is learned, and those that only measuring reads."""
    measuring = getattr(type(settings), "MEASURING", ())
    fields = {name: repr(getattr(settings, name)) for name in settings.__dataclass_fields__}
    return (
        {name: value for name, value in fields.items() if name not in measuring},
        {name: value for name, value in fields.items() if name in measuring},
    )
