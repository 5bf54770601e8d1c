"""From the name of a text to a prepared corpus."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.corpus import Corpus, CorpusSettings, PretrainedTokenizer, TokenizerSettings, prepare
from freenergy.corpus.resources import RESOURCES, ResourceUnavailable, docstrings_corpus, fetch, locate
from freenergy.corpus.settings import SPLITS
from freenergy.lm.load import locate_model

FALLBACK = "docstrings"
_SEED = 0  # a corpus is split alike for all seeds of an experiment
_BEGUN = "begun.json"


def open_corpus(settings: CorpusSettings, tokenizer: TokenizerSettings, folder: Path, progress: Progress) -> Corpus:
    """The corpus in ``folder``, prepared unless it was, or anew where settings or files have changed."""
    settings, sources = located(settings, folder.parent, progress)
    files = {split: [identity(path) for path in paths] for split, paths in sources.items()}
    key: list[Any] = [repr(settings), repr(tokenizer), files]
    if isinstance(tokenizer, PretrainedTokenizer):
        tokenizer = replace(tokenizer, path=str(locate_model(tokenizer.path, progress)))
        key.append(identity(Path(tokenizer.path)))
    mark = {"key": fingerprint(key)}
    if not (folder / _BEGUN).is_file() or read_json(folder / _BEGUN) != mark:
        shutil.rmtree(folder, ignore_errors=True)
        write_json(folder / _BEGUN, mark)
    prepare(settings, tokenizer, sources, folder, _SEED, progress)
    return Corpus.open(folder)


def located(
    settings: CorpusSettings, folder: Path, progress: Progress
) -> tuple[CorpusSettings, Mapping[str, Sequence[Path]]]:
    """The settings with a resource's reading rules filled in, and the files of each split.

    ``folder`` is where the docstrings go, if they have to stand in.
    """
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


def identity(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files, as make would look at them."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
