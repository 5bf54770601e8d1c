"""Places where nothing can be written, and two runs in one place."""

import os
import signal
import time

from children import sentence


def refused(result):
    status, out, err = result
    assert status == 2, err
    assert out == ""
    return sentence(err)


def test_places_that_cannot_be_written(begin, recipes, whole, tmp_path):
    whole("counted")
    (tmp_path / "file").write_text("mine")
    for place in ("/proc/run", "/proc/self/run", tmp_path / "file", tmp_path / "file" / "run", "/dev/null/run"):
        words = refused(begin("run", recipes["counted"], "--out", place).wait())
        assert "cannot write to" in words
        assert "choose another --out" in words
    assert (tmp_path / "file").read_text() == "mine"


def test_a_name_that_no_disk_takes(begin, whole):
    whole("counted")
    assert "name too long" in refused(begin("sample", "a" * 5000, "--num", 1).wait())


def test_the_second_of_two_runs_refuses_and_the_first_is_not_disturbed(begin, recipes, whole, ends_as, tmp_path):
    out = tmp_path / "out"
    whole("counted")
    first = begin("run", recipes["counted"], "--out", out)
    while not (out / "recipe.json").exists():
        assert not first.ended(), first.words()
        time.sleep(0.001)
    first.send(signal.SIGSTOP)
    try:
        for command in (("run", recipes["counted"], "--out", out), ("run", recipes["trained"], "--out", out)):
            assert "another process is running in" in refused(begin(*command).wait())
    finally:
        first.send(signal.SIGCONT)
    assert first.wait()[0] == 0
    ends_as(out, "counted")


def test_a_lock_that_a_killed_run_left_blocks_nobody(begin, recipes, whole, tmp_path):
    whole("counted")
    first = begin("run", recipes["counted"], "--out", tmp_path, "--stage", "corpus")
    while not (tmp_path / ".lock").exists() and not first.ended():
        time.sleep(0.001)
    assert first.kill()
    assert (tmp_path / ".lock").exists()
    status, _, err = begin("run", recipes["counted"], "--out", tmp_path, "--stage", "corpus").wait()
    assert status == 0, err


def read_only(folder):
    """In the child: its own view of the disk, where the folder cannot be written."""
    from .mounting import mount, own_mounts

    own_mounts()
    mount("--bind", folder, folder)
    mount("-o", "remount,bind,ro", folder)


def test_a_read_only_folder(begin, recipes, copy, can_mount):
    """A finished run can be read there, and nothing else."""
    folder = copy("counted")
    words = refused(begin("run", recipes["counted"], "--out", folder, before=lambda: read_only(folder)).wait())
    assert "cannot write to" in words
    sample = ("sample", folder, "--num", 1, "--candidates", 2)
    assert begin(*sample, before=lambda: read_only(folder)).wait()[0] == 0
    other = ("evaluate", folder, "--windows", 2, "--candidates", 4)
    assert "cannot write to" in refused(begin(*other, before=lambda: read_only(folder)).wait())
    assert "Read-only file system" in refused(begin("report", folder, before=lambda: read_only(folder)).wait())
    assert os.access(folder, os.W_OK)
