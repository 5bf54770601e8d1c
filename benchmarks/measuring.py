"""How everything here is measured: ways that do the same, side by side, and what is said of them.

Machines are noisy and shared, so a way's seconds say little. In every round each way runs once, one after another, in
an order that turns round from one round to the next; a ratio is taken within a round, between neighbours in time:

    ratio of a way = median over rounds of (seconds of the way compared against) / (its own seconds),

with the smallest and the largest beside it: more is faster, 1 is as fast. ``share`` is the part of the speed of a large
float32 product, measured in the same rounds, that all products of the work reach.

A benchmark is a file with ``measure(rounds, quick) -> list[dict]``. A row has "case" and "way", and of "ratio",
"smallest", "largest", "share", "tokens_per_second", "seconds", "megabytes", "error" what was looked at. What we promise
stands in the row: "needs" (ratio), "needs_share", "at_most_seconds", "at_most_megabytes". A row of a curve has "curve"
(what is varied), "at" (its value) and "milliseconds" (cost of one candidate).
"""

import argparse
import ctypes
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from freenergy.core.files import write_json

RESULTS = Path(__file__).parent / "results"
Row = dict[str, object]
Case = Callable[[int], list[Row]]  # of a number of rounds


def interleaved(
    ways: Mapping[str, Callable[[], object]], rounds: int, warm: Mapping[str, Callable[[], object]] | None = None
) -> dict[str, list[float]]:
    """Seconds of every way, one for each round.

    Every way is called once before; ``warm`` are smaller calls to make instead, where a whole one is dear.
    """
    for way in (warm or ways).values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        for name in list(ways) if i % 2 == 0 else reversed(ways):
            times[name].append(seconds(ways[name]))
    return times


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def gemm_peak() -> float:
    """Operations a second of large float32 products, held for a second: no work lives on a processor's first burst."""
    a, b, times = torch.randn(1536, 1536), torch.randn(1536, 1536), list[float]()
    while sum(times) < 1:
        times.append(seconds(lambda: torch.mm(a, b)))
    return 2 * 1536**3 / statistics.median(times)


def with_peak(
    ways: Mapping[str, Callable[[], object]], rounds: int, warm: Mapping[str, Callable[[], object]] | None = None
) -> tuple[dict[str, list[float]], list[float]]:
    """``interleaved``, and the speed of a large product in each round."""
    peaks: list[float] = []
    looking = {"peak": lambda: peaks.append(gemm_peak())}
    times = interleaved(looking | dict(ways), rounds, looking | dict(warm) if warm else None)
    del times["peak"]
    return times, peaks[1:]  # the first was the warm call


def compared(times: Mapping[str, Sequence[float]], against: str) -> dict[str, dict[str, float]]:
    """How many times as fast as one of them every way is: median over rounds, smallest, largest."""
    found = {}
    for name, own in times.items():
        ratios = [theirs / mine for theirs, mine in zip(times[against], own, strict=True)]
        found[name] = {"ratio": statistics.median(ratios), "smallest": min(ratios), "largest": max(ratios)}
    return found


def share(operations: float, times: Sequence[float], peaks: Sequence[float]) -> float:
    """Of the speed of a large product in the same round: median over rounds."""
    return statistics.median(operations / own / peak for own, peak in zip(times, peaks, strict=True))


def growth(work: Callable[[], object]) -> float:
    """Megabytes by which memory in use rises at most during the call, beside what was resident before.

    Call it in a process that does nothing else: ``peak_memory``.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before and kept would hide as much of the growth
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _peak()
    work()
    return _peak() - before


def peak_memory(*command: str | Path) -> float:
    """``growth`` as a Python program tells it: peak_memory(__file__, "--peak", "ours", "1024")."""
    return told(*command)[0]


def told(*command: str | Path) -> list[float]:
    """The numbers in the last line of what a Python program prints, in a process of its own."""
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr}")
    return [float(word) for word in done.stdout.strip().splitlines()[-1].split()]


def main(
    measure: Callable[[int, bool], list[Row]],
    name: str,
    cases: Callable[[bool], Mapping[str, Case]] | None = None,
    peak: Callable[..., Sequence[float]] | None = None,
) -> None:
    """The command of a benchmark.

    ``cases(quick)`` are the parts of ``measure`` by name: each is written as soon as it is done, and ``--continue``
    leaves out those that are there. ``peak``, of the words after ``--peak``, gives the numbers that a process of its
    own tells to ``peak_memory`` or ``told``.
    """
    arguments = _arguments(measure, name)
    if arguments.peak:
        assert peak is not None
        print(*peak(*arguments.peak))
        return
    parts = cases(arguments.quick) if cases else {name: lambda rounds: measure(rounds, arguments.quick)}
    result = {"finished": [], "rows": []}
    if arguments.resume and arguments.out.is_file():
        result = json.loads(arguments.out.read_text())
    result |= {"name": name, "rounds": arguments.rounds, "quick": arguments.quick, "threads": torch.get_num_threads()}
    result |= {"processor": processor()}
    for part, case in parts.items():
        if part in result["finished"] or (arguments.only and arguments.only not in part):
            continue
        rows = case(arguments.rounds)
        for row in rows:
            print(said(row), flush=True)
        result["finished"].append(part)
        result["rows"] += rows
        write_json(arguments.out, result)


def processor() -> str:
    """Its name, and how wide its vectors are."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    wide = [flag for flag in ("avx512f", "avx2") if flag in fields.get("flags", "").split()]
    return ", ".join([fields.get("model name", platform.machine()), *wide[:1]])


def _arguments(measure: Callable[[int, bool], list[Row]], name: str) -> argparse.Namespace:
    document = sys.modules[measure.__module__].__doc__ or name
    parser = argparse.ArgumentParser(description=document.strip().splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="at most; dear cases take fewer (default 3)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--continue", dest="resume", action="store_true", help="leave out the cases that --out holds")
    parser.add_argument("--only", help="the cases whose name holds this")
    parser.add_argument("--peak", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def said(row: Mapping[str, object]) -> str:
    """One line for a row."""
    found = []
    if "ratio" in row:
        found.append(f"{row['ratio']:.2f}× ({row['smallest']:.2f} – {row['largest']:.2f})")
    if "tokens_per_second" in row:
        found.append(f"{row['tokens_per_second']:.0f} tokens/s")
    if "share" in row:
        found.append(f"{row['share']:.0%} of the GEMM peak")
    found += [f"{row[key]:.3g} {key}" for key in ("seconds", "milliseconds", "megabytes", "error") if key in row]
    return f"{row['case']}, {row['way']}: {', '.join(found)}"


def _peak() -> float:
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux: the peak of the whole life
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
