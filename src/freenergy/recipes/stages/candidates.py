"""Stage ``candidates``: the base's continuations of held-out prefixes, on which residual models are measured.

They depend on the base alone, so that another energy is measured on the same candidates without drawing them again.
With chunks, all chunks of a window get candidates, in the order of the text, each given the true text before it.
"""

from functools import partial
from pathlib import Path
from typing import Any

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.truncation import ANCESTRAL
from freenergy.core.workers.shards import prefetch_shards
from freenergy.corpus import Corpus
from freenergy.lm.sample_only import part_of
from freenergy.noise.store import Identity, NegativeShards, NegativeStore
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.chunks import open_corpus
from freenergy.recipes.stages.given_text import measured_windows
from freenergy.recipes.stages.language_models import RUNGS, load_base
from freenergy.recipes.stages.negatives import BASE_ALONE, ROWS, from_base, identify, traced
from freenergy.recipes.stages.workers import Opened, job
from freenergy.runs.run import Plan, Stage

_SHARD = 4  # windows whose draws appear at a time


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    settings = run.recipe.evaluation
    inputs = {
        "seed": run.recipe.seed,
        "split": settings.split,
        "candidates": settings.candidates,
        "windows": settings.certified_windows,
    }
    if run.recipe.chunks:
        inputs["chunk"] = run.recipe.chunks[0]
    return Plan(inputs, partial(_work, run))


def _work(run: ResidualRun, folder: Path, progress: Progress) -> dict[str, Any]:
    settings, corpus = run.recipe.evaluation, open_corpus(run)
    lm = load_base(run, corpus)
    num = settings.certified_windows
    draw_candidates(Opened(run, corpus, lm), folder, num, _identity(run, corpus), progress)
    windows = min(num, corpus.windows(settings.split).num_whole)
    return {"windows": windows, "draws": settings.candidates - 1, "split": settings.split}


def draw_candidates(opened: Opened, folder: Path, num: int, identity: Identity, progress: Progress) -> None:
    """The base's draws for ``num`` windows, chosen by the seed; what is there already is kept."""
    run, place = opened.run, str(folder.relative_to(opened.run.folder))
    shards = _shards(opened, place, num, identity)
    work = job(run, _shards, (), place, num, identity)
    prefetch_shards(run.workers, work, shards.missing(), folder, f"draws for {identity.split} prefixes", progress)
    shards.write(progress)


def _shards(opened: Opened, place: str, num: int, identity: Identity) -> NegativeShards:
    run, corpus, lm = opened
    windows, rng = measured_windows(run, corpus, identity), Rng(identity.seed).child("candidates")
    chosen, lm = rng.child("windows").permutation(windows.num_whole)[:num], part_of(lm, identity.split)
    source, batch = from_base(lm, corpus, ANCESTRAL), max(1, ROWS // identity.per_prefix) if windows.chunks else 1
    rows, shard = windows.rows_of(chosen), max(_SHARD, batch)
    sizes = {"shard": shard, "batch": batch}
    return NegativeShards(run.folder / place, rows, windows, source, identity, rng, traced=traced(run, lm), **sizes)


def open_candidates(run: ResidualRun, corpus: Corpus) -> NegativeStore:
    """What the stage has drawn."""
    return NegativeStore.open(run.stage("candidates"), _identity(run, corpus))


def _identity(run: ResidualRun, corpus: Corpus) -> Identity:
    settings = run.recipe.evaluation
    return identify(run, corpus, settings.split, settings.candidates - 1, BASE_ALONE)


STAGE = Stage("candidates", _plan, after=RUNGS)
