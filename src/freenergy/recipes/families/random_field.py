"""Family ``random-field``: a random field of whole sentences on top of a language model.

    globally normalised  p(x) = q(x) e^{U(x)} / Z          by length  p(x) = π_l q(x) e^{U(x)} / Z_l

corpus → base → field → (rivals) → evaluation        both forms are measured, on one pool of fresh draws of q
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import Field

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.corpus.settings import BytePairTokenizer, CorpusSettings, WordTokenizer
from freenergy.energies.heads import HeadSettings
from freenergy.energies.sparse.features import SparseSettings
from freenergy.evaluation.perplexity import Measurement
from freenergy.lm.settings import NgramBase
from freenergy.recipes.families import CommonRecipe
from freenergy.recipes.families.residual import check_split
from freenergy.runs.run import Run, Stage
from freenergy.runs.sweep.rows import RowRecipe
from freenergy.training.settings import TrainedBase
from freenergy.training.sparse_fit import SparseFitSettings
from freenergy.training.tasks.sentence_field import NetworkTraining


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTraining:
    """How much noise a field learns from, and how its weights are fitted."""

    noise_ratio: int = 4  # ν: draws of the base for each training sentence
    fit: SparseFitSettings = field(default_factory=SparseFitSettings)
    network: NetworkTraining = field(default_factory=NetworkTraining)  # where the recipe has a head
    validation_draws: int = 50_000  # fresh ones, by which the penalty is chosen

    def __post_init__(self) -> None:
        check_range(self, "noise_ratio", at_least=1)
        check_range(self, "validation_draws", at_least=100)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldEvaluation:
    """What is measured at the end of a run."""

    split: Literal["validation", "test"] = "test"
    draws: int = 200_000  # of the base, fresh: n of the certificates is one more
    samples: int = 5  # sentences of the field that are shown

    def __post_init__(self) -> None:
        check_range(self, "draws", at_least=100)
        check_range(self, "samples", at_least=0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NgramRival:
    """An n-gram model of another order."""

    kind: Literal["ngram"] = "ngram"
    name: str = ""
    order: int = 3

    def __post_init__(self) -> None:
        check_range(self, "order", at_least=1, at_most=32)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRival:
    """A causal network, trained on the same text."""

    kind: Literal["network"] = "network"
    name: str = "network"
    train: TrainedBase = field(default_factory=TrainedBase)

    def __post_init__(self) -> None:
        if self.train.start or self.train.tune is not None or self.train.local is not None:
            raise UserError("a rival is trained from scratch: leave start, tune and local of its train section out")


Rival = Annotated[NgramRival | NetworkRival, Field(discriminator="kind")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RandomFieldRecipe(CommonRecipe, RowRecipe):
    """A language model of sentences, and a random field that corrects it."""

    corpus_seed: ClassVar[int] = 0
    main_column: ClassVar[str] = "certified perplexity"
    energy: ClassVar[bool] = True  # there is one to load: the field's
    baselines: ClassVar[tuple[()]] = ()
    chunks: ClassVar[tuple[()]] = ()

    family: Literal["random-field"] = "random-field"
    corpus: CorpusSettings
    tokenizer: Annotated[BytePairTokenizer | WordTokenizer, Field(discriminator="kind")] = field(
        default_factory=WordTokenizer
    )
    base: Annotated[NgramBase | TrainedBase, Field(discriminator="kind")] = field(default_factory=NgramBase)
    features: SparseSettings = field(default_factory=SparseSettings)
    head: HeadSettings | None = None  # a network, alone or with the features (training.network.parts)
    form: Literal["residual", "pairs"] = "residual"  # pairs: absolute and exact, of word pairs and class pairs
    longest: int | None = None  # words of a sentence; None: as many as the longest training sentence has
    training: FieldTraining = field(default_factory=FieldTraining)
    rivals: tuple[Rival, ...] = ()
    evaluation: FieldEvaluation = field(default_factory=FieldEvaluation)

    def __post_init__(self) -> None:
        CommonRecipe.__post_init__(self)
        check_split(self.corpus, self.evaluation.split)
        check_range(self, "longest", at_least=1)
        if self.corpus.ending != "eos" or self.corpus.prefix:
            raise UserError(
                'a random field is a law of whole sentences: set corpus.prefix = 0 and corpus.ending = "eos", and make '
                'every sentence a document (corpus.documents = "line")'
            )
        if self.base.local is not None or (isinstance(self.base, TrainedBase) and self.base.tune is not None):
            raise UserError("the base of a random field is one model: leave base.tune and base.local out")
        if self.form == "pairs" and not (isinstance(self.base, NgramBase) and self.base.order == 2):
            raise UserError(
                "an absolute field that starts at zero does not learn (1 of 30,000 draws counts after 120 iterations): "
                'with form = "pairs" set base.kind = "ngram" and base.order = 2, where it starts, or form = "residual"'
            )
        if self.form == "pairs" and self.head is not None:
            raise UserError(
                'a field of pairs is exact, and a network is not: leave [head] out, or set form = "residual"'
            )
        names = [rival_name(each) for each in self.rivals]
        if len(set(names)) < len(names):
            raise UserError(f"two rivals are called {max(names, key=names.count)!r}: give each its own name")

    def stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages that the sections ask for."""
        from freenergy.recipes.stages import base, corpus, field_evaluation, field_fit, rivals

        more = (rivals.STAGE,) if self.rivals else ()
        return (corpus.STAGE, base.STAGE, field_fit.STAGE, *more, field_evaluation.STAGE)

    def numbers(self, run: "Run[Any]") -> list[tuple[str, float | None]]:
        """Returns what was measured, column by column."""
        found = run.finished("evaluation")["summary"]["field"]
        return [
            ("perplexity of the base", found["base"][0]),
            ("certified perplexity", found["by length"]["certified"][0]),
            ("certified perplexity, one constant", found["global"]["certified"][0]),
            ("effective draws", found["log Z"]["ess"]),
        ]

    def history(self, run: "Run[Any]") -> dict[str, Any]:
        """Returns the cost of all stages; there is no single training whose steps count."""
        spent = sum(run.finished(stage.name).get("cpu_seconds") or 0.0 for stage in run.recipe.stages())
        return {"steps": 0, "epoch_steps": None, "best_step": None, "validation": None, "cpu_seconds": spent}

    def compare(self, ours: "Sequence[Run[Any]]", others: "Sequence[Run[Any]]", rng: Rng) -> dict[str, Measurement]:
        """Returns the paired differences of runs of the same seeds, over the sentences of the test text."""
        from freenergy.recipes.stages.field_evaluation import compare_fields

        return compare_fields(ours, others)


RandomFieldRun = Run[RandomFieldRecipe]


def rival_name(rival: NgramRival | NetworkRival) -> str:
    """Returns what a rival is called in tables."""
    return rival.name or (f"{rival.order}-gram" if isinstance(rival, NgramRival) else "network")
