"""The way back into a run from Python."""

from pathlib import Path
from typing import NamedTuple

from freenergy.base.opening import open_base
from freenergy.corpus import Corpus, Tokenizer
from freenergy.energies.opening import load_energy
from freenergy.errors import UserError
from freenergy.joint import RECORD as JOINT
from freenergy.joint import JointModel
from freenergy.pipeline.energy import MODEL
from freenergy.pipeline.run import Run
from freenergy.protocols import LanguageModel


class Base(NamedTuple):
    """A run's language model and the tokenizer that it reads with."""

    lm: LanguageModel
    tokenizer: Tokenizer


def load(folder: str | Path) -> JointModel:
    """The joint model of a run, or of a folder that ``JointModel.save_pretrained`` has made."""
    if (Path(folder) / JOINT).is_file():
        return JointModel.from_pretrained(folder)
    run = Run.open(folder)
    if run.recipe.energy is None:
        raise UserError(f"the run in {folder} has no energy: add an [energy] section to its recipe, or use load_base")
    run.finished("base")
    run.finished("energy")
    corpus = Corpus.open(run.stage("corpus"))  # once: the tokenizer is checked on opening, which takes its time
    lm = open_base(run.stage("base"), corpus.tokenizer)
    energy = load_energy(run.stage("energy") / MODEL, base=lm, tokenizer=corpus.tokenizer)
    return JointModel(lm, energy, corpus.tokenizer, space=corpus.space, room=corpus.prefix)


def load_base(folder: str | Path) -> Base:
    """The language model of a run, with its tokenizer."""
    run = Run.open(folder)
    run.finished("base")
    tokenizer = Corpus.open(run.stage("corpus")).tokenizer
    return Base(open_base(run.stage("base"), tokenizer), tokenizer)
