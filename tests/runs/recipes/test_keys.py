"""What a key depends on, and what a folder that resumes does with other keys and with files of others."""

from dataclasses import dataclass, field, replace

import pytest

from freenergy import UserError
from freenergy.runs.folder import BEGUN, adopt, begin, key_of, withdraw, without_defaults


@dataclass(frozen=True)
class Part:
    kind: str = "part"
    size: int = 3


@dataclass(frozen=True)
class Whole:
    name: str
    part: Part = Part(size=5)
    parts: tuple[Part, ...] = field(default_factory=lambda: (Part(),))


def test_settings_with_their_default_values_do_not_count():
    @dataclass(frozen=True)
    class Later(Whole):
        added: float = 0.5

    assert key_of(Whole("a")) == key_of(Later("a"))
    assert key_of(Later("a", added=0.25)) != key_of(Later("a"))


def test_all_other_settings_count():
    whole = Whole("a")
    others = [
        replace(whole, name="b"), replace(whole, part=Part()), replace(whole, part=Part(size=4)),
        replace(whole, parts=()), replace(whole, parts=(Part(), Part())), replace(whole, parts=(Part("other"),)),
    ]  # fmt: skip
    assert len({key_of(each) for each in (whole, *others)}) == len(others) + 1


def test_a_section_that_differs_from_its_place_is_told_by_its_own_defaults():
    assert without_defaults(Whole("a", part=Part())) == {"name": "a", "part": {"kind": "part"}}
    assert without_defaults({"x": [Part(size=1)], "y": None}) == {"x": [{"kind": "part", "size": 1}], "y": None}


def test_a_folder_resumes_under_its_key_and_is_set_aside_under_another(tmp_path):
    folder = tmp_path / "stage"
    assert not begin(folder, "one")
    (folder / "half").write_text("done")
    assert begin(folder, "one")
    assert (folder / "half").exists()
    assert not begin(folder, "two")
    assert [path.name for path in folder.iterdir()] == [BEGUN]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replaced", "stage"]
    assert (tmp_path / "replaced" / "stage-one" / "half").read_text() == "done"


def test_a_folder_of_the_user_is_refused_and_not_emptied(tmp_path):
    begin(tmp_path, "one")
    (tmp_path / "half").write_text("done")
    with pytest.raises(UserError, match="was begun with other settings"):
        begin(tmp_path, "two", keep_others=True)
    (tmp_path / BEGUN).unlink()
    with pytest.raises(UserError, match="holds files that no run has made"):
        begin(tmp_path, "one")
    assert (tmp_path / "half").read_text() == "done"


def test_what_could_not_begin_leaves_the_folder_to_other_work(tmp_path):
    begin(tmp_path, "one")
    withdraw(tmp_path)
    assert not begin(tmp_path, "two", keep_others=True)
    (tmp_path / "half").write_text("done")
    withdraw(tmp_path)
    assert begin(tmp_path, "two")


def test_a_finished_folder_is_adopted(tmp_path):
    source, folder = tmp_path / "a" / "corpus", tmp_path / "b" / "corpus"
    begin(source, "one")
    (source / "stage.json").write_text('{"key": "one"}')
    (source / "text").mkdir()
    (source / "text" / "0.txt").write_text("words")
    begin(folder, "two")
    adopt(source, folder)
    assert (folder / "text" / "0.txt").read_text() == "words"
    assert begin(folder, "one")
    assert list(folder.parent.iterdir()) == [folder]
