"""``freenergy verify``: one turned bit in any file that a stage has left is noticed, and mended by doing it again."""

import json
import shutil

import pytest

from freenergy import UserError, run
from freenergy.core.checksums import digest_matches, write_with_checksums
from freenergy.recipes import load_run, verify

RECORDS = ("stage.json", "flat.json")


@pytest.fixture
def copy(joint_run, tmp_path):
    """A finished run of one's own."""
    return shutil.copytree(joint_run[0], tmp_path / "run")


def turn(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def files_of(folder):
    """Those of the stages."""
    stages = sorted(path.parent for each in ("*", "evaluations/*") for path in folder.glob(f"{each}/stage.json"))
    return [path.relative_to(folder) for stage in stages for path in sorted(stage.rglob("*")) if path.is_file()]


def test_a_whole_run_is_whole_after_any_use(copy, call):
    assert call("report", copy)[0] == 0
    assert call("sample", copy, "--prefix", "The", "--num", 1, "--candidates", 4)[0] == 0
    assert call("evaluate", copy, "--windows", 2, "--candidates", 4)[0] == 0
    status, out, err = call("verify", copy, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["damaged"] == found["without_checksums"] == []
    assert found["files"] == len([n for n in files_of(copy) if n.name not in RECORDS]) > 20
    assert set(found["stages"]) == {"corpus", "base", "negatives", "energy", "candidates", "baselines", "evaluation"}
    assert "every checksum matches" in call("verify", copy)[1]


def found_damaged(folder):
    """The files that verify names, in its list or in the sentence that it ends with."""
    try:
        return verify(folder).damaged
    except UserError as error:
        return (str(error).split(" is not valid JSON")[0],)


def test_a_turned_bit_in_any_file_is_named(copy):
    for name in files_of(copy):
        path, kept = copy / name, (copy / name).read_bytes()
        if kept:
            turn(path)
            # a last digit of a number beyond what floats tell apart is no damage
            is_same = name.name in RECORDS and equal(kept, path.read_bytes())
            assert found_damaged(copy) == (() if is_same else (str(path),))
            path.write_bytes(kept)
    assert verify(copy).damaged == ()


def equal(kept, changed):
    try:
        return json.loads(kept) == json.loads(changed)
    except ValueError:
        return False


def test_a_missing_file_is_named_and_the_stage_is_made_again(copy, call, hashes):
    before = hashes(copy)
    files = [name for name in files_of(copy) if name.parts[0] == "energy"]
    weights, about = (copy / next(n for n in files if n.suffix == suffix) for suffix in (".safetensors", ".json"))
    weights.unlink()
    turn(about)
    status, out, err = call("verify", copy, "--json")
    assert status == 2
    assert len(json.loads(out)["damaged"]) == 2
    assert "does not match its checksum (and 1 more)" in err
    assert f": delete energy, evaluation, features in {copy} and run the recipe again" in err
    for name in json.loads(out)["rerun"]:
        shutil.rmtree(copy / name)
    list(run(load_run(copy).recipe, copy))
    assert verify(copy).damaged == ()
    assert hashes(copy) == before


def test_all_that_read_a_damaged_stage_is_made_again(copy):
    turn(copy / "evaluation" / "evaluation.json")
    assert verify(copy).rerun == ("evaluation",)
    turn(next((copy / "negatives").rglob("*.parquet")))
    assert verify(copy).rerun == ("energy", "evaluation", "negatives", "features")
    turn(copy / "corpus" / "train.bin")
    assert set(verify(copy).rerun) == {path.parent.name for path in copy.glob("*/stage.json")} | {"features"}


def test_a_record_that_was_edited_is_not_believed(copy):
    path = copy / "energy" / "stage.json"
    record = json.loads(path.read_text())
    record["summary"]["validation"]["certified_gain"] += 1
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="is damaged"):
        load_run(copy).finished("energy")
    assert verify(copy).damaged == (str(path),)


def test_runs_without_checksums_are_reported(copy):
    for path in [*copy.glob("*/stage.json"), *copy.rglob("flat.json")]:
        record = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in record.items() if key not in ("files", "mark")}))
    found = verify(copy)
    assert found.files == 0
    assert set(found.without_checksums) == set(found.stages)
    load_run(copy).finished("energy")  # and they are read


def test_a_digest_does_not_depend_on_the_order_of_keys(tmp_path):
    (tmp_path / "a").write_text("a")
    write_with_checksums(tmp_path / "record.json", {"x": 0.1, "b": [1]})
    record = json.loads((tmp_path / "record.json").read_text())
    assert list(record["files"]) == ["a"]
    assert digest_matches(dict(reversed(record.items())))
    assert not digest_matches(record | {"x": 0.2})


def test_what_is_no_run(call, tmp_path):
    status, _, err = call("verify", tmp_path)
    assert status == 2
    assert "is not a run" in err
