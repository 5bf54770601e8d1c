"""The corpus stage: text on disk to token streams and windows.

    text → survey → tokenizer → shards → streams → windows → de-duplicated windows → corpus.json

Every step writes its files atomically, so a killed stage resumes and ends with the same bits;
``corpus.json`` is written last and marks the stage as complete.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, fingerprint, read_json, remove_partial_files, write_json
from freenergy.core.progress import Advance, Progress
from freenergy.core.workers.pool import IN_PROCESS, WorkerPool
from freenergy.corpus.deduplicate import Stream, repeated, touched
from freenergy.corpus.read import find
from freenergy.corpus.settings import SPLITS, BytePairTokenizer, CorpusSettings, PretrainedTokenizer, TokenizerSettings
from freenergy.corpus.shards import SHARD_BYTES, StreamCount, Tagged, encode_shards, join_shards, token_type
from freenergy.corpus.splits import Sources, Survey, survey, tagged, total_size, wanted
from freenergy.corpus.store import REPORT, CorpusReport, Example, SplitReport, Windows
from freenergy.corpus.tokenizer import Tokenizer, learn, sample
from freenergy.corpus.windows import Places, make_windows, write_windows

_SURVEY, _SHARDS = "survey.json", "shards"
_EXAMPLES = 3


def prepare(
    settings: CorpusSettings,
    tokenizer_settings: TokenizerSettings,
    sources: Sources,
    folder: Path,
    seed: int,
    progress: Progress,
    *,
    shard_bytes: int = SHARD_BYTES,
    workers: WorkerPool = IN_PROCESS,
) -> CorpusReport:
    """Prepare a corpus in ``folder``, or resume an earlier call with the same settings.

    ``sources`` is ``{"all": paths}``, which is split by document, or names the paths of each split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_partial_files(folder)
    if not (folder / REPORT).exists():
        names = [name for name in ("all", *SPLITS) if name in sources]
        sources = {name: [file for path in sources[name] for file in find(path)] for name in names}
        if not (folder / _SURVEY).exists():
            write_json(folder / _SURVEY, asdict(survey(settings, sources, seed, progress)))
        found = Survey(**read_json(folder / _SURVEY))
        pieces, num_bytes = partial(tagged, settings, sources, found, seed), total_size(sources)
        if not (folder / "tokenizer" / "tokenizer.json").exists():
            _tokenizer(tokenizer_settings, pieces, found, num_bytes, progress).save(folder / "tokenizer")
        tokenizer = Tokenizer.from_pretrained(folder / "tokenizer")
        with progress.track("encoding", num_bytes, "bytes") as advance:
            num_shards = encode_shards(pieces(advance), tokenizer, folder / _SHARDS, shard_bytes, workers)
        counts = join_shards(folder / _SHARDS, num_shards, wanted(settings, sources), folder)
        report = _finish(settings, tokenizer, counts, folder, progress)
        write_json(folder / REPORT, asdict(report))
    shutil.rmtree(folder / _SHARDS, ignore_errors=True)
    (folder / _SURVEY).unlink(missing_ok=True)
    return CorpusReport.from_json(read_json(folder / REPORT))


def _tokenizer(
    settings: TokenizerSettings, pieces: Callable[[Advance], Tagged], found: Survey, num_bytes: int, progress: Progress
) -> Tokenizer:
    """Return the tokenizer of the corpus: loaded, or trained on the training split."""
    if isinstance(settings, PretrainedTokenizer):
        return Tokenizer.from_pretrained(Path(settings.path))
    with progress.track("training the tokenizer", num_bytes, "bytes") as advance:
        texts: Iterator[str] = (piece.text for split, piece in pieces(advance) if split == "train")
        if isinstance(settings, BytePairTokenizer):
            characters = found.characters.get("train", found.characters.get("all", 0))
            texts = sample(texts, characters, settings.sample_megabytes << 20)
        return learn(settings, texts)


def _finish(
    settings: CorpusSettings, tokenizer: Tokenizer, counts: dict[str, StreamCount], folder: Path, progress: Progress
) -> CorpusReport:
    """Write the windows of each split, without duplicates of earlier splits; returns the report."""
    splits: dict[str, SplitReport] = {}
    examples: tuple[Example, ...] = ()
    streams: dict[str, Stream] = {}
    for split, count in counts.items():
        bounds = np.load(folder / f"{split}.documents.npy", mmap_mode="r", allow_pickle=False)
        kind = token_type(tokenizer.vocab_size)
        path, dropped, shared = folder / f"{split}.windows.npy", 0, None
        places = write_windows(path, make_windows(bounds, settings, split))
        held_out = Stream.on_disk(folder / f"{split}.bin", kind, bounds)
        if streams and settings.ngram:
            kept, dropped, shared = _clear(places, held_out, streams, settings, split, progress)
            places = write_windows(path, [kept])
        streams[split] = held_out
        splits[split] = SplitReport(
            documents=count.documents,
            tokens=count.tokens,
            bytes=count.bytes,
            windows=len(places),
            windows_dropped=dropped,
            ngrams_shared=shared,
        )
        if split == "validation":
            tokens = np.memmap(folder / f"{split}.bin", dtype=kind, mode="r")
            examples = _examples(Windows(tokens, places, settings.prefix, settings.continuation), tokenizer)
    return CorpusReport(
        fingerprint=_fingerprint(folder, tokenizer, settings),
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
        prefix=settings.prefix,
        continuation=settings.continuation,
        ending=settings.ending,
        ngram=settings.ngram,
        splits=splits,
        examples=examples,
    )


def _clear(
    places: Places,
    held_out: Stream,
    earlier: dict[str, Stream],
    settings: CorpusSettings,
    split: str,
    progress: Progress,
) -> tuple[Places, int, float]:
    """Return the windows to keep, the number dropped, and the share of n-grams that occur in earlier splits."""
    total = sum(stream.size for stream in earlier.values())
    with progress.track(f"de-duplicating {split}", total, "tokens") as advance:
        marked, shared = repeated(held_out, earlier.values(), settings.ngram, advance)
    drop = touched(marked, places, settings.prefix, settings.ngram)
    if drop.all():
        raise UserError(
            f"all {len(drop)} {split} windows share an n-gram of {settings.ngram} tokens with {' or '.join(earlier)}: "
            f"give other {split} text, or set deduplicate to 0 to keep them"
        )
    return places[~drop], int(drop.sum()), shared


def _examples(windows: Windows, tokenizer: Tokenizer) -> tuple[Example, ...]:
    rows = np.unique(np.linspace(0, len(windows) - 1, _EXAMPLES).astype(np.int64))
    x = windows.continuations(rows)
    return tuple(
        Example(prefix=tokenizer.decode(context), continuation=tokenizer.decode(continuation))
        for context, [continuation] in zip(x.contexts.lists(), x.lists(), strict=True)
    )


def _fingerprint(folder: Path, tokenizer: Tokenizer, settings: CorpusSettings) -> str:
    content = {path.name: file_hash(path) for pattern in ("*.bin", "*.windows.npy") for path in folder.glob(pattern)}
    about = {"prefix": settings.prefix, "continuation": settings.continuation, "ending": settings.ending}
    return fingerprint({"tokenizer": tokenizer.fingerprint, "files": content, **about})
