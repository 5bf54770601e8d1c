"""One file of a finished run is torn or one bit of it turned: noticed in a sentence, made anew, or without any effect.

A turned bit in weights, tokens or numbers may go unseen by commands that read them, but not by ``freenergy verify``.
A cached copy that is made again when it is damaged stands in ``UNSEALED``.
"""

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from children import sentence

DRAWN = (".svg", ".png", ".html", ".md")  # for people: written anew with every report, or never read
UNSEALED = ("recipe.json", "features", "evaluations")  # an edited recipe is a recipe; folders beside the stages


def tear(path, how):
    """Cut in half, emptied, or with one bit turned in the middle; links to the file keep the old bytes."""
    data = bytearray(path.read_bytes())
    if how == "bit":
        data[len(data) // 2] ^= 4
    path.unlink()
    path.write_bytes({"half": data[: len(data) // 2], "empty": b"", "bit": data}[how])


def artefacts(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in DRAWN]
    return [str(path.relative_to(folder)) for path in files if path.name not in (".lock", "metrics.jsonl")]


def answers(begin, recipe, folder):
    """What some commands say, without times: status and result of each."""
    found = []
    for command in (
        ("run", recipe, "--out", folder, "--stage", "evaluation", "--json"),
        ("evaluate", folder, "--json"),
        ("evaluate", folder, "--windows", 2, "--candidates", 4, "--baselines", "--json"),
        ("sample", folder, "--prefix", "The", "--num", 2, "--candidates", 8, "--json"),
    ):
        status, out, err = begin(*command).wait()
        assert status in (0, 2), f"{command}: {err[-3000:]}"
        assert "Traceback" not in err
        if status == 2:
            sentence(err)
        found.append((status, _timeless(json.loads(out)) if status == 0 else None))
    return found


def _timeless(value):
    if isinstance(value, dict):
        skipped = ("seconds", "cpu_seconds", "cost", "cached", "run", "seconds_of_steps")
        return {key: _timeless(each) for key, each in value.items() if key not in skipped}
    return [_timeless(each) for each in value] if isinstance(value, list) else value


def check(begin, recipe, whole, cases, tmp_path):
    """Never a traceback; and a right answer, a refusal, or a turned bit that verify names."""
    right = answers(begin, recipe, whole)
    assert [status for status, _ in right] == [0, 0, 0, 0]
    assert begin("verify", whole).wait()[0] == 0
    for number, (name, how) in enumerate(cases):
        folder = Path(shutil.copytree(whole, tmp_path / str(number), copy_function=os.link))
        tear(folder / name, how)
        status, _, err = begin("verify", folder).wait()
        assert status == 2 or Path(name).parts[0] in UNSEALED or is_harmless(whole / name, folder / name), name
        assert status == 0 or str(folder / name) in sentence(err)
        for given, expected in zip(answers(begin, recipe, folder), right, strict=True):
            if given[0] == 0 and given != expected:
                assert how == "bit", f"{name}, {how}: wrong numbers in silence"
                assert status == 2 or Path(name).parts[0] in UNSEALED, f"{name}, {how}: wrong numbers in silence"
        shutil.rmtree(folder)


def is_harmless(kept, torn):
    """Nothing to tear, or a digit of a record beyond what floats tell apart."""
    if kept.suffix != ".json" or not torn.stat().st_size:
        return kept.read_bytes() == torn.read_bytes()
    with suppress(ValueError):
        return json.loads(kept.read_text()) == json.loads(torn.read_text())
    return False


def test_a_few_torn_files(begin, recipes, whole, tmp_path):
    cases = [(name, how) for name in artefacts(whole("counted")) for how in ("half", "empty", "bit")]
    check(begin, recipes["counted"], whole("counted"), random.Random(2).sample(cases, 5), tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("how", ["half", "empty", "bit"])
@pytest.mark.parametrize("name", ["counted", "trained"])
def test_every_file_torn(begin, recipes, whole, tmp_path, name, how):
    check(begin, recipes[name], whole(name), [(file, how) for file in artefacts(whole(name))], tmp_path)
