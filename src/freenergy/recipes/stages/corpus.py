"""Stage ``corpus``: named text → tokenizer, token streams, windows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from freenergy.core.progress import Progress
from freenergy.corpus import PretrainedTokenizer, prepare
from freenergy.lm.load import locate_model
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.text import FALLBACK, identity, located
from freenergy.runs.run import Plan, Stage


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    settings, sources = located(run.recipe.corpus, run.folder, progress)
    tokenizer = run.recipe.tokenizer
    inputs: dict[str, Any] = {
        "seed": run.recipe.corpus_seed,
        "settings": settings,
        "tokenizer": tokenizer,
        "files": {split: [identity(path) for path in paths] for split, paths in sources.items()},
    }
    if isinstance(tokenizer, PretrainedTokenizer):
        tokenizer = replace(tokenizer, path=str(locate_model(tokenizer.path, progress)))
        inputs["tokenizer files"] = identity(Path(tokenizer.path))
    is_fallback = any(path.stem == FALLBACK for path in sources.get("all", ()))
    text = "docstrings of the installed packages" if is_fallback else settings.source or settings.train

    def work(folder: Path, progress: Progress) -> dict[str, Any]:
        found = prepare(settings, tokenizer, sources, folder, run.recipe.corpus_seed, progress, workers=run.workers)
        return {"text": text} | found.to_json()

    return Plan(inputs, work)


STAGE = Stage("corpus", _plan)
