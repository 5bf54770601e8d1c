"""No room on disk, at every write of a run: one sentence, nothing half-written; once there is room, the same bits."""

import errno
import os
from pathlib import Path

import pytest

from children import sentence

from .mounting import mount, own_mounts

NO_ROOM = "no space left to write"


def fail_at_new(folder, seen, is_chosen):
    """In the child: the first flush or rename below a folder that is not among ``seen`` fails; its name is kept there.

    Everything that a run writes comes to its place by these two.
    """
    known = set(seen.read_text().splitlines())

    def guard(kind, path):
        parts = [part for part in Path(path).resolve().relative_to(folder).parts if part]
        name = " ".join([kind, *(".".join(p for p in part.split(".") if not p.isdigit()) for part in parts)])
        if name not in known and is_chosen(len(known)):
            with seen.open("a") as file:
                file.write(f"{name}\n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if name not in known:
            with seen.open("a") as file:
                file.write(f"{name}\n")
            known.add(name)

    replace, fsync = os.replace, os.fsync

    def guarded_fsync(handle):
        place = Path(f"/proc/self/fd/{handle}").resolve()
        if place.is_relative_to(folder):
            guard("flush", place)
        fsync(handle)

    def guarded_replace(source, target, **more):
        if Path(target).absolute().is_relative_to(folder):
            guard("rename", target)
        replace(source, target, **more)

    os.fsync, os.replace = guarded_fsync, guarded_replace


def walk(begin, recipe, folder, seen, is_chosen):
    """Run it again and again, until no chosen write is left to fail; how many have failed."""
    failures = 0
    seen.write_text("")
    while True:
        command = ("run", recipe, "--out", folder)
        status, _, err = begin(*command, before=lambda: fail_at_new(folder, seen, is_chosen)).wait()
        if status == 0:
            return failures
        assert status == 2, err[-3000:]
        assert NO_ROOM in sentence(err)
        assert not list(folder.rglob("*.part"))
        failures += 1


def test_some_writes_fail(begin, recipes, whole, ends_as, tmp_path):
    whole("counted")
    failures = walk(begin, recipes["counted"], tmp_path / "out", tmp_path / "seen", lambda number: number % 40 == 5)
    assert failures >= 3
    ends_as(tmp_path / "out", "counted")


@pytest.mark.faults
@pytest.mark.parametrize("name", ["counted", "trained"])
def test_every_write_fails_once(begin, recipes, whole, ends_as, tmp_path, name):
    """Each is tried again once the disk has room: it fails the first time, and the next one the time after."""
    whole(name)
    failures = walk(begin, recipes[name], tmp_path / "out", tmp_path / "seen", lambda number: True)
    assert failures > 100
    ends_as(tmp_path / "out", name)


def full_disk(folder, room):
    """In the child: a file system of its own at ``folder``, with so many bytes of room."""
    own_mounts()
    mount("-t", "tmpfs", "-o", f"size={room // 1024}k", "tmpfs", folder)


@pytest.mark.parametrize("room", [8 << 10, pytest.param(200 << 10, marks=pytest.mark.faults), 600 << 10])
def test_a_small_file_system(begin, recipes, whole, can_mount, tmp_path, room):
    """The system itself refuses, at whatever write comes then."""
    whole("counted")
    (tmp_path / "disk").mkdir()
    command = ("run", recipes["counted"], "--out", tmp_path / "disk" / "run")
    status, _, err = begin(*command, before=lambda: full_disk(tmp_path / "disk", room)).wait()
    assert status == 2, err[-3000:]
    assert NO_ROOM in sentence(err)
