"""Stage ``field``: draws of the base, features of both, and the weights that tell them apart.

RUN/field/model/         the energy −U, as ``Discrete`` writes it
RUN/field/penalties/     the weights of each penalty that was tried
RUN/field/pools.json     names of the pools that trained the field or chose its penalty
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.core.sentences import Sentences
from freenergy.corpus import Corpus
from freenergy.energies.discrete import Discrete
from freenergy.energies.mixed import Mixed
from freenergy.energies.registry import load_energy
from freenergy.energies.sparse.classes import word_classes
from freenergy.energies.sparse.features import SparseFeatures
from freenergy.evaluation.fields import perplexity_of
from freenergy.lm.load import load_lm
from freenergy.lm.ngram import NgramLM
from freenergy.models.length_law import LengthLaw
from freenergy.models.random_field import RandomField
from freenergy.models.transfer import PairField
from freenergy.noise.pool import Pool, draw_pool
from freenergy.partition.lengths import LengthSums
from freenergy.recipes.families.random_field import RandomFieldRun
from freenergy.runs.run import Plan, Stage
from freenergy.training.pair_fit import fit_pairs
from freenergy.training.sparse_fit import Judge, SparseProblem, choose_penalty

MODEL, POOLS, PAIRS, PENALTIES = "model", "pools.json", "pairs.safetensors", "penalties"


def sentences(corpus: Corpus, split: str, longest: int | None = None) -> Sentences:
    """Returns the sentences of a split; a longer one than the field has is refused."""
    bounds = np.asarray(corpus.documents(split), dtype=np.int64)
    text = Sentences(np.asarray(corpus.stream(split)).astype(np.int32), bounds)
    if longest is not None and int(text.lengths.max()) > longest:
        num = int((text.lengths > longest).sum())
        raise UserError(
            f"{num} {split} sentences have more than {longest} words, up to {int(text.lengths.max())}, and would have "
            "probability 0: set longest in the recipe to at least that"
        )
    return text.rows(text.lengths > 0)


def longest_of(run: RandomFieldRun, train: Sentences) -> int:
    """Returns m, the most words of a sentence of the field."""
    return run.recipe.longest or int(train.lengths.max())


def _plan(run: RandomFieldRun, progress: Progress) -> Plan:
    recipe = run.recipe
    inputs = {
        "seed": recipe.seed,
        "form": recipe.form,
        "features": recipe.features,
        "training": recipe.training,
        "longest": recipe.longest,
    }
    if recipe.head is not None:
        from freenergy.recipes.stages.field_network import fit_network

        return Plan(inputs | {"head": recipe.head}, partial(fit_network, run))
    return Plan(inputs, partial(_fit_pairs if recipe.form == "pairs" else _work, run))


def _fit_pairs(run: RandomFieldRun, folder: Path, progress: Progress) -> dict[str, Any]:
    """Fit an absolute field of pairs exactly, from the bigram model; the penalty is chosen by exact validation."""
    recipe, corpus = run.recipe, Corpus.open(run.stage("corpus"))
    lm = load_lm(run.stage("base"), corpus.tokenizer)
    assert isinstance(lm, NgramLM), "checked with the recipe"
    train = sentences(corpus, "train", recipe.longest)
    longest = longest_of(run, train)
    valid, law = sentences(corpus, "validation", longest), LengthLaw.fit(train.lengths, longest=longest)
    sizes = {"vocab_size": lm.vocab_size, "eos": lm.eos, "passes": recipe.features.passes}
    num_classes = min(recipe.features.classes, lm.vocab_size)
    classes = word_classes(train.tokens, **sizes, num_classes=num_classes, progress=progress)
    start, fit = PairField.from_ngram(lm, longest=longest, classes=classes), recipe.training.fit
    tried = []
    for l2 in sorted(fit.l2, reverse=True):
        path = folder / PENALTIES / f"penalty-{l2:g}.safetensors"
        if not path.is_file():
            fit_pairs(start, train, l2=l2, iterations=fit.iterations, progress=progress).field.save(path)
        field = PairField.load(path)
        log_p = law.log_prob(valid.lengths) + field.potential(valid) - field.log_z()[valid.lengths - 1]
        tried.append({"l2": l2, "validation": perplexity_of(log_p, valid)[0]})
    best = min(tried, key=lambda each: each["validation"])
    PairField.load(folder / PENALTIES / f"penalty-{best['l2']:g}.safetensors").save(folder / PAIRS)
    features = len(start.weights.flat())
    return {"form": "pairs", "features": features, "l2": best["l2"], "longest": longest, "tried": tried}


def _work(run: RandomFieldRun, folder: Path, progress: Progress) -> dict[str, Any]:
    recipe, corpus = run.recipe, Corpus.open(run.stage("corpus"))
    lm = load_lm(run.stage("base"), corpus.tokenizer)
    train = sentences(corpus, "train", recipe.longest)
    longest = longest_of(run, train)
    valid = sentences(corpus, "validation", longest)
    rng, settings = Rng(recipe.seed).child("field"), recipe.training
    noise = draw_pool(lm, longest, settings.noise_ratio * train.num, rng.child("noise"), progress, "noise")
    fresh = draw_pool(lm, longest, settings.validation_draws, rng.child("fresh"), progress, "fresh draws")
    features = SparseFeatures.fit(train, recipe.features, vocab_size=lm.vocab_size, eos=lm.eos, progress=progress)
    progress.say(f"{features.num:,} features of {train.num:,} sentences and {noise.draws:,} draws")
    data, drawn = features.matrix(train), features.matrix(noise.text)
    problem = SparseProblem(data, drawn, settings.fit.loss, noise_ratio=noise.draws / train.num, draws=noise.draws)
    judge = judge_on(features, valid, fresh, longest)
    chosen = choose_penalty(problem, settings.fit, judge, progress, folder / PENALTIES)
    Discrete(features, chosen.weights, chosen.bias, longest=longest).save_pretrained(folder / MODEL)
    write_json(folder / POOLS, {"trained_on": [noise.fingerprint, fresh.fingerprint]})
    return {
        "features": features.num,
        "nonzeros": int(data.nnz + drawn.nnz),
        "l2": chosen.l2,
        "longest": longest,
        "cut_draws": noise.draws - noise.text.num,
        "tried": [each._asdict() for each in chosen.tried],
    }


def judge_on(features: SparseFeatures, valid: Sentences, fresh: Pool, longest: int) -> Judge:
    """Returns the certified gain on held-out sentences and the effective number of fresh draws."""

    def judge(weights: np.ndarray, bias: float) -> tuple[float, float, int]:
        drawn = features.potential(fresh.text, weights) + bias
        sums = LengthSums.of(drawn, fresh.text.lengths, fresh.draws, longest)
        gain = sums.certified(features.potential(valid, weights) + bias, valid.lengths)
        return float(gain.mean()), sums.single().ess, fresh.draws

    return judge


def load_field(run: RandomFieldRun, corpus: Corpus) -> tuple[RandomField, LengthLaw]:
    """Loads the field of a run, without a normaliser, and the length law of its training text."""
    run.finished("field")
    lm: LanguageModel = load_lm(run.stage("base"), corpus.tokenizer)
    train = sentences(corpus, "train", run.recipe.longest)
    if run.recipe.form == "pairs":
        pairs = PairField.load(run.stage("field") / PAIRS)
        law = LengthLaw.fit(train.lengths, longest=pairs.longest)
        normaliser = pairs.normaliser()
        whole = RandomField(pairs.potential, None, lm.eos, lm.vocab_size, pairs.longest, normaliser, law)
        return whole, law
    energy = load_energy(run.stage("field") / MODEL, base=lm, tokenizer=corpus.tokenizer)
    assert isinstance(energy, Discrete | Mixed), "what this family writes"
    pools = frozenset(read_json(run.stage("field") / POOLS)["trained_on"])
    field = RandomField(energy.potential, lm, lm.eos, lm.vocab_size, energy.longest, trained_on=pools)
    return field, LengthLaw.fit(train.lengths, longest=energy.longest)


STAGE = Stage("field", _plan, after=("corpus", "base"))
