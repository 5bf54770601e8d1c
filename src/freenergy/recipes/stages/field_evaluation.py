"""Stage ``evaluation`` of a random field: every perplexity with bounds, certificate and verdict; rivals; sentences."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from scipy.special import stdtrit

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, fingerprint, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.sentences import Sentences
from freenergy.corpus import Corpus
from freenergy.evaluation.fields import (
    FieldScores,
    estimate_by_length,
    finite,
    gain_of,
    measure_field,
    perplexity_of,
    score_field,
)
from freenergy.evaluation.perplexity import Measurement
from freenergy.lm.load import load_lm
from freenergy.models.length_law import LengthLaw
from freenergy.models.random_field import RandomField
from freenergy.noise.pool import Pool, draw_pool
from freenergy.partition.lengths import LengthSums
from freenergy.recipes.families.random_field import RandomFieldRun, rival_name
from freenergy.recipes.stages.field_fit import load_field, sentences
from freenergy.recipes.stages.rivals import rival_folder
from freenergy.runs.run import Plan, Run, Stage, finish, is_current

SUMMARY, _SCORES = "evaluation.json", "sentences.safetensors"


def _plan(run: RandomFieldRun, progress: Progress) -> Plan:
    return Plan({"seed": run.recipe.seed, "settings": run.recipe.evaluation}, partial(_work, run))


def _work(run: RandomFieldRun, folder: Path, progress: Progress) -> dict[str, Any]:
    settings, corpus = run.recipe.evaluation, Corpus.open(run.stage("corpus"))
    field, law = load_field(run, corpus)
    if run.recipe.form == "pairs":
        summary = measure_pairs(run, corpus, field, law, progress)
        write_json(folder / SUMMARY, summary)
        return summary
    assert field.base is not None, "the residual form has a base"
    text = sentences(corpus, settings.split, field.longest)
    rng = Rng(run.recipe.seed).child("evaluation")
    pool = draw_pool(field.base, field.longest, settings.draws, rng.child("pool"), progress, "fresh draws")
    found = score_field(field, text, pool)
    certified = found.log_base + found.sums.certified(found.potential, text.lengths, law)
    summary = {
        "family": run.recipe.family,
        "split": settings.split,
        "field": measure_field(found, law),
        "lengths": _lengths(law, found),
        "rivals": _rivals(run, corpus, text, certified),
        "sentences": _written(corpus, pool, found, settings.samples, rng.child("written")),
    }
    with atomic_write(folder / _SCORES) as aside:
        save_file({"certified": certified, "base": found.log_base, "tokens": np.diff(text.bounds)}, aside)
    write_json(folder / SUMMARY, summary)
    return summary


def measure_pairs(
    run: RandomFieldRun, corpus: Corpus, field: RandomField, law: LengthLaw, progress: Progress
) -> dict[str, Any]:
    """Returns the exact perplexity of a field of pairs, and what importance sampling says of it with fewer draws."""
    settings, lm = run.recipe.evaluation, load_lm(run.stage("base"), corpus.tokenizer)
    text = sentences(corpus, settings.split, field.longest)
    alone = RandomField(_nothing, lm, lm.eos, lm.vocab_size, field.longest)
    exact, log_base = field.log_prob(text), alone.log_base(text)
    pool = draw_pool(lm, field.longest, settings.draws, Rng(run.recipe.seed).child("evaluation"), progress)
    weights = field.potential(pool.text) - alone.log_base(pool.text)
    rows = []
    for draws in (settings.draws // 100, settings.draws // 10, settings.draws):
        kept = int(pool.text.num * draws / pool.draws)
        sums = LengthSums.of(weights[:kept], pool.text.lengths[:kept], draws, field.longest)
        counts = np.bincount(pool.text.lengths[:kept], minlength=field.longest + 1).astype(np.float64)
        found = FieldScores(text, log_base, field.potential(text) - log_base, weights[:kept], sums, counts)
        certified = log_base + sums.certified(found.potential, text.lengths, law)
        error = sums.per_length().values - field.normaliser.log_z(np.arange(1, field.longest + 1))  # type: ignore[union-attr]
        rows.append({
            "draws": draws,
            "perplexity": estimate_by_length(found, law),
            "certified": perplexity_of(certified, text),
            "ess": sums.single().ess,
            "error of log Z_l": {str(n): finite(error[n - 1]) for n in (5, 10, 20, 40, 60) if n <= field.longest},
        })  # fmt: skip
    return {
        "family": run.recipe.family,
        "form": "pairs",
        "split": settings.split,
        "exact": {
            "sentences": text.num,
            "perplexity": perplexity_of(exact, text),
            "base": perplexity_of(log_base, text),
        },
        "estimates": rows,
        "rivals": _rivals(run, corpus, text, exact),
        "sentences": [],
    }


def evaluate_field(
    run: RandomFieldRun, split: str | None, candidates: int | None, has_text: bool, progress: Progress
) -> dict[str, Any]:
    """Returns what the run has measured, or the same on another split or with another number of draws.

    That is a stage in a folder of its own, next to those of other questions: what is there is not made again.
    """
    if has_text:
        raise UserError(
            "a random field is measured on the sentences of its corpus: leave --text and --windows out, or make the "
            "text the corpus of a run"
        )
    for name in ("corpus", "base", "field"):
        run.finished(name)
    settings = run.recipe.evaluation
    draws = settings.draws if candidates is None else candidates - 1
    match split or settings.split:
        case "validation" | "test" as chosen:
            asked = replace(settings, split=chosen, draws=draws)
        case other:
            raise UserError(f"there is no split {other!r} to measure on: choose validation or test")
    this: RandomFieldRun = Run(run.folder, replace(run.recipe, evaluation=asked), run.workers)
    own = run.stage("evaluation") / "stage.json"
    if asked == settings and own.is_file() and is_current(STAGE, run):
        return dict(read_json(run.stage("evaluation") / SUMMARY))
    stage = Stage("evaluation", _plan, after=tuple(s.name for s in run.recipe.stages() if s.name in STAGE.after))
    folder = run.folder / "evaluations" / fingerprint(asdict(asked))[:16]
    finish(stage, this, folder, progress)
    return dict(read_json(folder / SUMMARY))


def _rivals(run: RandomFieldRun, corpus: Corpus, text: Sentences, certified: np.ndarray) -> list[dict[str, Any]]:
    """Returns the perplexity of each rival on the same sentences, and the field's certified gain over it."""
    rows = []
    for each in run.recipe.rivals:
        lm = load_lm(rival_folder(run.stage("rivals"), rival_name(each)), corpus.tokenizer)
        alone = RandomField(_nothing, lm, lm.eos, lm.vocab_size, int(text.lengths.max()))
        log_prob = alone.log_base(text)
        gain = gain_of(certified - log_prob)
        rows.append({"name": rival_name(each), "perplexity": perplexity_of(log_prob, text), "field gains": gain})
    return rows


