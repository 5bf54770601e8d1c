"""Family ``language-model``: one causal language model on a corpus, taught in any way, E-ARM among them.

corpus → base → evaluation → measurement
"""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, final

from pydantic import Field

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.corpus import Corpus
from freenergy.corpus.settings import BytePairTokenizer, CorpusSettings, PretrainedTokenizer, WordTokenizer
from freenergy.recipes.families.network import Domain, NetworkRecipe
from freenergy.recipes.families.residual import check_split
from freenergy.runs.run import Run, Stage
from freenergy.training.settings import TrainedBase


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelEvaluation:
    """What is measured: perplexity of all of a text, and of windows with energy re-sampling."""

    split: Literal["validation", "test"] = "test"
    windows: int = 100  # on which the stage ``evaluation`` reads and writes
    samples: int = 3  # continuations shown, each of another held-out prefix
    certified_windows: int = 0  # on which re-sampling by E-ARM's energy of whole texts is measured
    candidates: int = 64  # n of that certificate, the true text among them

    def __post_init__(self) -> None:
        check_range(self, "windows", at_least=1)
        check_range(self, "samples", "certified_windows", at_least=0)
        check_range(self, "candidates", at_least=3)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelRecipe(NetworkRecipe[TrainedBase]):
    """A causal language model. The corpus is split alike for all seeds."""

    corpus_seed: ClassVar[int] = 0
    main_column: ClassVar[str] = "perplexity"
    energy: ClassVar[None] = None
    baselines: ClassVar[tuple[()]] = ()
    chunks: ClassVar[tuple[()]] = ()

    family: Literal["language-model"] = "language-model"
    corpus: CorpusSettings
    tokenizer: Annotated[BytePairTokenizer | WordTokenizer | PretrainedTokenizer, Field(discriminator="kind")] = field(
        default_factory=BytePairTokenizer
    )
    base: TrainedBase = field(default_factory=TrainedBase)
    evaluation: LanguageModelEvaluation = field(default_factory=LanguageModelEvaluation)

    def __post_init__(self) -> None:
        NetworkRecipe.__post_init__(self)
        check_split(self.corpus, self.evaluation.split)
        if self.base.tune is not None:
            raise UserError("rows of this family have no stage that tunes: leave base.tune out, or train more steps")
        if self.base.local is not None:
            raise UserError('rows of this family are networks alone: leave base.local out, or set family = "residual"')

    def data_stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stage that prepares the corpus."""
        from freenergy.recipes.stages import corpus

        return (corpus.STAGE,)

    def stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stages in order."""
        from freenergy.recipes.stages import evaluation

        *before, measurement = NetworkRecipe.stages(self)
        return (*before, evaluation.STAGE, measurement)

    def domain(self, run: Run[Any], progress: Progress) -> Domain:
        """Returns the network's text."""
        from freenergy.lm.load import locate_model
        from freenergy.recipes.stages.text_domain import TextDomain

        start = locate_model(self.base.start, progress) if self.base.start else None
        return TextDomain(self, _corpus(run.finished("corpus")["key"], run.stage("corpus")), start)

    def learning_inputs(self, progress: Progress) -> Any:
        """Returns the sizes of the network, or the checkpoint that it begins as."""
        from freenergy.recipes.stages.base import base_inputs

        return base_inputs(self.base, progress)[1]

    def measuring_inputs(self) -> Any:
        """Returns what is measured."""
        return self.evaluation


@lru_cache(maxsize=2)
def _corpus(key: str, folder: Path) -> Corpus:
    """``key`` names what is there now."""
    return Corpus.open(folder)
