"""Family ``translation``: an encoder–decoder that learns to translate.

corpus (the tokenizer) → base → measurement
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from freenergy.apps.translation.domain import Translation, open_translation
from freenergy.apps.translation.pairs import read_pairs, tokenizer_for
from freenergy.apps.translation.settings import TranslationSettings
from freenergy.core.files import fingerprint
from freenergy.core.progress import Progress
from freenergy.recipes.families.network import NetworkRecipe, TrainedNetwork, learning, measuring
from freenergy.runs.run import Plan, Run, Stage

_opened: dict[tuple[TranslationSettings, str], Translation] = {}  # the last one: encoding all pairs takes its time


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationRecipe(NetworkRecipe[TrainedNetwork]):
    """An encoder–decoder on pairs of sentences."""

    family: Literal["translation"] = "translation"
    translation: TranslationSettings
    base: TrainedNetwork = field(default_factory=TrainedNetwork)

    @property
    def main_column(self) -> str:
        """The number that figures show."""
        return f"BLEU beam {self.translation.beams}"

    def data_stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stage that learns the tokenizer."""
        return (Stage("corpus", _plan),)

    def domain(self, run: Run[Any], progress: Progress) -> Translation:
        """Returns the pairs with their tokenizer."""
        key = self.translation, str(run.finished("corpus")["key"])
        if key not in _opened:
            _opened.clear()
            _opened[key] = open_translation(self.translation, run.stage("corpus"), progress)
        return _opened[key]

    def learning_inputs(self, progress: Progress) -> Any:
        """Returns the sizes of the network and the choice of pairs."""
        return learning(self.translation)

    def measuring_inputs(self) -> Any:
        """Returns what is measured."""
        return measuring(self.translation)


def _plan(run: Run[TranslationRecipe], progress: Progress) -> Plan:
    settings = run.recipe.translation
    splits = read_pairs(settings, progress)
    learned = [[part.source, part.target] for part in (splits.train, splits.validation)]

    def work(folder: Path, progress: Progress) -> dict[str, Any]:
        tokenizer = tokenizer_for(splits.train, settings.vocabulary, folder)
        counts = {name: len(getattr(splits, name)) for name in ("train", "validation", "test")}
        return {"tokenizer": tokenizer.fingerprint, "pairs": counts}

    return Plan({"pairs": fingerprint(learned), "vocabulary": settings.vocabulary}, work)
