"""The work of stage ``field`` where the recipe has a head: a network of sentences, alone, after the features, or with them.

RUN/field/model/         the energy −U, as ``Mixed`` writes it
RUN/field/network/       checkpoint, records and best weights of the training
RUN/field/penalties/     the weights of each penalty (parts = "stages")
RUN/field/pools.json     names of the pools that trained the field or chose among fields
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from freenergy.core.files import write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.energies.discrete import Discrete
from freenergy.energies.heads import NeuralHead
from freenergy.energies.mixed import Mixed
from freenergy.energies.sparse.features import SparseFeatures
from freenergy.lm.load import load_lm
from freenergy.noise.pool import Pool, draw_pool
from freenergy.recipes.families.random_field import RandomFieldRun
from freenergy.recipes.stages.field_fit import (
    MODEL,
    PENALTIES,
    POOLS,
    judge_on,
    longest_of,
    sentences,
)
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.sparse_fit import Chosen, SparseProblem, choose_penalty
from freenergy.training.tasks.sentence_field import SentenceFieldTask, Side, side_of

_NETWORK = "network"


class _Texts(NamedTuple):
    """What a field learns from, and what it is chosen by."""

    sides: tuple[Side, Side, Side, Side]  # training sentences, noise, validation sentences, fresh draws
    draws: tuple[int, int]  # of noise and fresh draws
    longest: int


def fit_network(run: RandomFieldRun, folder: Path, progress: Progress) -> dict[str, Any]:
    """Train the head that the recipe asks for, and write the field."""
    recipe, corpus = run.recipe, Corpus.open(run.stage("corpus"))
    assert recipe.head is not None, "asked by the plan"
    lm, settings = load_lm(run.stage("base"), corpus.tokenizer), recipe.training
    train = sentences(corpus, "train", recipe.longest)
    longest, rng = longest_of(run, train), Rng(recipe.seed).child("field")
    noise = draw_pool(lm, longest, settings.noise_ratio * train.num, rng.child("noise"), progress, "noise")
    fresh = draw_pool(lm, longest, settings.validation_draws, rng.child("fresh"), progress, "fresh draws")
    texts = (train, noise.text, sentences(corpus, "validation", longest), fresh.text)
    parts, features, chosen = settings.network.parts, None, None
    if parts != "head":
        features = SparseFeatures.fit(train, recipe.features, vocab_size=lm.vocab_size, eos=lm.eos, progress=progress)
    started = time.process_time()
    if features is not None and parts == "stages":
        chosen = _features_first(run, features, (train, noise, texts[2], fresh), longest, folder, progress)
        fixed = [features.potential(text, chosen.weights) + chosen.bias for text in texts]
        sides = tuple(side_of(text, fixed=each) for text, each in zip(texts, fixed, strict=True))
    else:
        sides = tuple(side_of(text, features.matrix(text) if features is not None else None) for text in texts)
    first_seconds = time.process_time() - started
    task = _trained(run, _Texts(sides, (noise.draws, fresh.draws), longest), lm.vocab_size, folder, progress)  # type: ignore[arg-type]
    discrete, bias = None, task.bias
    if features is not None:
        weights = chosen.weights if chosen is not None else task.weights
        discrete = Discrete(features, weights, chosen.bias if chosen is not None else 0.0, longest=longest)
    Mixed(task.module.head, discrete, bias, eos=lm.eos, longest=longest).save_pretrained(folder / MODEL)  # type: ignore[arg-type]
    write_json(folder / POOLS, {"trained_on": [noise.fingerprint, fresh.fingerprint]})
    return {
        "parts": parts,
        "features": features.num if features is not None else 0,
        "head_weights": sum(w.numel() for w in task.module.head.parameters() if w.requires_grad),  # type: ignore[union-attr]
        "longest": longest,
        "cut_draws": noise.draws - noise.text.num,
        "tried": [each._asdict() for each in chosen.tried] if chosen is not None else [],
        "curve": _curve(folder / _NETWORK, first_seconds),
    }


def _features_first(
    run: RandomFieldRun, features: SparseFeatures, texts: tuple[Any, Pool, Any, Pool], longest: int, folder: Path,
    progress: Progress,
) -> Chosen:  # fmt: skip
    """Fit λ to its optimum and choose its penalty, as without a head."""
    train, noise, valid, fresh = texts
    settings = run.recipe.training
    data, drawn = features.matrix(train), features.matrix(noise.text)
    problem = SparseProblem(data, drawn, settings.fit.loss, noise_ratio=noise.draws / train.num, draws=noise.draws)
    return choose_penalty(
        problem, settings.fit, judge_on(features, valid, fresh, longest), progress, folder / PENALTIES
    )


def _trained(
    run: RandomFieldRun, texts: _Texts, vocab_size: int, folder: Path, progress: Progress
) -> SentenceFieldTask:
    """Train the head in the one loop; it resumes from its checkpoint."""
    settings, rng = run.recipe.training.network, Rng(run.recipe.seed).child("network")
    assert run.recipe.head is not None, "asked by the plan"
    with torch.random.fork_rng():
        torch.manual_seed(rng.child("weights").integer())
        head = NeuralHead(run.recipe.head, vocab_size)
    task = SentenceFieldTask(
        head, *texts.sides, draws=texts.draws, longest=texts.longest, settings=settings, rng=rng.child("order")
    )
    (folder / _NETWORK).mkdir(exist_ok=True)
    fit_watched(task, settings.optimisation, folder / _NETWORK, rng.child("steps"), progress, "network")
    head.eval()
    return task


def _curve(folder: Path, first_seconds: float) -> list[dict[str, float]]:
    """Return what each validation found, with the CPU seconds of fitting until then (measuring not counted)."""
    spent, found = first_seconds, []
    for record in read_records(folder):
        spent += record["cpu_seconds"]
        if record["validation"] is not None:
            metrics = {name: float(np.float64(value)) for name, value in record["validation_metrics"].items()}
            found.append({"step": record["step"], "cpu_seconds": round(spent, 2), **metrics})
    return found
