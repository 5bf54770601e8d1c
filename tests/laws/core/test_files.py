import resource
import subprocess
import sys

import pytest

from freenergy import UserError
from freenergy.core.files import (
    atomic_write,
    file_hash,
    fingerprint,
    read_json,
    remove_partial_files,
    resumable_jsonl,
    write_json,
    write_text,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": 1})

    def fail():
        with atomic_write(path) as aside:
            aside.write_text("half")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        fail()
    assert read_json(path) == {"b": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_appears_whole(tmp_path):
    for content in ("first", "second"):
        with atomic_write(tmp_path / "model") as aside:
            aside.mkdir()
            (aside / "weights").write_text(content)
        assert (tmp_path / "model" / "weights").read_text() == content
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_swept(tmp_path):
    (tmp_path / "base").mkdir()
    write_text(tmp_path / "base" / "kept", "x")
    (tmp_path / "base" / ".model.17.part").mkdir()
    (tmp_path / "base" / ".model.17.part" / "weights").write_text("half")
    (tmp_path / ".recipe.json.17.part").write_text("half")
    (tmp_path / "base" / ".tmpA1b2C3").write_text("half")
    remove_partial_files(tmp_path)
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["base", "kept"]


def test_no_room_on_disk_is_one_sentence(tmp_path):
    """The system really refuses: the child may write no file larger than 1000 bytes."""
    code = (
        "from pathlib import Path\nfrom freenergy.core.files import write_text\nfrom freenergy import UserError\n"
        "try:\n    write_text(Path('big'), 'x' * 5000)\n"
        "except UserError as error:\n    print(error)\n"
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    # -B: Python would keep what it could write of compiled modules, cut short, for the next who imports them
    command = [sys.executable, "-B", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no space left to write big: free some space")
    assert list(tmp_path.iterdir()) == []


def test_fingerprints_name_content(tmp_path):
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1}) != fingerprint({"a": 1, "b": [3]})
    write_text(tmp_path / "a", "x")
    write_text(tmp_path / "b", "x")
    assert file_hash(tmp_path / "a") == file_hash(tmp_path / "b")


def test_broken_json_is_one_sentence(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        read_json(tmp_path / "a.json")
    with pytest.raises(UserError, match="there is no file"):
        read_json(tmp_path / "b.json")


def test_lines_go_on_under_the_same_key_only(tmp_path):
    path = tmp_path / "deep" / "lines.jsonl"

    def add(key, first, most, *, fails=False):
        with resumable_jsonl(path, key) as lines:
            assert lines.done == first
            for i in range(lines.done, most):
                lines.add({"key": key, "i": i})
            if fails:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        add("a", 0, 2, fails=True)
    assert not path.exists()
    torn = next(path.parent.glob(".lines.jsonl.*.part"))
    torn.write_bytes(torn.read_bytes() + b'{"key": "a", "i')
    add("b", 0, 1)
    assert path.read_text() == '{"key": "b", "i": 0}\n'
    add("a", 2, 3)
    assert path.read_text() == "".join(f'{{"key": "a", "i": {i}}}\n' for i in range(3))
    assert [left.name for left in path.parent.iterdir()] == ["lines.jsonl"]


def test_lines_that_cannot_be_written_are_one_sentence(tmp_path):
    def open_lines(path):
        with resumable_jsonl(path, 0):
            pass

    with pytest.raises(UserError, match="is a folder: give the name of a file"):
        open_lines(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file"):
        open_lines(tmp_path / "file" / "lines.jsonl")
    with resumable_jsonl(tmp_path / "lines.jsonl", 0), pytest.raises(UserError, match="another process is writing"):
        open_lines(tmp_path / "lines.jsonl")
