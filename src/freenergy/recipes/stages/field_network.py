"""The work of stage ``field`` where the recipe has a head: a network alone, after the features, or together with them.

RUN/field/model/         the energy −U, as ``Mixed`` writes it
RUN/field/network/       checkpoint, records and best weights of the training
RUN/field/penalties/     the weights of each penalty (parts = "stages")
RUN/field/pools.json     names of the pools that trained the field or chose among fields
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from freenergy.core.files import write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.core.sentences import Sentences
from freenergy.corpus import Corpus
from freenergy.energies.discrete import Discrete
from freenergy.energies.heads import NeuralHead
from freenergy.energies.mixed import Mixed
from freenergy.energies.sparse.features import SparseFeatures
from freenergy.lm.load import load_lm
from freenergy.noise.pool import Pool, draw_pool
from freenergy.recipes.families.random_field import FieldTraining, RandomFieldRun
from freenergy.recipes.stages.field_fit import MODEL, PENALTIES, POOLS, judge_on, longest_of, sentences
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.sparse_fit import Chosen, SparseProblem, choose_penalty
from freenergy.training.tasks.sentence_field import SentenceFieldTask, Side, side_of

_NETWORK = "network"


class _Texts(NamedTuple):
    """What a field learns from, and what it is chosen by."""

    train: Sentences
    noise: Pool
    valid: Sentences
    fresh: Pool
    longest: int

    def all(self) -> tuple[Sentences, Sentences, Sentences, Sentences]:
        """The four texts."""
        return self.train, self.noise.text, self.valid, self.fresh.text


def fit_network(run: RandomFieldRun, folder: Path, progress: Progress) -> dict[str, Any]:
    """Train the head that the recipe asks for, and write the field."""
    recipe, corpus = run.recipe, Corpus.open(run.stage("corpus"))
    lm, parts = load_lm(run.stage("base"), corpus.tokenizer), recipe.training.network.parts
    texts = _texts(run, corpus, lm, progress)
    features, chosen, started = None, None, time.process_time()
    if parts != "head":
        sizes = {"vocab_size": lm.vocab_size, "eos": lm.eos}
        features = SparseFeatures.fit(texts.train, recipe.features, **sizes, progress=progress)
        if parts == "stages":
            chosen = _features_first(recipe.training, features, texts, folder, progress)
    first_seconds = time.process_time() - started
    task = _trained(run, _sides(texts, features, chosen), texts, lm.vocab_size, folder, progress)
    discrete = None
    if features is not None:
        weights, bias = (chosen.weights, chosen.bias) if chosen is not None else (task.weights, 0.0)
        discrete = Discrete(features, weights, bias, longest=texts.longest)
    Mixed(task.head, discrete, task.bias, eos=lm.eos, longest=texts.longest).save_pretrained(folder / MODEL)
    write_json(folder / POOLS, {"trained_on": [texts.noise.fingerprint, texts.fresh.fingerprint]})
    return {
        "parts": parts,
        "features": features.num if features is not None else 0,
        "head_weights": sum(weight.numel() for weight in task.head.parameters() if weight.requires_grad),
        "longest": texts.longest,
        "cut_draws": texts.noise.draws - texts.noise.text.num,
        "tried": [each._asdict() for each in chosen.tried] if chosen is not None else [],
        "curve": _curve(folder / _NETWORK, first_seconds),
    }


def _texts(run: RandomFieldRun, corpus: Corpus, lm: LanguageModel, progress: Progress) -> _Texts:
    """Return the sentences and the draws: the same ones as without a head."""
    recipe, settings = run.recipe, run.recipe.training
    train = sentences(corpus, "train", recipe.longest)
    longest, rng = longest_of(run, train), Rng(recipe.seed).child("field")
    noise = draw_pool(lm, longest, settings.noise_ratio * train.num, rng.child("noise"), progress, "noise")
    fresh = draw_pool(lm, longest, settings.validation_draws, rng.child("fresh"), progress, "fresh draws")
    return _Texts(train, noise, sentences(corpus, "validation", longest), fresh, longest)


def _features_first(
    settings: FieldTraining, features: SparseFeatures, texts: _Texts, folder: Path, progress: Progress
) -> Chosen:
    """Fit λ to its optimum and choose its penalty, as without a head."""
    data, drawn, draws = features.matrix(texts.train), features.matrix(texts.noise.text), texts.noise.draws
    problem = SparseProblem(data, drawn, settings.fit.loss, noise_ratio=draws / texts.train.num, draws=draws)
    judge = judge_on(features, texts.valid, texts.fresh, texts.longest)
    return choose_penalty(problem, settings.fit, judge, progress, folder / PENALTIES)


def _sides(texts: _Texts, features: SparseFeatures | None, chosen: Chosen | None) -> list[Side]:
    """Return the texts with features whose weights will learn, or with a potential that stays."""
    if features is None:
        return [side_of(text) for text in texts.all()]
    if chosen is None:
        return [side_of(text, features.matrix(text)) for text in texts.all()]
    return [side_of(text, fixed=features.potential(text, chosen.weights) + chosen.bias) for text in texts.all()]


def _trained(
    run: RandomFieldRun, sides: list[Side], texts: _Texts, vocab_size: int, folder: Path, progress: Progress
) -> SentenceFieldTask:
    """Train the head in the one loop; it resumes from its checkpoint."""
    settings, rng = run.recipe.training.network, Rng(run.recipe.seed).child("network")
    assert run.recipe.head is not None, "asked by the plan"
    with torch.random.fork_rng():
        torch.manual_seed(rng.child("weights").integer())
        head = NeuralHead(run.recipe.head, vocab_size)
    data, noise, held_out, fresh = sides
    task = SentenceFieldTask(
        head, data, noise, held_out, fresh, settings=settings, rng=rng.child("order"),
        draws=(texts.noise.draws, texts.fresh.draws), longest=texts.longest,
    )  # fmt: skip
    (folder / _NETWORK).mkdir(exist_ok=True)
    fit_watched(task, settings.optimisation, folder / _NETWORK, rng.child("steps"), progress, "network")
    head.eval()
    return task


def _curve(folder: Path, first_seconds: float) -> list[dict[str, Any]]:
    """Return what each validation found, with the CPU seconds of fitting until then (measuring not counted)."""
    spent, found = first_seconds, []
    for record in read_records(folder):
        spent += record["cpu_seconds"]
        if record["validation"] is not None:
            found.append({"step": record["step"], "cpu_seconds": round(spent, 2), **record["validation_metrics"]})
    return found
