"""Commands in processes of their own, which can be killed, stopped and starved without harm to the tests.

A child is a fork: it begins with everything imported, so that hundreds of them cost little.
"""

import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from freenergy import cli

PATIENCE = 240  # seconds: much longer than any of these commands takes


@dataclass
class Child:
    """A command that is running, or has ended."""

    pid: int
    log: Path
    status: int | None = None

    def ended(self):
        """Whether it has ended; then ``status`` is what a shell would say, or minus the signal's number."""
        if self.status is None:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(code) if pid else None
        return self.status is not None

    def succeed(self):
        """Wait for its end, which must be a good one; its stdout."""
        status, out, err = self.wait()
        assert status == 0, err[-3000:]
        return out

    def kill_when(self, condition):
        """Kill -9 as soon as the condition holds; the child must not end before."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert not self.ended(), self.words()[1][-500:]
            assert time.monotonic() < deadline, "the moment to kill at never came"
            time.sleep(0.002)
        self.kill()

    def wait(self):
        """Status, stdout, stderr; a command that hangs fails the test."""
        deadline = time.monotonic() + PATIENCE
        while not self.ended():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it hangs: {self.words()}")
            time.sleep(0.005)
        return self.status, *self.words()

    def words(self):
        return tuple(self.log.with_suffix(f".{name}").read_text(errors="replace") for name in ("out", "err"))

    def send(self, number):
        """A signal, unless it has ended; whether it was sent."""
        if self.ended():
            return False
        os.kill(self.pid, number)
        return True

    def kill(self):
        """Kill -9, and wait until it is gone; whether it was still running."""
        was_running = self.send(signal.SIGKILL)
        while not self.ended():
            time.sleep(0.001)
        return was_running


def fork(act, log):
    """Call ``act`` in a child; what it returns is the child's status, 0 for None."""
    pid = os.fork()
    if pid:
        return Child(pid, log)
    status = 1
    try:
        os.setsid()
        _redirect(log)
        warnings.simplefilter("ignore")  # what a user would not see either
        status = act() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start(arguments, log, before=None):
    """Run ``freenergy ARGUMENTS`` in a child, after ``before()`` there."""

    def act():
        sys.argv = ["freenergy", *map(str, arguments)]
        if before is not None:
            before()
        return status_of(cli.main)

    return fork(act, log)


def _redirect(log):
    for name, number in (("out", 1), ("err", 2)):
        handle = os.open(log.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        setattr(sys, f"std{name}", os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))


def status_of(main):
    """What a shell would say of it."""
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


def sentence(err):
    """The one sentence that a refused command ends with."""
    assert "Traceback" not in err, err[-3000:]
    last = err.strip().splitlines()[-1]
    assert last.startswith("freenergy: "), err[-500:]
    return last
