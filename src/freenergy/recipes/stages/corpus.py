"""Stage ``corpus``: the name of a text → its files → tokenizer, token streams, windows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash
from freenergy.core.progress import Progress
from freenergy.corpus import CorpusSettings, PretrainedTokenizer, prepare
from freenergy.corpus.resources import RESOURCES, ResourceUnavailable, docstrings_corpus, fetch, locate
from freenergy.corpus.settings import SPLITS
from freenergy.lm.load import locate_model
from freenergy.recipes.families.residual import ResidualRun
from freenergy.runs.run import Plan, Stage

FALLBACK = "docstrings"


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
        return {"text": text} | asdict(found)

    return Plan(inputs, work)


def located(
    settings: CorpusSettings, folder: Path, progress: Progress
) -> tuple[CorpusSettings, Mapping[str, Sequence[Path]]]:
    """The settings with a resource's reading rules, and the files of each split; docstrings would go to ``folder``."""
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
        found = fetch(settings.source, progress)
    except ResourceUnavailable as error:
        if settings.fallback != FALLBACK:
            raise
        progress.say(f"{error}; reading the docstrings of the installed packages instead")
        path = folder / f"{FALLBACK}.jsonl"
        return settings, {"all": [path if path.is_file() else docstrings_corpus(folder)]}
    if settings.documents == "file" and settings.document_start is None:
        rules: dict[str, Any] = {"documents": resource.documents, "document_start": resource.document_start}
        settings = replace(settings, **rules)
    return settings, {split: [found / name] for split, name in resource.splits.items()}


def identity(path: Path) -> list[tuple[str, int, int | str]]:
    """Returns names, sizes and times of the files, as make would look at them; of the docstrings, their content."""
    if path.stem == FALLBACK:  # each run writes its own file of them
        return [(path.name, path.stat().st_size, file_hash(path))]
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


STAGE = Stage("corpus", _plan)
