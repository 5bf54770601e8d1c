import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freenergy.core.errors import UserError
from freenergy.corpus import CorpusSettings
from freenergy.corpus.read import find, read, size

DOCUMENTS = ["one cat", "zwei Mäuse\nund 猫", 'three "quoted"']


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".raw", ".jsonl", ".parquet"])
def test_every_form_reads_back(tmp_path, write, read_all, kind, compression):
    documents = DOCUMENTS if kind in (".jsonl", ".parquet") else [text.replace("\n", " ") for text in DOCUMENTS]
    path = write(tmp_path / f"a{kind}{compression}", documents)
    assert read_all(path, documents="line") == documents


def test_progress_adds_up_to_the_bytes_on_disk(tmp_path, write):
    for name in ("a.txt", "b.txt.gz", "c.jsonl.zst", "d.parquet", "e.parquet.gz"):
        path = write(tmp_path / name, DOCUMENTS * 100)
        steps = []
        assert list(read([path], CorpusSettings(source="x"), steps.append))
        assert sum(steps) == pytest.approx(size([path])) == path.stat().st_size


def test_folders_are_read_in_order_without_hidden_and_unknown_files(tmp_path, write, read_all):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "x.txt", ["third"])
    write(tmp_path / "a.txt", ["first"])
    write(tmp_path / "a2.jsonl", ["second"])
    write(tmp_path / ".hidden.txt", ["never"])
    (tmp_path / "README.md").write_text("never")
    (tmp_path / "empty").mkdir()
    assert read_all(tmp_path) == ["first", "second", "third"]


@pytest.mark.parametrize("kind", ["Dataset", "DatasetDict"])
def test_saved_datasets(tmp_path, read_all, kind):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"body": DOCUMENTS, "n": [1, 2, 3]})
    if kind == "DatasetDict":
        saved = datasets.DatasetDict({"train": saved, "test": saved})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert read_all(tmp_path / "saved", text_column="body") == DOCUMENTS * (2 if kind == "DatasetDict" else 1)
    with pytest.raises(UserError, match=r"no column 'text' \(columns: 'body', 'n'\)"):
        read_all(tmp_path / "saved")
    steps = []
    paths = find(tmp_path / "saved")
    assert list(read(paths, CorpusSettings(source="x", text_column="body"), steps.append))
    assert sum(steps) == pytest.approx(size(paths))


def test_datasets_not_installed(tmp_path, read_all, monkeypatch):
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'freenergy\[data\]'"):
        read_all(tmp_path)


@pytest.mark.parametrize("before", [0, 5, (1 << 20) - 1, 3 << 20])
def test_another_encoding_is_named_with_its_place(tmp_path, read_all, before):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"a\n" + b"b" * before + "é".encode("latin-1") + b"cde")
    with pytest.raises(UserError, match=rf"latin.txt is not UTF-8 at byte {before + 2} \(line 2\).*iconv"):
        read_all(path)


def test_text_cut_in_the_middle_of_a_character(tmp_path, read_all):
    path = tmp_path / "cut.txt"
    path.write_bytes("abcé".encode()[:-1])
    with pytest.raises(UserError, match="byte 3"):
        read_all(path)


def test_characters_across_blocks_byte_order_mark_and_line_ends(tmp_path, read_all):
    text = "é猫\r\n" * 300_000
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_all(tmp_path / "a.txt") == [text.replace("\r\n", "\n")]


def test_utf_16_is_not_taken_for_text(tmp_path, read_all):
    (tmp_path / "a.txt").write_bytes("abc\ndef".encode("utf-16-le"))
    with pytest.raises(UserError, match="UTF-16"):
        read_all(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "line 2 is not valid JSON"),
        ('["a"]', "line 2 is not a JSON object"),
        ('{"text": 3}', "line 2 has int in 'text'"),
        ('{"body": "a", "id": 1}', "line 2 has no column 'text' .*'body', 'id'.*text_column"),
    ],
)
def test_bad_rows_are_named(tmp_path, read_all, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        read_all(path)


def test_rows_without_text_are_skipped_and_half_surrogates_replaced(tmp_path, read_all):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": null}\n{"text": " "}\n{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}')
    assert read_all(path) == ["a\ufffdb", "\U0001f600"]


def test_bad_tables(tmp_path, write, read_all):
    path = write(tmp_path / "a.parquet", ["x"], "body")
    with pytest.raises(UserError, match=r"no column 'text' \(columns: 'id', 'body'\)"):
        read_all(path)
    with pytest.raises(UserError, match="has int64 in 'id', not text"):
        read_all(path, text_column="id")
    (tmp_path / "b.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match=r"b.parquet is not a Parquet file"):
        read_all(tmp_path / "b.parquet")


def test_tables_with_other_kinds_of_text(tmp_path, read_all):
    column = pa.array(["a", None, "b"])
    for name, values in (("large", column.cast(pa.large_string())), ("dictionary", column.dictionary_encode())):
        pq.write_table(pa.table({"text": values}), tmp_path / f"{name}.parquet")
        assert read_all(tmp_path / f"{name}.parquet") == ["a", "b"]


def test_damaged_compression(tmp_path, write, read_all):
    path = write(tmp_path / "a.txt.gz", ["x" * 1000 + str(i) for i in range(1000)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"a.txt.gz cannot be decompressed"):
        read_all(path)
    path.write_bytes(b"not compressed at all")
    with pytest.raises(UserError, match=r"a.txt.gz cannot be decompressed"):
        read_all(path)


def test_two_gzip_members_are_one_text(tmp_path, write, read_all):
    a, b = (write(tmp_path / f"{name}.txt.gz", [name]) for name in "ab")
    (tmp_path / "c.txt.gz").write_bytes(a.read_bytes() + b.read_bytes())
    assert read_all(tmp_path / "c.txt.gz") == ["ab"]


def test_nothing_to_read(tmp_path):
    with pytest.raises(UserError, match="no file or folder"):
        find(tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="contains no text"):
        find(tmp_path)
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(UserError, match="unknown file type"):
        find(tmp_path / "a.csv")


def test_a_row_longer_than_a_block(tmp_path, read_all):
    text = "word " * 500_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert read_all(tmp_path / "a.jsonl") == [text]
