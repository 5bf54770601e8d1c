"""Stage ``energy``: an energy that tells real continuations from the base's, and so corrects the base."""

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from freenergy.core.errors import UserError
from freenergy.core.files import write_text
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.core.workers.shards import is_worth_parallelising, prefetch_shards
from freenergy.corpus import Corpus
from freenergy.energies.features import FeatureEnergy
from freenergy.energies.registry import load_energy
from freenergy.energies.settings import EnergySettings
from freenergy.models.residual import Residual
from freenergy.noise.settings import NegativeSettings
from freenergy.noise.store import NegativeStore
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.chunks import corpus_of_split, open_corpus
from freenergy.recipes.stages.language_models import load_base
from freenergy.recipes.stages.negatives import chosen_windows, make_noise, stored_identity, stored_splits
from freenergy.recipes.stages.workers import Opened, job
from freenergy.runs.run import Plan, Stage
from freenergy.text.model_card import model_card
from freenergy.training.distributed.ranks import Ranks

if TYPE_CHECKING:
    from freenergy.training.contrastive_batches import NoiseLaw, StoredContrast
    from freenergy.training.feature_cache import FeatureCache

MODEL = "model"


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    settings = run.recipe.energy
    assert settings is not None, "the stage is left out where there is no energy"
    if run.recipe.training.curve and not any(part.fit == "convex" for part in settings.split()):
        raise UserError(
            "a learning curve is that of linear energies, and the recipe has none: set training.curve = false, or add "
            'a part such as {kind = "probe"}'
        )
    inputs = {
        "seed": run.recipe.seed,
        "settings": settings,
        "training": run.recipe.training,
        "others": [mark for part in settings.split() for mark in part.fingerprints(run.stage("energy"), progress)],
    }
    return Plan(inputs, partial(_work, run, settings), is_shared=_trains_networks(run, settings))


def _trains_networks(run: ResidualRun, settings: EnergySettings) -> bool:
    """Whether there is something for several ranks to do; refused before anything is done if they cannot share it."""
    parts, training = settings.split(), run.recipe.training
    found = any(part.fit == "gradient" for part in parts)
    if found:
        Ranks.found().share(training.optimisation.accumulate, "training.optimisation")
    if any(part.trains_masked_trunk for part in parts):
        Ranks.found().share(training.masked.accumulate, "training.masked")
    return found


def _work(run: ResidualRun, settings: EnergySettings, folder: Path, progress: Progress) -> dict[str, Any]:
    from freenergy.training.contrastive_batches import FreshContrast
    from freenergy.training.fitting import Material, train_energy

    corpus = open_corpus(run)
    training_corpus = corpus_of_split(run, corpus, "train")
    lm = load_base(run, corpus)
    stored = {split: _stored(run, corpus, split) for split in stored_splits(run)}
    law = _law(run.recipe.negatives, lm, training_corpus)
    train = stored.get("train") or FreshContrast(
        training_corpus.windows("train"),
        chosen_windows(run, corpus, "train"),
        make_noise(run.recipe.negatives, lm, training_corpus) if law is None else law.noise,
    )
    material = Material(lm, corpus, train, stored["validation"], run.features, partial(_features_ahead, run), law)
    rng = Rng(run.recipe.seed).child("energy")
    energy, summary = train_energy(settings, run.recipe.training, material, folder, rng, progress)
    if not Ranks.found().is_first:
        return {}
    energy.save_pretrained(folder / MODEL)
    summary = {"kind": settings.kind, "negatives_relative": law is None and not run.recipe.negatives.is_base, **summary}
    write_text(folder / MODEL / "README.md", model_card(Residual(lm, energy), {"recipe": run.recipe.name, **summary}))
    return summary


def _law(settings: NegativeSettings, lm: LanguageModel, corpus: Corpus) -> "NoiseLaw | None":
    """The law of the training negatives, where it is not the base's own but known; a server does not give it."""
    from freenergy.training.contrastive_batches import NoiseLaw

    if settings.is_base or settings.is_relative or not lm.draws_here:
        return None
    return NoiseLaw(make_noise(settings, lm, corpus), lm)


def _stored(run: ResidualRun, corpus: Corpus, split: str) -> "StoredContrast":
    from freenergy.training.contrastive_batches import StoredContrast

    store = NegativeStore.open(run.stage("negatives") / split, stored_identity(run, corpus, split))
    return StoredContrast(corpus_of_split(run, corpus, split).windows(split), store)


def _features_ahead(
    run: ResidualRun, energy: FeatureEnergy, cache: "FeatureCache", label: str, progress: Progress
) -> None:
    """Let the engine's workers compute features; they find the energy, which is not fitted yet, in a folder."""
    missing, split = cache.missing(energy), cache.contrast.store.identity.split
    if not is_worth_parallelising(run.workers, missing):
        return
    place = run.features / f".{energy.fingerprint}.part"  # swept where it is left behind
    energy.save_pretrained(place)
    try:
        work = job(run, _features, ("negatives",), place.name, split, cache.length)
        words = f"features of {type(energy).__name__}, {label}"
        prefetch_shards(run.workers, work, missing, cache.place(energy), words, progress)
    finally:
        shutil.rmtree(place)


def _features(opened: Opened, name: str, split: str, length: int | None) -> "_Features":
    from freenergy.training.feature_cache import FeatureCache

    run, corpus, lm = opened
    energy = load_energy(run.features / name, base=lm, tokenizer=corpus.tokenizer)
    cache = FeatureCache(run.features, _stored(run, corpus, split), leave_self_out=split == "train", length=length)
    return _Features(energy, cache)


class _Features(NamedTuple):
    """What a worker computes features with."""

    energy: nn.Module
    cache: "FeatureCache"

    def make(self, k: int) -> None:
        """Features of chunk k."""
        assert isinstance(self.energy, FeatureEnergy), "only linear energies have features"
        self.cache.features(self.energy, self.cache.chunk(k))


STAGE = Stage("energy", _plan, after=("negatives",))
