"""Family ``residual``: a language model, and an energy that corrects it.

P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c)

corpus → base → negatives → energy → candidates → baselines → evaluation
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, final

from pydantic import Field

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import read_json
from freenergy.core.rng import Rng
from freenergy.corpus.resources import RESOURCES
from freenergy.corpus.settings import BytePairTokenizer, CorpusSettings, PretrainedTokenizer, WordTokenizer
from freenergy.energies.registry import AnyEnergy
from freenergy.evaluation.perplexity import Measurement
from freenergy.lm.settings import NgramBase, PretrainedBase, RemoteBase
from freenergy.noise.settings import NegativeSettings
from freenergy.recipes.families import CommonRecipe
from freenergy.runs.run import Run, Stage
from freenergy.runs.sweep.rows import RowRecipe
from freenergy.training.baselines.settings import BaselineSettings, check_baselines
from freenergy.training.settings import EnergyTraining, TrainedBase

_BASE_COLUMN, _CERTIFIED_COLUMN = "perplexity of the base", "certified perplexity"


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
        check_range(self, "windows", "certified_windows", at_least=1)
        check_range(self, "samples", "position_windows", at_least=0)
        why = ", since the upper estimate of log Z is undefined with fewer than two draws next to the true text"
        check_range(self, "candidates", at_least=3, hint=why)
        check_range(self, "position_draws", at_least=2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRecipe(CommonRecipe, RowRecipe):
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
    baselines: tuple[Annotated[BaselineSettings, Field(discriminator="kind")], ...] = ()  # what it is measured against
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)

    def __post_init__(self) -> None:
        CommonRecipe.__post_init__(self)
        check_baselines(self.baselines)
        check_split(self.corpus, self.evaluation.split)

    @property
    def corpus_seed(self) -> int:
        """Decides how the corpus is split."""
        return self.seed

    def stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages that the sections ask for."""
        from freenergy.recipes.stages import base, baselines, candidates, corpus, energy, evaluation, negatives

        chosen: list[Stage[Any]] = [corpus.STAGE, base.STAGE]
        if self.energy is not None:
            chosen += [negatives.STAGE, energy.STAGE, candidates.STAGE]
        if self.baselines:
            chosen.append(baselines.STAGE)
        return (*chosen, evaluation.STAGE)

    @property
    def main_column(self) -> str:
        """The number of a table that figures show."""
        return _BASE_COLUMN if self.energy is None else _CERTIFIED_COLUMN

    def numbers(self, run: "Run[Any]") -> list[tuple[str, float | None]]:
        """Returns what was measured, column by column."""
        from freenergy.recipes.stages.evaluation import SUMMARY

        run.finished("evaluation")
        summary = read_json(run.stage("evaluation") / SUMMARY)
        found = [(_BASE_COLUMN, summary["base"]["perplexity"]["token"])]
        if joint := summary.get("joint"):
            found.append((_CERTIFIED_COLUMN, joint["perplexity"]["certified"]))
            found.append(("certified gain %", joint["gain"]["percent"]))
        return found

    def history(self, run: "Run[Any]") -> dict[str, Any]:
        """Returns the cost of all stages; there is no single training whose steps count."""
        spent = sum(run.finished(stage.name).get("cpu_seconds") or 0.0 for stage in run.recipe.stages())
        steps = int(run.finished("base")["summary"].get("steps", 0))
        return {"steps": steps, "epoch_steps": None, "best_step": None, "validation": None, "cpu_seconds": spent}

    def compare(self, ours: "Sequence[Run[Any]]", others: "Sequence[Run[Any]]", rng: Rng) -> dict[str, Measurement]:
        """Returns the paired differences of runs of the same seeds."""
        from freenergy.recipes.stages.evaluation import compare_rows

        return compare_rows(ours, others, rng)

    def control(self) -> "ResidualRecipe":
        """There are no controls of equal compute in this family."""
        raise UserError("rows of the family residual have no control: add [[baselines]] of kind longer to the recipe")


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
