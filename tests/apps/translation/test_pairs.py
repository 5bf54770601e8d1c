"""Reading pairs: folders, a resource that comes unsplit, files that are wrong, and the tokenizer that is kept."""

import gzip
import shutil

import pytest

from freenergy.apps.translation import pairs as module
from freenergy.apps.translation.pairs import Pairs, read_pairs, tokenizer_for
from freenergy.apps.translation.settings import TranslationSettings
from freenergy.core.errors import UserError
from freenergy.core.progress import Silent
from freenergy.corpus.resources import Resource
from freenergy.corpus.resources.table import File


def read(path, **settings):
    return read_pairs(TranslationSettings(path=str(path), **settings), Silent())


def test_a_folder_is_read_line_by_line(toy):
    splits = read(toy)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [60, 12, 16]
    assert (splits.train.source[0], splits.train.target[0]) == ("A dog sees a house.", "Ein Hund sieht ein Haus.")
    back = read(toy, source="de", target="en")
    assert (back.test.source, back.test.target) == (splits.test.target, splits.test.source)


def test_gzip_and_other_line_ends_are_the_same_text(toy, tmp_path):
    shutil.copytree(toy, tmp_path / "zipped")
    for path in sorted((tmp_path / "zipped").iterdir()):
        with gzip.open(f"{path}.gz", "wb") as file:
            file.write(path.read_bytes().replace(b"\n", b"\r\n"))
        path.unlink()
    assert read(tmp_path / "zipped") == read(toy)


def test_blank_pairs_are_no_training_pairs(toy, tmp_path):
    folder = tmp_path / "blank"
    shutil.copytree(toy, folder)
    for language, more in (("en", "\n\n"), ("de", "Hund.\n\n")):
        with (folder / f"train.{language}").open("a") as file:
            file.write(more)
    assert read(folder) == read(toy)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train.en", None, "there is no train.en or train.en.gz"),
        ("val.de", b"Hund.\n", "12 lines of en and 1 of de"),
        ("train.en", b"", "lines of en and 60 of de"),
        ("test_2016_flickr.de", b"\xff\xfe\n" * 16, "cannot be read as UTF-8"),
    ],
)
def test_bad_files_are_told_in_one_sentence(toy, tmp_path, name, content, words):
    folder = tmp_path / "bad"
    shutil.copytree(toy, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        read(folder)


def test_empty_files_broken_archives_and_files_for_folders_are_told(toy, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in toy.iterdir():
        (empty / path.name).write_text("")
    with pytest.raises(UserError, match="contains no sentence"):
        read(empty)
    for path in toy.iterdir():
        (empty / path.name).unlink()
        (empty / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes())[:-20])
    with pytest.raises(UserError, match="cannot be read as UTF-8"):
        read(empty)
    with pytest.raises(UserError, match="is not a folder"):
        read(toy / "train.en")
    with pytest.raises(UserError, match="there is no file or folder"):
        read(tmp_path / "nothing/here")


@pytest.fixture
def resource(tmp_path, monkeypatch):
    """A table of 500 first sentences with up to three translations each, some of them shared."""
    rows = [f"one {i % 500}.\tuno {i % 180}.\tsource {i}" for i in range(1500)] + ["no translation", "\tno sentence\t"]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows) + "\n")
    known = Resource(
        name="toy-en-es", kind="pairs", description="", licence="", citation="", files=(File("pairs.tsv", 0, ""),),
        routes=(), splits={"all": "pairs.tsv"},
    )  # fmt: skip
    monkeypatch.setattr(module, "RESOURCES", {"toy-en-es": known})
    monkeypatch.setattr(module, "locate", lambda name, progress: tmp_path)


@pytest.mark.usefixtures("resource")
def test_no_sentence_of_a_resource_is_in_two_splits():
    splits = read("toy-en-es", target="es", held_out_share=0.1)
    parts = [splits.train, splits.validation, splits.test]
    for side in ("source", "target"):
        seen = [set(getattr(part, side)) for part in parts]
        assert all(seen)
        assert len(set.union(*seen)) == sum(map(len, seen))
    assert all(one.startswith("one") for part in parts for one in part.source)
    # about a tenth of the 500 first sentences, by a hash that is always the same
    assert 30 < len(set(splits.test.source)) < 70
    back = read("toy-en-es", source="es", target="en", held_out_share=0.1)
    assert (back.test.source, back.train.target) == (splits.test.target, splits.train.source)


@pytest.mark.usefixtures("resource")
def test_a_resource_has_its_two_languages():
    with pytest.raises(UserError, match=r"no pairs of en and de: .* are toy-en-es"):
        read("toy-en-es")


def test_the_tokenizer_is_learned_once_and_kept(tmp_path, monkeypatch):
    train = Pairs(["the green dog."] * 3, ["der grüne Hund."] * 3)
    first = tokenizer_for(train, 270, tmp_path)
    assert first.vocab_size == 270
    assert first.decode(first.encode("grüne Hünd")) == "grüne Hünd"
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(module, "learn", lambda *_: pytest.fail("it is there already"))
        assert tokenizer_for(train, 270, tmp_path).fingerprint == first.fingerprint
    other = tokenizer_for(Pairs(train.source, ["el perro verde."] * 3), 270, tmp_path)
    assert other.fingerprint != first.fingerprint
    tokenizer_for(train, 270, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_multi30k(real):
    splits = read(real("multi30k"))
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [29_000, 1_014, 1_000]
    assert splits.test.target[0] == "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt."


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"path": ""}, "translation.path is empty"),
        ({"target": "en"}, "name two languages"),
        ({"vocabulary": 100}, "set it to 257 or more"),
        ({"longest": 1}, "set it to 2 or more"),
        ({"batch_tokens": 30}, "set it to 60 or more"),
        ({"heads": 3}, "does not divide into 3 heads"),
        ({"dropout": 1.0}, "below 1"),
        ({"held_out_share": 0.0}, "above 0 and below 0.5"),
        ({"resampled": (10, 5)}, "ascending"),
        ({"lengths": (0, 5)}, "each 1 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(changed, words):
    with pytest.raises(UserError, match=words):
        TranslationSettings(**{"path": "somewhere"} | changed)
