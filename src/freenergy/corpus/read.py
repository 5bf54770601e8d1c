r"""Streams text from disk: files and folders in, pieces of documents out.

    .txt  .raw  .jsonl  .parquet      each also with .gz or .zst;      a folder of them;      a folder of ``datasets``

Only the current piece is in memory: a block of a plain or compressed file, a row of JSON, a batch of a table. Text must
be UTF-8; an error names the place where it is not. Line ends of any system become "\n".
"""

import codecs
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from freenergy.core.errors import UserError, first_line
from freenergy.core.files import disk_full_as_user_error, parse_json_line
from freenergy.core.progress import Advance
from freenergy.corpus.documents import END, DocumentPiece, Fragments, lines, pieces, split_documents
from freenergy.corpus.settings import CorpusSettings

_BLOCK = 1 << 20  # bytes
_ROWS = 256  # rows of a table per batch: they may be long documents
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_KNOWN = "txt, raw, jsonl or parquet, each also with .gz or .zst"

Reader = Callable[[Path, CorpusSettings, Advance], Fragments]


def find(path: Path) -> list[Path]:
    """Return the files (and ``datasets`` folders) to read at a path, in order: itself, or all it contains."""
    if _is_saved_dataset(path):
        return [path]
    if path.is_dir():
        below = (child for child in sorted(path.iterdir()) if not child.name.startswith(".") and not _loops(child))
        found = [file for child in below if child.is_dir() or _kind(child) for file in _found_below(child)]
        if not found:
            raise UserError(f"the folder {path} contains no text: add files whose names end in {_KNOWN}")
        return found
    if not path.exists():
        raise UserError(f"there is no file or folder {path}: check the path")
    if not path.is_file():
        raise UserError(f"{path} is a pipe or a device, which cannot be read twice: copy it into a file first")
    if not _kind(path):
        raise UserError(f"{path} has an unknown file type: use a file whose name ends in {_KNOWN}")
    return [path]


def _loops(child: Path) -> bool:
    """Whether the child is a link to a folder above it, which would repeat the same text for ever."""
    return child.is_symlink() and child.resolve() in child.absolute().parents


def _found_below(child: Path) -> list[Path]:
    try:
        return find(child)
    except UserError:
        if child.is_dir():
            return []  # an empty subfolder is fine
        raise


def size(paths: Sequence[Path]) -> int:
    """Return the bytes on disk, for progress reports."""
    return sum(file.stat().st_size for path in paths for file in ([path] if path.is_file() else path.rglob("*.arrow")))


def read(paths: Sequence[Path], settings: CorpusSettings, advance: Advance) -> Iterator[DocumentPiece]:
    """Stream the documents of files; ``advance`` receives the bytes read from disk."""
    readers: dict[str, Reader] = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "datasets": _datasets}
    for path in paths:
        kind = "datasets" if path.is_dir() else _kind(path)
        yield from pieces(readers[kind](path, settings, advance))


def _kind(path: Path) -> str:
    name = path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    return {".txt": "text", ".raw": "text", ".jsonl": "jsonl", ".parquet": "parquet"}.get(name.suffix, "")


def _is_saved_dataset(path: Path) -> bool:
    names = ({"dataset_dict.json"}, {"state.json", "dataset_info.json"})
    return any(all((path / name).is_file() for name in some) for some in names)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the file decompressed, and the file on disk, whose position measures progress."""
    try:
        with pa.OSFile(str(path)) as raw:
            codec = _COMPRESSIONS.get(path.suffix)
            if codec is None:
                yield raw, raw
            else:
                with pa.CompressedInputStream(raw, codec) as stream:
                    yield stream, raw
    except PermissionError:
        raise UserError(f"{path} cannot be read: grant permission with chmod u+r") from None


def _blocks(path: Path, advance: Advance) -> Iterator[bytes]:
    with _opened(path) as (stream, raw):
        done = 0
        while True:
            try:
                block: bytes = stream.read(_BLOCK)
            except OSError as error:
                raise UserError(
                    f"{path} cannot be decompressed ({first_line(error)}): it is truncated or damaged, "
                    "so download or compress it again"
                ) from None
            advance(raw.tell() - done)
            done = raw.tell()
            if not block:
                return
            yield block


def _decoded(path: Path, advance: Advance) -> Iterator[str]:
    """UTF-8 text with one kind of line end; a byte order mark at the start is not text."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset, line = 0, 1
    for block in _blocks(path, advance):
        try:
            text = utf8.decode(block)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error, offset + len(block), line) from None
        if "\0" in text:
            raise UserError(
                f"{path} has a zero byte near line {line + text.count(chr(10), 0, text.index(chr(0)))}, so it is not "
                f"UTF-8 text: if it is UTF-16, convert it with iconv -f UTF-16 -t UTF-8"
            )
        text = text.removeprefix("\ufeff") if offset == 0 else text
        offset, line = offset + len(block), line + block.count(b"\n")
        yield newlines.decode(text)
    try:
        yield newlines.decode(utf8.decode(b"", final=True), final=True)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, offset, line) from None


