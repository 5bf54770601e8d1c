"""The way back into a run from Python."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from freenergy.core.device import computing_on
from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, read_json
from freenergy.core.roles import LanguageModel
from freenergy.core.sequences import SequenceSpace
from freenergy.corpus import Corpus, Tokenizer
from freenergy.energies.registry import load_energy
from freenergy.lm.load import load_lm
from freenergy.models.residual import no_energy
from freenergy.recipes.families.random_field import RandomFieldRecipe, RandomFieldRun
from freenergy.recipes.families.tagging import TaggingRecipe
from freenergy.recipes.load import load_run, load_text_run
from freenergy.recipes.stages.chunks import open_corpus
from freenergy.recipes.stages.energy import MODEL
from freenergy.recipes.stages.language_models import load_base as load_run_base
from freenergy.recipes.stages.language_models import rung_names
from freenergy.runs.run import RECIPE
from freenergy.tagging.settings import TaggingData
from freenergy.tagging.tagger import Tagger
from freenergy.text.model import RECORD as JOINT
from freenergy.text.model import ResidualModel


class Base(NamedTuple):
    """A run's language model and the tokenizer that it reads with."""

    lm: LanguageModel
    tokenizer: Tokenizer


def load(folder: str | Path, *, device: str | torch.device | None = None) -> Any:
    """The model of a run: a ``Tagger`` of the family tagging, else a ``ResidualModel``, also of a saved folder.

    It computes on ``device``; unless given, on the first GPU, or on the CPU where there is none.
    """
    with computing_on(device):
        return load_tagger(folder).tagger if is_tagger(folder) else load_residual(folder)


class LoadedTagger(NamedTuple):
    """A tagger, and how the files of its training were laid out."""

    tagger: Tagger
    data: TaggingData


def is_tagger(folder: str | Path) -> bool:
    """Return whether a folder is a run of the family tagging."""
    path = Path(folder) / RECIPE
    return path.is_file() and read_json(path).get("family") == "tagging"


def load_tagger(folder: str | Path) -> LoadedTagger:
    """The tagger of a run."""
    run = load_run(folder)
    if not isinstance(run.recipe, TaggingRecipe):
        raise UserError(f"{folder} is a run of the family {run.recipe.family}: give one of the family tagging")
    run.finished("tagger")
    return LoadedTagger(Tagger.load(run.stage("tagger")), run.recipe.data)


def load_residual(folder: str | Path) -> ResidualModel:
    """The residual model of a run, or of a folder that ``ResidualModel.save_pretrained`` has made."""
    if (Path(folder) / JOINT).is_file():
        return ResidualModel.from_pretrained(folder)
    run = load_text_run(folder)
    if isinstance(run.recipe, RandomFieldRecipe):
        return _field(run)
    if run.recipe.energy is None:
        raise UserError(f"the run in {folder} has no energy: add an [energy] section to its recipe, or use load_base")
    run.finished(rung_names(run)[-1])
    run.finished("energy")
    corpus = open_corpus(run)  # once: the tokenizer is checked on opening, which takes its time
    lm = load_run_base(run, corpus)
    energy = load_energy(run.stage("energy") / MODEL, base=lm, tokenizer=corpus.tokenizer)
    max_context, text_length = corpus.prefix, None
    if corpus.chunks:  # the last chunk of a window has read the whole window before it
        text_length = corpus.continuation
        max_context += (text_length - 1) // corpus.chunks[0] * corpus.chunks[0]
    lengths = {"max_context": max_context, "text_length": text_length}
    return ResidualModel(lm, energy, corpus.tokenizer, space=corpus.space, **lengths)


def _field(run: RandomFieldRun) -> ResidualModel:
    """The random field as a residual model of whole sentences."""
    run.finished("base")
    run.finished("field")
    corpus = Corpus.open(run.stage("corpus"))
    lm = load_lm(run.stage("base"), corpus.tokenizer)
    if run.recipe.form == "pairs":
        raise UserError(
            f"the field of {run.folder} is absolute, so it has no base to draw from: use PairField.load and its sample"
        )
    energy = load_energy(run.stage("field") / MODEL, base=lm, tokenizer=corpus.tokenizer)
    longest = int(run.finished("field")["summary"]["longest"])
    space = SequenceSpace(vocab_size=lm.vocab_size, length=longest + 1, eos=lm.eos)
    return ResidualModel(lm, energy, corpus.tokenizer, space=space, max_context=longest)


def load_base(folder: str | Path) -> Base:
    """The language model of a run, with its tokenizer."""
    run = load_text_run(folder)
    run.finished(rung_names(run)[-1])
    corpus = Corpus.open(run.stage("corpus"))
    return Base(load_run_base(run, corpus), corpus.tokenizer)


def load_or_base(folder: str | Path) -> ResidualModel:
    """Load the residual model of a run or of a saved folder; a run without an energy gives its base with E = 0."""
    if (Path(folder) / JOINT).is_file() or load_text_run(folder).recipe.energy is not None:
        return load_residual(folder)
    lm, tokenizer = load_base(folder)
    return ResidualModel(lm, no_energy, tokenizer)


def model_key(folder: str | Path) -> list[str]:
    """Return what names the model in a folder: the keys of the stages that made it, or the hashes of its files."""
    folder = Path(folder)
    if (folder / JOINT).is_file():
        return [file_hash(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    run = load_text_run(folder)
    of_field = isinstance(run.recipe, RandomFieldRecipe)
    energy = ("field",) if of_field else () if run.recipe.energy is None else ("energy",)
    return [run.finished(name)["key"] for name in (rung_names(run)[-1], *energy)]
