"""The way back into a run from Python."""

from pathlib import Path
from typing import NamedTuple

from freenergy.base.opening import open_base
from freenergy.corpus import Corpus, Tokenizer
from freenergy.errors import UserError
from freenergy.pipeline.run import Run
from freenergy.protocols import LanguageModel


class Base(NamedTuple):
    """A run's language model and the tokenizer that it reads with."""

    lm: LanguageModel
    tokenizer: Tokenizer


def load_base(folder: str | Path) -> Base:
    """The language model of a run, with its tokenizer."""
    run = Run.open(folder)
    trained_on = run.finished("base")["summary"]["tokenizer"]
    tokenizer = Corpus.open(run.stage("corpus")).tokenizer
    if tokenizer.fingerprint != trained_on:
        raise UserError(f"the corpus of {folder} has changed since its base was made: `freenergy run` it again")
    return Base(open_base(run.stage("base"), tokenizer), tokenizer)
