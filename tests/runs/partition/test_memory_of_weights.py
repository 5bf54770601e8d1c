"""A million weights are summed in kilobytes."""

import subprocess
import sys
from pathlib import Path

import pytest

GROWTH = """
import re, torch
from pathlib import Path
from freenergy.partition import weights

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def growth(kept):
    weights.KEPT = kept
    sums, draws = weights.WeightSums.empty(1), torch.Generator().manual_seed(0)
    sums.add(torch.zeros(1, 0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here
    before = peak()
    for _ in range(25):
        sums.add(torch.randn(1, 40_000, generator=draws, dtype=torch.float64))
    assert sums.n == 1_000_000 and abs(sums.log_mean().item() - 0.5) < 0.02
    return peak() - before

torch.set_num_threads(1)
growth(5000)  # warm
print(growth(5000), growth(10**7), peak())
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
def test_a_million_draws_stream():
    """Kilobytes at the peak beyond what was there before; the mutant keeps every draw, 8 MB and its sorting."""
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    growth, mutant, whole = [int(v) for v in done.stdout.split()]
    assert growth < 6_000
    assert mutant > 16_000
    assert whole < 1_000_000
