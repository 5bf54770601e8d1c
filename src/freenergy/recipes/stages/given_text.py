"""Any text, cut into windows as a run's own text is: by its tokenizer, prefix and continuation.

    RUN/evaluations/text-<fingerprint>/{test.bin, test.documents.npy, test.windows.npy, shared.safetensors}

The folder appears whole or not at all. Windows that share n tokens in a row with the training text are kept, since the
user asked for this text, but they are counted: on them a model is measured on what it has read.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool
from safetensors.numpy import save_file

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, file_hash, fingerprint, read_arrays
from freenergy.core.progress import Progress
from freenergy.core.workers.pool import WorkerPool
from freenergy.corpus import Corpus, CorpusSettings, Windows
from freenergy.corpus.deduplicate import Stream, repeated, touched
from freenergy.corpus.read import find, read, size
from freenergy.corpus.shards import SHARD_BYTES, encode_shards, join_shards, token_type
from freenergy.corpus.windows import Places, make_windows, read_windows, write_windows
from freenergy.evaluation.text_statistics import training_text
from freenergy.noise.store import Identity
from freenergy.recipes.families.residual import ResidualRun

GIVEN = "text"  # what a given text is called where splits have names
_SPLIT = "test"  # what its files are called
_NGRAM = 24  # where the run keeps repeated windows, and so has no length of its own
_SHARED = "shared.safetensors"


class GivenText(NamedTuple):
    """Windows of a text, and which of them share ``ngram`` tokens in a row with the training text."""

    windows: Windows
    fingerprint: str
    shared: Bool[np.ndarray, " W"]
    ngram: int


def given_text(paths: Sequence[Path], run: ResidualRun, corpus: Corpus, progress: Progress) -> GivenText:
    """Read and cut files once; the next time they are found by their content."""
    settings = run.recipe.corpus
    files = [file for path in paths for file in find(path)]
    below = [[path] if path.is_file() else sorted(path.rglob("*")) for path in files]
    content = [file_hash(file) for found in below for file in found if file.is_file()]
    ngram = min(settings.deduplicate or _NGRAM, corpus.prefix + corpus.continuation)
    how = (settings.text_column, settings.documents, settings.document_start, settings.step, corpus.ending)
    mark = fingerprint([corpus.report.fingerprint, corpus.prefix, corpus.continuation, how, ngram, content])
    folder = _folder(run, mark)
    if not folder.is_dir():
        try:
            with atomic_write(folder) as aside:
                _cut(files, settings, corpus, ngram, aside, run.workers, progress)
        finally:
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()
    return GivenText(_windows(folder, corpus), mark, read_arrays(folder / _SHARED)["shared"], ngram)


def measured_windows(run: ResidualRun, corpus: Corpus, identity: Identity) -> Windows:
    """The windows that draws of this identity are for: of a split, or of a text that was given before."""
    if identity.split != GIVEN:
        return corpus.windows(identity.split)
    return _windows(_folder(run, identity.corpus), corpus)


def _folder(run: ResidualRun, mark: str) -> Path:
    return run.folder / "evaluations" / f"text-{mark}"


def _windows(folder: Path, corpus: Corpus) -> Windows:
    tokens = np.memmap(folder / f"{_SPLIT}.bin", dtype=token_type(corpus.tokenizer.vocab_size), mode="r")
    places = read_windows(folder / f"{_SPLIT}.windows.npy")
    return Windows(tokens, places, corpus.prefix, corpus.continuation, corpus.chunks)


def _cut(
    files: Sequence[Path],
    settings: CorpusSettings,
    corpus: Corpus,
    ngram: int,
    folder: Path,
    workers: WorkerPool,
    progress: Progress,
) -> None:
    """Tokens, windows, and the windows that stand in the training text."""
    with progress.track("encoding the text", size(files), "bytes") as advance:
        tagged = ((_SPLIT, piece) for piece in read(files, settings, advance))
        count = encode_shards(tagged, corpus.tokenizer, folder / "shards", SHARD_BYTES, workers)
    join_shards(folder / "shards", count, [_SPLIT], folder)
    shutil.rmtree(folder / "shards", ignore_errors=True)  # there is none of a text without documents
    bounds = np.load(folder / f"{_SPLIT}.documents.npy", allow_pickle=False)
    places = _written(folder / f"{_SPLIT}.windows.npy", bounds, settings, files)
    text = Stream.on_disk(folder / f"{_SPLIT}.bin", token_type(corpus.tokenizer.vocab_size), bounds)
    train = training_text(corpus)
    with progress.track("looking for it in the training text", train.size, "tokens") as advance:
        marked, _ = repeated(text, [train], ngram, advance)
    save_file({"shared": touched(marked, places, settings.prefix, ngram)}, folder / _SHARED)


def _written(path: Path, bounds: np.ndarray, settings: CorpusSettings, files: Sequence[Path]) -> Places:
    """Windows, or one sentence that says how long the text must be."""
    where = ", ".join(map(str, files[:3]))
    if len(bounds) < 2:
        raise UserError(f"there is no text in {where}: give a file with at least one document that is not blank")
    try:
        return write_windows(path, make_windows(bounds, settings, _SPLIT))
    except UserError:
        longest = int(np.diff(bounds).max()) - 1
        need = settings.prefix + (settings.continuation if settings.ending == "fixed" else 0)
        raise UserError(
            f"there is no window in {where}: the longest document has {longest} tokens, and a window of this run needs "
            f"{need} of one document; give longer text"
        ) from None
