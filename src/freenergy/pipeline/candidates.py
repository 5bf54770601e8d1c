"""Stage ``candidates``: the base's continuations of held-out prefixes, on which joint models are measured.

They depend on the base alone, so that another energy is measured on the same candidates without drawing them again.
"""

from functools import partial
from pathlib import Path
from typing import Any

from freenergy.base.opening import open_base
from freenergy.corpus import Corpus, Windows
from freenergy.negatives.store import Identity, NegativeStore, write_negatives
from freenergy.pipeline.negatives import BASE_ALONE, from_base, identify
from freenergy.pipeline.run import Plan, Run, Stage
from freenergy.progress import Progress
from freenergy.protocols import ANCESTRAL, LanguageModel
from freenergy.randomness import Rng

_SHARD = 4  # windows whose draws appear at a time


def _plan(run: Run, progress: Progress) -> Plan:
    settings = run.recipe.evaluation
    inputs = {
        "seed": run.recipe.seed,
        "split": settings.split,
        "candidates": settings.candidates,
        "windows": settings.certified_windows,
    }
    return Plan(inputs, partial(_work, run))


def _work(run: Run, folder: Path, progress: Progress) -> dict[str, Any]:
    settings, corpus = run.recipe.evaluation, Corpus.open(run.stage("corpus"))
    lm = open_base(run.stage("base"), corpus.tokenizer)
    windows, num = corpus.windows(settings.split), settings.certified_windows
    draw_candidates(folder, lm, corpus, windows, num, _identity(run, corpus), progress)
    return {"windows": min(num, len(windows)), "draws": settings.candidates - 1, "split": settings.split}


def draw_candidates(
    folder: Path, lm: LanguageModel, corpus: Corpus, windows: Windows, num: int, identity: Identity, progress: Progress
) -> None:
    """The base's draws for ``num`` windows, chosen by the seed; what is there already is kept."""
    rng = Rng(identity.seed).child("candidates")
    rows, source = rng.child("windows").permutation(len(windows))[:num], from_base(lm, corpus, ANCESTRAL)
    write_negatives(folder, rows, windows, source, identity, rng, progress, shard=_SHARD, batch=1)


def open_candidates(run: Run, corpus: Corpus) -> NegativeStore:
    """What the stage has drawn."""
    return NegativeStore.open(run.stage("candidates"), _identity(run, corpus))


def _identity(run: Run, corpus: Corpus) -> Identity:
    settings = run.recipe.evaluation
    return identify(run, corpus, settings.split, settings.candidates - 1, BASE_ALONE)


STAGE = Stage("candidates", _plan, after=("base",))
