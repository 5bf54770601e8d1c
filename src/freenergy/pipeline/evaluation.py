"""Stage ``evaluation``: how good the model is on held-out text, and what it writes."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from freenergy.base.opening import open_base
from freenergy.corpus import Corpus
from freenergy.evaluation.perplexity import perplexity
from freenergy.pipeline.run import Plan, Run, Stage
from freenergy.progress import Progress
from freenergy.randomness import Rng
from freenergy.storage import write_json


def _plan(run: Run, progress: Progress) -> Plan:
    inputs = {"seed": run.recipe.seed, "settings": asdict(run.recipe.evaluation)}
    return Plan(inputs, partial(_work, run))


def _work(run: Run, folder: Path, progress: Progress) -> dict[str, Any]:
    settings, rng = run.recipe.evaluation, Rng(run.recipe.seed).child("evaluation")
    corpus = Corpus.open(run.stage("corpus"))
    lm = open_base(run.stage("base"), corpus.tokenizer)
    report = perplexity(lm, corpus, settings.split, settings.windows, rng.child("windows"), progress)
    windows = corpus.windows(settings.split)
    chosen = rng.child("samples").permutation(len(windows))[: settings.samples]
    examples = []
    if len(chosen):
        x = windows.continuations(chosen)
        with progress.track("samples", len(chosen), "windows") as advance:
            draws = lm.sample(x.contexts, 1, corpus.space, rng.child("draws"))
            advance(len(chosen))
        decode = corpus.tokenizer.decode
        for prefix, human, drawn, log_base in zip(
            x.contexts.lists(), x.lists(), draws.x.lists(), draws.log_base[:, 0].tolist(), strict=True
        ):
            texts = {"prefix": decode(prefix), "human": decode(human[0]), "base": decode(drawn[0])}
            examples.append({**texts, "log_base": log_base})
    summary = {"base": {"perplexity": report.to_json()}, "samples": examples}
    write_json(folder / "evaluation.json", summary)
    return summary


STAGE = Stage("evaluation", _plan)
