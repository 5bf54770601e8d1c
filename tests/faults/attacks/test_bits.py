"""Turned bits in a finished run: found when the file is read or by ``verify``, or without any effect on a number."""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from freenergy.core.checksums import verify
from freenergy.core.errors import UserError
from freenergy.core.files import read_json, read_tensors, write_json, write_tensors
from freenergy.core.intact import digest_matches, intact
from freenergy.corpus import Corpus
from freenergy.corpus.windows import RECORD

FOR_PEOPLE = (".html", ".svg", ".png", ".md")  # written again with every report, and read by no command
SKIPPED = ("seconds", "cpu_seconds", "cost", "cached", "run", "seconds_of_steps", "versions")


@pytest.fixture(scope="module")
def finished(whole, call_once, tmp_path_factory):
    """A finished run with a cached evaluation next to its stages."""
    folder = Path(shutil.copytree(whole("counted"), tmp_path_factory.mktemp("bits") / "run"))
    assert call_once("evaluate", folder, "--windows", 3, "--candidates", 4)[0] == 0
    return folder


@pytest.fixture(scope="module")
def call_once():
    """The command line in this process."""
    import sys
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from freenergy import cli

    def call(*arguments):
        out, err = StringIO(), StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["freenergy", *map(str, arguments)])
            try:
                cli.main()
                status = 0
            except SystemExit as ended:
                status = ended.code or 0
        return status, out.getvalue(), err.getvalue()

    return call


def files_of(folder):
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    return [path for path in found if path.suffix not in FOR_PEOPLE and path.name != ".lock"]


def flip(path, bit):
    """Turn one bit, in the file itself."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def timeless(value):
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in SKIPPED}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def numbers(call, folder):
    """The results of commands that read the run, or None where one is refused in a sentence."""
    found = []
    for command in (
        ("evaluate", folder, "--windows", 3, "--candidates", 4, "--json"),
        ("evaluate", folder, "--json"),
        ("sample", folder, "--prefix", "The", "--num", 2, "--candidates", 8, "--json"),
    ):
        status, out, err = call(*command)
        assert status in (0, 2), err
        assert "Traceback" not in err
        found.append(timeless(json.loads(out)) if status == 0 else None)
    return found


def is_harmless(folder, path, before):
    """Whether a file is as good as before: metadata of a format, spaces of JSON, or no part of the run's numbers."""
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text()) == json.loads(before)
        except ValueError:
            return False
    return ".flat" in path.parts or path.name in ("begun.json",)


def check_flips(folder, seed, count):
    """Each of some flips is named by ``verify`` or is harmless."""
    chance, files, found = random.Random(seed), files_of(folder), 0
    sizes = [path.stat().st_size for path in files]
    for _ in range(count):
        path = chance.choices(files, [size**0.5 for size in sizes])[0]  # small files are not left out
        bit, before = chance.randrange(8 * path.stat().st_size), path.read_bytes()
        flip(path, bit)
        try:
            damaged = verify(folder)
            is_found = bool(damaged.damaged)
        except UserError:
            is_found = True
        assert is_found or is_harmless(folder, path, before), f"bit {bit} of {path.relative_to(folder)}"
        found += is_found
        flip(path, bit)
    assert not verify(folder).damaged
    return found


def test_turned_bits_are_found_by_verify(finished):
    assert check_flips(finished, 0, 150) > 120


@pytest.mark.faults
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_turned_bits(finished, thousand):
    check_flips(finished, 1 + thousand, 1000)


def check_numbers(call, finished, paths, seed, right):
    """A mutated run gives the same numbers or refuses."""
    chance, refused = random.Random(seed), 0
    for path in paths:
        bit, copy = chance.randrange(8 * path.stat().st_size), path.read_bytes()
        flip(path, bit)
        found = numbers(call, finished)
        for given, wanted in zip(found, right, strict=True):
            assert given is None or given == wanted, f"bit {bit} of {path.relative_to(finished)}: another number"
        refused += None in found
        path.write_bytes(copy)
    return refused


def test_no_turned_bit_gives_another_number(finished, call_once):
    """The oracle is the number, not only the status."""
    right = numbers(call_once, finished)
    assert None not in right
    named = ["test.windows.npy", "test.bin", "ngram.safetensors", "recipe.json", "base.json", "summary.json"]
    paths = [path for path in files_of(finished) if path.name in named and "baselines" not in path.parts]
    assert check_numbers(call_once, finished, paths, 1, right) >= 4


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
def test_no_turned_bit_in_any_file_gives_another_number(finished, call_once, seed):
    check_numbers(call_once, finished, files_of(finished), seed, numbers(call_once, finished))


# D5: windows out of range


