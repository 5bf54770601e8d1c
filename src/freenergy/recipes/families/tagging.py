"""Family ``tagging``: words in, tags out.

corpus → tagger → evaluation

RUN/corpus/      train.jsonl validation.jsonl test.jsonl: the sentences, with tags in the scheme; tags.json
RUN/tagger/      tagger.json and weights; training/ of a neural one
RUN/evaluation/  evaluation.json, predicted.txt: the test sentences with true and predicted tags
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import Field

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.evaluation.perplexity import Measurement
from freenergy.recipes.families import CommonRecipe
from freenergy.runs.run import Run, Stage
from freenergy.runs.sweep.rows import RowRecipe
from freenergy.tagging.settings import FeatureTagger, HiddenMarkov, NeuralTagger, TaggingData
from freenergy.training.loop import read_records


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaggingEvaluation:
    """What is shown besides the rates."""

    examples: int = 12  # test sentences whose marginals the report shows
    confusions: int = 20

    def __post_init__(self) -> None:
        check_range(self, "examples", "confusions", at_least=0, section="evaluation.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaggingRecipe(CommonRecipe, RowRecipe):
    """A tagger. Sentences are split alike for all seeds."""

    family: Literal["tagging"] = "tagging"
    data: TaggingData
    tagger: Annotated[NeuralTagger | FeatureTagger | HiddenMarkov, Field(discriminator="kind")] = field(
        default_factory=NeuralTagger
    )
    evaluation: TaggingEvaluation = field(default_factory=TaggingEvaluation)

    @property
    def main_column(self) -> str:
        """The number that figures show."""
        return "F1 % or accuracy %"

    def stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages in order."""
        from freenergy.recipes.stages import tagging

        return tagging.STAGES

    def numbers(self, run: Run[Any]) -> list[tuple[str, float | None]]:
        """Returns what was measured; the main rate under one name, whether it is F1 or accuracy."""
        found = run.finished("evaluation")["summary"]
        numbers = [(name, each[0]) for name, each in found["rates"]]
        return [(self.main_column, numbers[0][1]), *numbers, ("nats per word", found["nats_per_word"])]

    def history(self, run: Run[Any]) -> dict[str, Any]:
        """Returns how the training went; also of one that has diverged."""
        folder = run.stage("tagger")
        if not (folder / "training").is_dir():
            found = run.finished("tagger")
            fit = found["summary"]
            counts = {"steps": fit.get("iterations", 1), "best_step": None, "validation": None, "epoch_steps": 0}
            return counts | {"cpu_seconds": found["cpu_seconds"] or 0.0}
        records = read_records(folder / "training")
        best = next((each for each in reversed(records) if each["is_best"]), {"step": None, "validation": None})
        return {
            "steps": len(records), "best_step": best["step"], "validation": best["validation"], "epoch_steps": 0,
            "cpu_seconds": sum(each["cpu_seconds"] for each in records),
        }  # fmt: skip

    def compare(self, ours: Sequence[Run[Any]], others: Sequence[Run[Any]], rng: Rng) -> dict[str, Measurement]:
        """Returns the paired differences of runs of the same seeds, over test sentences."""
        from freenergy.recipes.stages.tagging import predicted_counts
        from freenergy.tagging.scores import differences

        a, b = ([predicted_counts(each.stage("evaluation")) for each in side] for side in (ours, others))
        found = differences(a, b, rng)
        return {self.main_column: next(iter(found.values())), **found}

    def check_first_row(self) -> None:
        """Any tagger may be the first row."""

    def check_rows(self, rows: Sequence[Any], folder: Path, progress: Progress) -> None:
        """Refuse rows that read other sentences than the first, which could not be compared."""
        for row in rows:
            if replace(row.data, scheme="auto") != replace(self.data, scheme="auto"):
                raise UserError("rows of one table read the same sentences: give other data in another experiment")
