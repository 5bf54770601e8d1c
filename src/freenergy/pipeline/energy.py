"""Stage ``energy``: an energy that tells real continuations from the base's, and so corrects the base."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from freenergy.base.opening import locate_model, open_base
from freenergy.card import model_card
from freenergy.corpus import Corpus
from freenergy.energies.opening import RECORD
from freenergy.energies.settings import BitEnergy, EnergySettings, ProductEnergy, SavedEnergy
from freenergy.errors import UserError
from freenergy.negatives.store import NegativeStore
from freenergy.pipeline.negatives import chosen_windows, make_source, stored_identity, stored_splits
from freenergy.pipeline.run import Plan, Run, Stage
from freenergy.progress import Progress
from freenergy.randomness import Rng
from freenergy.storage import file_hash, write_text

MODEL = "model"


def _plan(run: Run, progress: Progress) -> Plan:
    settings = run.recipe.energy
    assert settings is not None, "the stage is left out where there is no energy"
    inputs = {
        "seed": run.recipe.seed,
        "settings": asdict(settings),
        "training": {
            key: value for key, value in asdict(run.recipe.training).items() if (key, value) != ("lengths", 1)
        },
        "others": _others(run, settings, progress),
    }
    return Plan(inputs, partial(_work, run, settings))


def _others(run: Run, settings: EnergySettings, progress: Progress) -> list[str]:
    """Fingerprints of what the energy takes from elsewhere, so that a change there is noticed."""
    parts = settings.parts if isinstance(settings, ProductEnergy) else (settings,)
    marks = []
    for part in parts:
        match part:
            case BitEnergy(start="encoder", encoder=name):
                from freenergy.base.checkpoints import checkpoint_fingerprint

                marks.append(checkpoint_fingerprint(locate_model(name, progress)))
            case SavedEnergy(path=path):
                _check_saved(Path(path), run.stage("energy"))
                marks += [file_hash(file) for file in sorted(Path(path).rglob("*")) if file.is_file()]
    return marks


def _check_saved(path: Path, stage: Path) -> None:
    """Refuse before anything is done what is missing, or would be cleared away by the stage that reads it."""
    if not (path / RECORD).is_file():
        raise UserError(f"there is no energy in {path} (a saved part): give a folder that has {RECORD} in it")
    if path.resolve().is_relative_to(stage.resolve()):
        raise UserError(f"the saved part {path} lies in the folder that this run trains in: copy it elsewhere first")


def _work(run: Run, settings: EnergySettings, folder: Path, progress: Progress) -> dict[str, Any]:
    from freenergy.training.build import Material
    from freenergy.training.contrast import FreshContrast, StoredContrast
    from freenergy.training.fitting import train_energy

    corpus = Corpus.open(run.stage("corpus"))
    lm = open_base(run.stage("base"), corpus.tokenizer)
    stored = {
        split: StoredContrast(
            corpus.windows(split),
            NegativeStore.open(run.stage("negatives") / split, stored_identity(run, corpus, split)),
        )
        for split in stored_splits(run)
    }
    train = stored.get("train") or FreshContrast(
        corpus.windows("train"), chosen_windows(run, corpus, "train"), make_source(run.recipe.negatives, lm, corpus)
    )
    material = Material(lm, corpus, train, stored["validation"], run.features)
    rng = Rng(run.recipe.seed).child("energy")
    energy, summary = train_energy(settings, run.recipe.training, material, folder, rng, progress)
    energy.save_pretrained(folder / MODEL)  # type: ignore[operator]
    summary = {"kind": settings.kind, "negatives_relative": run.recipe.negatives.is_relative, **summary}
    write_text(folder / MODEL / "README.md", model_card(lm, energy, {"recipe": run.recipe.name, **summary}))
    return summary


STAGE = Stage("energy", _plan, after=("negatives",))
