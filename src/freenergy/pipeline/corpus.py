"""Stage ``corpus``: named text → tokenizer, token streams, windows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freenergy.base.opening import locate_model
from freenergy.corpus import CorpusSettings, PretrainedTokenizer, prepare
from freenergy.corpus.settings import SPLITS
from freenergy.errors import UserError
from freenergy.pipeline.run import Plan, Run, Stage
from freenergy.progress import Progress
from freenergy.resources import RESOURCES, ResourceUnavailable, docstrings_corpus, fetch, locate

FALLBACK = "docstrings"


def _plan(run: Run, progress: Progress) -> Plan:
    settings, sources = _located(run, progress)
    tokenizer = run.recipe.tokenizer
    inputs: dict[str, Any] = {
        "seed": run.recipe.seed,
        "settings": repr(settings),
        "tokenizer": repr(tokenizer),
        "files": {split: [_identity(path) for path in paths] for split, paths in sources.items()},
    }
    if isinstance(tokenizer, PretrainedTokenizer):
        tokenizer = replace(tokenizer, path=str(locate_model(tokenizer.path, progress)))
        inputs["tokenizer files"] = _identity(Path(tokenizer.path))
    is_fallback = any(path.stem == FALLBACK for path in sources.get("all", ()))
    text = "docstrings of the installed packages" if is_fallback else settings.source or settings.train

    def work(folder: Path, progress: Progress) -> dict[str, Any]:
        return {"text": text} | prepare(settings, tokenizer, sources, folder, run.recipe.seed, progress).to_json()

    return Plan(inputs, work)


def _located(run: Run, progress: Progress) -> tuple[CorpusSettings, Mapping[str, Sequence[Path]]]:
    """The corpus settings with a resource's reading rules filled in, and the files of each split."""
    settings = run.recipe.corpus
    if not settings.source:
        named = {split: getattr(settings, split) for split in SPLITS if getattr(settings, split)}
        for split, name in named.items():
            if name in RESOURCES:
                raise UserError(f"{name} has splits of its own: set corpus.source to it, and not corpus.{split}")
        return settings, {split: [locate(name, progress)] for split, name in named.items()}
    if settings.source not in RESOURCES:
        return settings, {"all": [locate(settings.source, progress)]}
    resource = RESOURCES[settings.source]
    if resource.kind != "text":
        raise UserError(f"{settings.source} is no running text ({resource.description}): choose another corpus.source")
    try:
        folder = fetch(settings.source, progress)
    except ResourceUnavailable as error:
        if settings.fallback != FALLBACK:
            raise
        progress.say(f"{error}; reading the docstrings of the installed packages instead")
        return settings, {"all": [_docstrings(run)]}
    if settings.documents == "file" and settings.document_start is None:
        rules: dict[str, Any] = {"documents": resource.documents, "document_start": resource.document_start}
        settings = replace(settings, **rules)
    return settings, {split: [folder / name] for split, name in resource.splits.items()}


def _docstrings(run: Run) -> Path:
    path = run.folder / f"{FALLBACK}.jsonl"
    return path if path.is_file() else docstrings_corpus(run.folder)


def _identity(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files, as make would look at them."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


STAGE = Stage("corpus", _plan)