def _lengths(law: LengthLaw, found: FieldScores) -> dict[str, list[float]]:
    """Returns the laws of lengths: of the training text, of the base's draws, of the field with one constant."""
    weights = np.exp(found.sums.log_sum[1:] - found.sums.log_sum[1:].max())
    drawn = found.draws_by_length[1:]
    return {
        "human": law.probs.tolist(),
        "base": (drawn / drawn.sum()).tolist(),
        "joint": (weights / weights.sum()).tolist(),
    }


def _nothing(text: Sentences) -> np.ndarray:
    return np.zeros(text.num)


def _written(corpus: Corpus, pool: Pool, found: FieldScores, num: int, rng: Rng) -> list[str]:
    """Returns sentences of the field, resampled from the pool without replacement."""
    noise = -np.log(-np.log(np.maximum(rng.uniform(len(found.weights)).numpy(), 1e-300)))
    rows = pool.text.rows(np.argsort(-(found.weights + noise))[:num]).lists()
    return [corpus.tokenizer.decode(row[:-1]) for row in rows]


def compare_fields(ours: Sequence[Run[Any]], others: Sequence[Run[Any]]) -> dict[str, Measurement]:
    """Returns the difference of certified nats per token, paired over sentences, mean over the runs."""
    sides = [[load_file(run.stage("evaluation") / _SCORES) for run in side] for side in (ours, others)]
    if len({len(each["tokens"]) for side in sides for each in side}) > 1:
        raise UserError("the runs were measured on other sentences: give all of them one corpus and split")
    a, b = (np.mean([each["certified"] for each in side], axis=0) for side in sides)
    tokens = sides[0][0]["tokens"]
    difference = (b - a) / tokens.mean()
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) * float(stdtrit(len(difference) - 1, 0.975))
    mean = float(difference.mean())
    return {"certified nats per token": Measurement(mean, mean - error, mean + error)}


STAGE = Stage("evaluation", _plan, after=("corpus", "base", "field", "rivals"))
