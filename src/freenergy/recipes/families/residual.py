"""Family ``residual``: a language model, and an energy that corrects it.

P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c)

corpus → base → (tuned) → (local) → negatives → energy → candidates → baselines → evaluation
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, final

from pydantic import Field

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import read_json
from freenergy.core.rng import Rng
from freenergy.corpus.chunks import check_chunks
from freenergy.corpus.resources import RESOURCES
from freenergy.corpus.settings import BytePairTokenizer, CorpusSettings, PretrainedTokenizer, WordTokenizer
from freenergy.energies.registry import AnyEnergy
from freenergy.evaluation.black_box import has_perplexity
from freenergy.evaluation.perplexity import Measurement
from freenergy.evaluation.residual_perplexity import check_proposal
from freenergy.lm.settings import NgramBase, RemoteBase
from freenergy.lm.sources.settings import SamplesBase
from freenergy.noise.settings import NegativeSettings
from freenergy.recipes.families import CommonRecipe
from freenergy.recipes.families.black_box import check_black_box
from freenergy.runs.run import Run, Stage
from freenergy.runs.sweep.rows import RowRecipe
from freenergy.samplers.sequential import Sequential
from freenergy.training.baselines.settings import BaselineSettings, check_baselines
from freenergy.training.settings import EnergyTraining, PretrainedBase, TrainedBase, adaptation, tuning

_BASE_COLUMN, _CERTIFIED_COLUMN = "perplexity of the base", "certified perplexity"
_NATS_COLUMN = "certified nats per text"  # of a base that only samples


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What is measured and shown at the end of a run."""

    split: Literal["train", "validation", "test"] = "test"
    windows: int = 400
    samples: int = 3  # continuations shown, each of another held-out prefix
    texts: int = 0  # held-out prefixes after which every model writes whole texts, for statistics of text
    candidates: int = 256  # n of the certificate, the true continuation among them
    certified_windows: int = 100  # on which the residual model is measured
    position_windows: int = 0  # on which it is measured place by place: slow, since every place needs completions
    position_draws: int = 32  # completions at each place
    sequential: Sequential | None = None  # particles that are certified too, on the same windows

    def __post_init__(self) -> None:
        check_range(self, "windows", "certified_windows", at_least=1)
        check_range(self, "samples", "texts", "position_windows", at_least=0)
        why = ", since the upper estimate of log Z is undefined with fewer than two draws next to the true text"
        check_range(self, "candidates", at_least=3, hint=why)
        check_range(self, "position_draws", at_least=2)
        if self.sequential is not None:
            check_proposal(self.sequential.truncation)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRecipe(CommonRecipe, RowRecipe):
    """A language model, an energy that is trained to correct it, and what both are measured against."""

    family: Literal["residual"] = "residual"
    corpus: CorpusSettings
    tokenizer: Annotated[BytePairTokenizer | WordTokenizer | PretrainedTokenizer, Field(discriminator="kind")] = field(
        default_factory=BytePairTokenizer
    )
    base: Annotated[
        TrainedBase | NgramBase | PretrainedBase | RemoteBase | SamplesBase, Field(discriminator="kind")
    ] = field(default_factory=TrainedBase)
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
        if isinstance(self.base, SamplesBase):
            positions = self.evaluation.position_windows
            if self.evaluation.sequential is not None:
                raise UserError(
                    "particles are drawn token by token, which a base that only samples cannot do: leave "
                    "[evaluation.sequential] out"
                )
            check_black_box(self.corpus, self.negatives, self.energy, len(self.baselines), positions)

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
        from freenergy.recipes.stages import (
            base,
            baselines,
            candidates,
            corpus,
            energy,
            evaluation,
            local,
            negatives,
            tuned,
        )

        chosen: list[Stage[Any]] = [corpus.STAGE, base.STAGE]
        if tuning(self.base):
            chosen.append(tuned.STAGE)
        if adaptation(self.base):
            chosen.append(local.STAGE)
        if self.energy is not None:
            chosen += [negatives.STAGE, energy.STAGE, candidates.STAGE]
        if self.baselines:
            chosen.append(baselines.STAGE)
        return (*chosen, evaluation.STAGE)

    @property
    def main_column(self) -> str:
        """The number of a table that figures show."""
        if isinstance(self.base, SamplesBase):
            return _NATS_COLUMN
        return _BASE_COLUMN if self.energy is None else _CERTIFIED_COLUMN

    def numbers(self, run: "Run[Any]") -> list[tuple[str, float | None]]:
        """Returns what was measured, column by column."""
        from freenergy.recipes.stages.evaluation import SUMMARY

        run.finished("evaluation")
        summary = read_json(run.stage("evaluation") / SUMMARY)
        if not has_perplexity(summary):
            return [(_NATS_COLUMN, summary["joint"]["gain"]["nats_per_sequence"])]
        found = [(_BASE_COLUMN, summary["base"]["perplexity"]["token"])]
        if joint := summary.get("joint"):
            found.append((_CERTIFIED_COLUMN, joint["perplexity"]["certified"]))
            found.append(("certified gain %", joint["gain"]["percent"]))
            if len(summary["ladder"]) > 2:  # base and energy have something between them
                found.append(("gain over the lowest rung %", summary["ladder"][-1]["over_base"]["percent"]))
        if particles := summary.get("sequential"):
            found.append(("certified gain of particles %", particles["gain"]["percent"]))
        return found

    def history(self, run: "Run[Any]") -> dict[str, Any]:
        """Returns the cost of all stages; there is no single training whose steps count."""
        spent = sum(run.finished(stage.name).get("cpu_seconds") or 0.0 for stage in run.recipe.stages())
        steps = int(run.finished("base")["summary"].get("steps", 0))
        return {"steps": steps, "epoch_steps": None, "best_step": None, "validation": None, "cpu_seconds": spent}

    def compare(self, ours: "Sequence[Run[Any]]", others: "Sequence[Run[Any]]", rng: Rng) -> dict[str, Measurement]:
        """Returns the paired differences of runs of the same seeds."""
        from freenergy.recipes.stages.compare import compare_rows

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
