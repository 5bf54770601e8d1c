"""Texts from a program, asked line by line.

    stdin    {"prefix": "…", "seed": 17, "length": 40}            one line per text
    stdout   {"text": "…"}   or   {"text": "…", "ended": false}   one line per line read, flushed, in the same order

The program is started at the first request and stays: what it loads, it loads once. It ends when its input ends.
"""

import json
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, final

from freenergy.core.errors import UserError
from freenergy.lm.sources.protocol import DrawnText, TextRequest
from freenergy.lm.sources.settings import CommandSource
from freenergy.lm.sources.trust import check_trusted

_PATIENCE_SECONDS = 2.0  # for a program to end by itself
_EXAMPLE = '{"text": "…"}'


@final
class FromCommand:
    """Asks the program that the settings name."""

    def __init__(self, settings: CommandSource) -> None:
        self.settings = settings
        self.shown = " ".join(settings.command)
        self._lock = threading.Lock()
        self._running: _Program | None = None

    def draw(self, requests: Sequence[TextRequest]) -> list[DrawnText]:
        """Return one text per request."""
        check_trusted(f"the command {self.shown}")
        lines = [
            json.dumps({"prefix": request.prefix, "seed": request.seed, "length": request.length})
            for request in requests
        ]
        with self._lock:
            program = self._started()
            writer = threading.Thread(target=program.write, args=(lines,), daemon=True)  # answers may fill the pipe
            writer.start()
            try:
                return [self._answer(program) for _ in lines]
            except UserError:
                self._running = None  # what it still answers belongs to no request
                program.end()
                raise

    def part(self, split: str) -> "FromCommand":
        """Return itself: it writes as many texts as it is asked for."""
        return self

    def _started(self) -> "_Program":
        if self._running is None:
            self._running = _Program(self.settings, self.shown)
            weakref.finalize(self, self._running.end)
        return self._running

    def _answer(self, program: "_Program") -> DrawnText:
        line = program.read()
        try:
            answer: Any = json.loads(line)
            text, has_ended = answer["text"], answer.get("ended", True)
            if not isinstance(text, str) or not isinstance(has_ended, bool):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"the command {self.shown} answered {line[:80].rstrip()!r}: let it print one line such as {_EXAMPLE} "
                "per line that it reads, and nothing else"
            ) from None
        return DrawnText(text, has_ended)


@final
class _Program:
    """A process, the lines that it prints, and the end of what it complained of."""

    def __init__(self, settings: CommandSource, shown: str) -> None:
        self.settings, self.shown = settings, shown
        program, *arguments = settings.command
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 # open as long as the process
        try:
            self._process = subprocess.Popen(
                [sys.executable if program == "python" else program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            self._errors.close()
            raise UserError(f"the command {shown} cannot be started ({error}): correct base.source.command") from error
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=_pump, args=(self._process, self._lines), daemon=True)
        self._reader.start()

    def write(self, lines: Sequence[str]) -> None:
        """Send lines; a program that has ended is noticed by who reads."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write("".join(f"{line}\n" for line in lines))
            self._process.stdin.flush()

    def read(self) -> str:
        """Wait for the next line."""
        try:
            line = self._lines.get(timeout=self.settings.timeout_seconds)
        except queue.Empty:
            raise UserError(
                f"the command {self.shown} did not answer within {self.settings.timeout_seconds:g} seconds: let it "
                "flush its output after every line, or raise base.source.timeout_seconds"
            ) from None
        if line is None:
            raise UserError(
                f"the command {self.shown} ended {self.end()} before it had answered every line: run it by hand and "
                'give it a line such as {"prefix": "", "seed": 1, "length": 40}'
            )
        return line

    def end(self) -> str:
        """Close its input, stop it if that is not enough, and return its code and the last line of its complaints."""
        if self._errors.closed:
            return "before"
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        with self._errors:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"with code {self._process.returncode} ({lines[-1][:160] if lines else 'it said nothing'})"


def _pump(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    """Move lines from a process to a queue, so that a reader can give up waiting; None is the end."""
    assert process.stdout is not None
    with suppress(OSError, ValueError), process.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