def _not_utf8(path: Path, error: UnicodeDecodeError, read_so_far: int, line: int) -> UserError:
    """Return the error that names the byte: the decoder's buffer ends at the current position."""
    at = read_so_far - len(error.object) + error.start
    if at == 0 and bytes(error.object[:2]) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return UserError(f"{path} is UTF-16: convert it with iconv -f UTF-16 -t UTF-8")
    line += error.object.count(b"\n", 0, error.start)
    return UserError(
        f"{path} is not UTF-8 at byte {at} (line {line}): convert it, for example with "
        f"iconv -f LATIN1 -t UTF-8 if it is Latin-1"
    )


def _text(path: Path, settings: CorpusSettings, advance: Advance) -> Fragments:
    return split_documents(_decoded(path, advance), settings)


def _jsonl(path: Path, settings: CorpusSettings, advance: Advance) -> Fragments:
    """Yield one document per row; null counts as empty, and half a surrogate pair is replaced."""
    number, held = 0, ""
    for part, _ in chain(lines(_decoded(path, advance)), [("\n", False)]):  # the last row may lack its newline
        held += part
        if not part.endswith("\n"):
            continue
        number, row, held = number + 1, held, ""
        if not row.isspace():
            yield _text_of_row(row, settings.text_column, f"{path}, line {number}")
            yield END


def _text_of_row(row: str, column: str, where: str) -> str:
    value = parse_json_line(row, where)
    if not isinstance(value, dict):
        raise UserError(f'{where} is not a JSON object: write each row as {{"{column}": "…"}}')
    if column not in value:
        raise _no_column(where, column, list(value))
    text = value[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(
            f"{where} has {type(text).__name__} in {column!r}, not text: name the column of the text in text_column"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _no_column(where: str, column: str, columns: Sequence[str]) -> UserError:
    there = ", ".join(map(repr, columns)) or "none"
    return UserError(f"{where} has no column {column!r} (columns: {there}): set text_column to one of them")


def _parquet(path: Path, settings: CorpusSettings, advance: Advance) -> Fragments:
    if path.suffix not in _COMPRESSIONS:
        with _opened(path) as (file, _):
            yield from _parquet_rows(file, path, settings.text_column, advance)
        return
    with tempfile.TemporaryFile() as file:  # Parquet is read from its end, so it must be decompressed first
        with disk_full_as_user_error(Path(tempfile.gettempdir())):
            for block in _blocks(path, lambda amount, note="": None):
                file.write(block)
        file.seek(0)
        yield from _parquet_rows(file, path, settings.text_column, advance)


def _parquet_rows(file: Any, path: Path, column: str, advance: Advance) -> Fragments:
    try:
        # without pre-buffering and with a small buffer a row group is streamed, not loaded
        table = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BLOCK)
        _check_column(table.schema_arrow, column, path)
        for batch in table.iter_batches(batch_size=_ROWS, columns=[column]):
            advance(path.stat().st_size * batch.num_rows / table.metadata.num_rows)
            yield from _texts_of(batch.column(0), path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} is not a Parquet file ({first_line(error)}): download or write it again") from None


def _datasets(path: Path, settings: CorpusSettings, advance: Advance) -> Fragments:
    """Yield all rows of a saved Dataset, or of every split of a saved DatasetDict."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{path} was saved by the datasets library, which is not installed: pip install 'freenergy[data]'"
        ) from None
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be loaded ({first_line(error)}): save it again with save_to_disk") from None
    parts = list(saved.values()) if isinstance(saved, dict) else [saved]
    rows = sum(len(part) for part in parts)
    for part in parts:
        _check_column(part.features.arrow_schema, settings.text_column, path)
        for table in part.select_columns([settings.text_column]).with_format("arrow").iter(batch_size=_ROWS):
            advance(size([path]) * table.num_rows / rows)
            yield from _texts_of(table.column(0), path)


def _check_column(schema: Any, column: str, path: Path) -> None:
    if column not in schema.names:
        raise _no_column(str(path), column, schema.names)
    if schema.names.count(column) > 1:
        raise UserError(f"{path} has more than one column {column!r}: write it again with one")
    kind = schema.field(column).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner)):
        raise UserError(f"{path} has {kind} in {column!r}, not text: name the column of the text in text_column")


def _texts_of(column: Any, path: Path) -> Fragments:
    try:
        texts = column.to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(
            f"a text in {path} is not UTF-8 ({error.reason}, byte {error.start} of the text): write the file again"
        ) from None
    for text in texts:
        yield text or ""
        yield END