@pytest.mark.parametrize(
    ("name", "value"), [("start", 2**40), ("start", -7), ("length", 10**9), ("length", 0), ("document", 10**6)]
)
def test_windows_out_of_range_are_refused(finished, call_once, name, value):
    """Also where somebody has removed the checksums: the ranges are looked at on every read."""
    path = finished / "corpus" / "test.windows.npy"
    copy, record = path.read_bytes(), (finished / "corpus" / "stage.json").read_bytes()
    places = np.load(path)
    places[name][::2] = value
    np.save(path, places)
    status, _, err = call_once("evaluate", finished, "--windows", 6, "--candidates", 4)
    assert status == 2
    assert "checksum" in err
    plain = {key: value for key, value in json.loads(record).items() if key not in ("files", "mark")}
    write_json(finished / "corpus" / "stage.json", plain)
    with pytest.raises(UserError, match="is damaged"):
        Corpus.open(finished / "corpus").windows("test")
    path.write_bytes(copy)
    (finished / "corpus" / "stage.json").write_bytes(record)
    assert places.dtype == RECORD
    assert len(Corpus.open(finished / "corpus").windows("test")) > 0


def test_features_carry_their_own_checksum(tmp_path):
    import torch

    path = tmp_path / "features" / "00000.safetensors"
    write_tensors(path, {"features": torch.arange(12.0).view(3, 4)})
    assert read_tensors(path)["features"].shape == (3, 4)
    data = path.read_bytes()
    for bit in range(8 * (len(data) - 48), 8 * len(data)):  # the numbers
        flip(path, bit)
        with pytest.raises(UserError, match="checksum"):
            read_tensors(path)
        flip(path, bit)


# D6: what verify says


def changed(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run", copy_function=os.link))


def replace(path, data):
    path.unlink()
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def test_verify_covers_the_recipe_and_files_that_no_stage_wrote(finished, call_once, tmp_path):
    folder = changed(finished, tmp_path)
    (folder / "base" / "evil.py").write_text("print('hello')")
    status, _, err = call_once("verify", folder)
    assert status == 2
    assert "evil.py was not written by a stage" in err
    (folder / "base" / "evil.py").unlink()
    assert call_once("verify", folder)[0] == 0
    recipe = json.loads((folder / "recipe.json").read_text())
    replace(folder / "recipe.json", json.dumps(recipe | {"seed": 99}))
    status, _, err = call_once("verify", folder)
    assert status == 2
    assert "recipe.json does not match" in err
    assert call_once("evaluate", folder)[0] == 2


@pytest.mark.parametrize("files", [{"/etc/hostname": "0" * 64}, ["x"], {"../../../../../etc/passwd": "0"}, {"": 3}])
def test_manifests_of_strangers_lead_nowhere(finished, call_once, tmp_path, monkeypatch, files):
    from freenergy.core import checksums
    from freenergy.core.files import fingerprint

    folder, seen = changed(finished, tmp_path), []
    record = {key: value for key, value in read_json(folder / "base" / "stage.json").items() if key != "mark"}
    record["files"] = files
    replace(folder / "base" / "stage.json", json.dumps(record | {"mark": fingerprint(record)}))
    hashed = checksums.file_hash
    monkeypatch.setattr(checksums, "file_hash", lambda path: seen.append(str(path)) or hashed(path))
    status, _, err = call_once("verify", folder)
    assert status == 2
    assert "Traceback" not in err
    assert not any("etc" in Path(path).parts for path in seen)


def test_links_out_of_a_run_are_not_followed(finished, call_once, tmp_path):
    folder, outside = changed(finished, tmp_path), tmp_path / "outside"
    path = next((folder / "base").rglob("ngram.safetensors"))
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    assert call_once("verify", folder)[0] == 2
    with pytest.raises(UserError, match="leads elsewhere"):
        intact(path)


def test_a_signature_tells_who_vouches(finished, call_once, tmp_path):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen here")
    pytest.importorskip("cryptography")
    folder = changed(finished, tmp_path)
    for name in ("mine", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    assert "unchanged since sealed" in call_once("verify", folder)[1]
    assert "is not signed" in call_once("verify", folder, "--trust", tmp_path / "mine.pub")[2]
    assert call_once("verify", folder, "--sign", tmp_path / "mine")[0] == 0
    status, out, _ = call_once("verify", folder, "--trust", tmp_path / "mine.pub")
    assert status == 0
    assert "unchanged and by this key" in out
    assert "not by the key" in call_once("verify", folder, "--trust", tmp_path / "other.pub")[2]
    # an energy that was changed and sealed again: its checksums match, its signature does not
    record = read_json(folder / "energy" / "stage.json")
    from freenergy.core.files import fingerprint

    again = {key: value for key, value in record.items() if key != "mark"} | {"seconds": 1.0}
    replace(folder / "energy" / "stage.json", json.dumps(again | {"mark": fingerprint(again)}))
    assert digest_matches(read_json(folder / "energy" / "stage.json"))
    assert call_once("verify", folder)[0] == 0
    status, _, err = call_once("verify", folder, "--trust", tmp_path / "mine.pub")
    assert status == 2
    assert "has changed since it was signed" in err
    assert "is not an Ed25519" in call_once("verify", folder, "--sign", tmp_path / "mine.pub")[2]
