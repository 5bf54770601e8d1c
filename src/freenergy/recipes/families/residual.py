"""Family ``residual``: a language model, and an energy that corrects it.

P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c)

corpus → base → (tuned) → negatives → energy → candidates → baselines → evaluation
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import Field

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus.chunks import check_chunks
from freenergy.corpus.resources import RESOURCES
from freenergy.corpus.settings import BytePairTokenizer, CorpusSettings, PretrainedTokenizer, WordTokenizer
from freenergy.energies.registry import AnyEnergy
from freenergy.evaluation.perplexity import Measurement
from freenergy.lm.settings import NgramBase, RemoteBase
from freenergy.noise.settings import NegativeSettings
from freenergy.recipes.families.common import CommonRecipe
from freenergy.runs.run import Run, Stage
from freenergy.training.baselines.settings import BaselineSettings, check_baselines
from freenergy.training.settings import EnergyTraining, PretrainedBase, TrainedBase, tuning


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What is measured and shown at the end of a run."""

    split: Literal["train", "validation", "test"] = "test"
    windows: int = 400
    samples: int = 3  # continuations shown, each of another held-out prefix
    candidates: int = 256  # n of the certificate, the true continuation among them
    certified_windows: int = 100  # on which the residual model is measured
    position_windows: int = 0  # on which it is measured place by place: slow, since every place needs completions
    position_draws: int = 32  # completions at each place

    def __post_init__(self) -> None:
        if self.windows < 1 or self.samples < 0:
            raise UserError(f"windows is {self.windows} and samples {self.samples}: set them to at least 1 and 0")
        if self.candidates < 3 or self.certified_windows < 1:
            raise UserError(
                f"candidates is {self.candidates} and certified_windows {self.certified_windows}: set them to at least "
                "3 and 1, since the upper estimate of log Z is undefined with fewer than two draws next to the true "
                "text"
            )
        if self.position_windows < 0 or self.position_draws < 2:
            raise UserError(
                f"position_windows is {self.position_windows} and position_draws {self.position_draws}: set them to at "
                "least 0 and 2"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRecipe(CommonRecipe):
    """A language model, an energy that is trained to correct it, and what both are measured against."""

    family: Literal["residual"] = "residual"
    corpus: CorpusSettings
    tokenizer: Annotated[BytePairTokenizer | WordTokenizer | PretrainedTokenizer, Field(discriminator="kind")] = field(
        default_factory=BytePairTokenizer
    )
    base: Annotated[TrainedBase | NgramBase | PretrainedBase | RemoteBase, Field(discriminator="kind")] = field(
        default_factory=TrainedBase
    )
    negatives: NegativeSettings = field(default_factory=NegativeSettings)
    energy: Annotated[AnyEnergy, Field(discriminator="kind")] | None = None  # none: the base alone is measured
    training: EnergyTraining = field(default_factory=EnergyTraining)
    chunk: int | tuple[int, ...] | None = None  # tokens that are drawn, chosen and certified at a time; None: all of x
    baselines: tuple[Annotated[BaselineSettings, Field(discriminator="kind")], ...] = ()  # what it is measured against
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        CommonRecipe.__post_init__(self)
        check_baselines(self.baselines)
        check_split(self.corpus, self.evaluation.split)
        self._check_chunk()

    def _check_chunk(self) -> None:
        """Refuse chunks that windows cannot be cut into, and what has no meaning with chunks."""
        if not self.chunks:
            return
        check_chunks(self.chunks, self.corpus.continuation)
        if self.evaluation.position_windows:
            raise UserError(
                "position_windows needs whole continuations, but chunk is set: set evaluation.position_windows to 0"
            )
        if len(self.chunks) > 1 and self.training.lengths > 1:
            raise UserError(
                f"chunk is {list(self.chunks)} and training.lengths {self.training.lengths}: give the lengths that an "
                "energy is trained at by one of them"
            )

    @property
    def chunks(self) -> tuple[int, ...]:
        """The lengths of chunks, the certified one first; none where continuations are whole."""
        return () if self.chunk is None else (self.chunk,) if isinstance(self.chunk, int) else self.chunk

    @property
    def corpus_seed(self) -> int:
        """Decides how the corpus is split."""
        return self.seed

    def stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages that the sections ask for."""
        from freenergy.recipes.stages import base, baselines, candidates, corpus, energy, evaluation, negatives, tuned

        chosen: list[Stage[Any]] = [corpus.STAGE, base.STAGE]
        if tuning(self.base):
            chosen.append(tuned.STAGE)
        if self.energy is not None:
            chosen += [negatives.STAGE, energy.STAGE, candidates.STAGE]
        if self.baselines:
            chosen.append(baselines.STAGE)
        return (*chosen, evaluation.STAGE)

    @property
    def main_column(self) -> str:
        """The number of a table that figures show."""
        return "perplexity of the base" if self.energy is None else "certified perplexity"

    @property
    def is_plain(self) -> bool:
        """False: no row stands for the cost of another's steps."""
        return False

    def numbers(self, run: "Run[Any]") -> list[tuple[str, float | None]]:
        """Returns what was measured, column by column."""
        from freenergy.recipes.stages.residual_rows import row_numbers

        return row_numbers(run)

    def history(self, run: "Run[Any]") -> dict[str, Any]:
        """Returns what the run has cost."""
        from freenergy.recipes.stages.residual_rows import row_history

        return row_history(run)

    def compare(self, ours: "Sequence[Run[Any]]", others: "Sequence[Run[Any]]", rng: Rng) -> dict[str, Measurement]:
        """Returns the paired differences of runs of the same seeds."""
        from freenergy.recipes.stages.residual_rows import compare_rows

        return compare_rows(ours, others, rng)

    def check_first_row(self) -> None:
        """Any recipe may be the first row."""

    def check_rows(self, rows: Sequence[Any], folder: Path, progress: Progress) -> None:
        """Every row is checked when its stages are planned."""

    def control(self) -> "ResidualRecipe":
        """There are no controls of equal compute in this family."""
        raise UserError("rows of the family residual have no control: add [[baselines]] of kind longer to the recipe")

    def control_steps(self, of: "Sequence[Run[Any]]", plain: "Mapping[str, Run[Any]]") -> dict[str, Any]:
        """See ``control``."""
        raise NotImplementedError

    def with_steps(self, steps: int) -> "ResidualRecipe":
        """See ``control``."""
        raise NotImplementedError


ResidualRun = Run[ResidualRecipe]


def check_split(corpus: CorpusSettings, split: str) -> None:
    """Refuse a test split that the corpus does not have."""
    if corpus.source in RESOURCES:
        has_test = "test" in RESOURCES[corpus.source].splits or RESOURCES[corpus.source].kind != "text"
    else:
        has_test = corpus.test_share > 0 if corpus.source else bool(corpus.test)
    if split == "test" and not has_test:
        raise UserError(
            'the corpus has no test text: set evaluation.split = "validation", or give corpus.test or test_share'
        )
