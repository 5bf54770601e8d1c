"""C++ sources of the package, compiled at first use by the machine's own compiler and for its own processor.

    library = compiled_library(folder, "fused", [source, header], FLAGS)      # the first source is the one to compile

The result is kept in ``folder`` under a name made of sources, compiler, flags and processor. It is plain C on pointers,
so no version of torch matters. Where there is no compiler, or it fails, the answer is None.
"""

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from freenergy.core.files import fingerprint
from freenergy.core.trusted_library import loaded_library

# no -ffast-math: linked into a library it would change the rounding of the whole process
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c++17", "-fPIC", "-shared")


def compiled_library(
    folder: Path, name: str, sources: Sequence[Path], flags: Sequence[str] = FLAGS, functions: Iterable[str] = ()
) -> ctypes.CDLL | None:
    """Return the library with some functions, compiled now or earlier; None where there is no compiler or it fails."""
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        key = fingerprint([*(source.read_text() for source in sources), version, list(flags), processor()])
        path = folder / f"{name}-{key}.so"
        command = [compiler, *flags, str(sources[0]), "-o"]
        return loaded_library(
            path, functions, lambda aside: subprocess.run([*command, str(aside)], capture_output=True, check=True)
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """Return what -march=native depends on: a cache may be shared by different machines."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(names)}))
