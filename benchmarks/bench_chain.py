"""Linear chains: log Z with its gradient, and best paths, next to pytorch-crf and CRFsuite.

CPU time on one thread. In every round each way does the same work several times and the fastest counts; ratios are
taken within a round. pytorch-crf returns log Z minus the score of given tags, so its time includes that score; "ours,
loss" is that very number, by the drop-in ``freenergy.structured.compat.CRF``, and the others are log Z alone. CRFsuite
is one evaluation of its objective, from C in float64, with one attribute per position: the difference of two runs of
L-BFGS, divided by the number of evaluations between them.
"""

import re
import tempfile
import time
from pathlib import Path

import measuring
import pycrfsuite
import torch
import torchcrf

from freenergy.structured import LinearChain
from freenergy.structured.compat import CRF

SIZES = {  # B, T, K and what is promised: compiled, plain torch, best paths
    (32, 64, 10): (25, 4, 60),
    (32, 64, 50): (25, 8, 25),
    (8, 512, 50): (50, 8, 35),
    (128, 32, 20): (15, 6, 40),
}
REPEATS = {"pytorch-crf": 5, "ours, compiled": 40, "ours, plain torch": 15, "ours, loss": 40}


def cpu_seconds(work, repeats):
    """The fastest of several calls."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def batch(B, T, K):
    torch.manual_seed(0)
    x = torch.randn(B, T, K, requires_grad=True)
    theirs, ours = torchcrf.CRF(K, batch_first=True), CRF(K, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    return x, torch.randint(K, (B, T)), theirs, ours


def sums(size):
    """log Z and the gradients of emissions and parameters."""
    x, y, theirs, ours = batch(*size)
    mask = torch.ones(size[:2], dtype=torch.bool)

    def log_z(compiled):
        start, end = ours.start_transitions, ours.end_transitions
        chain = LinearChain(x, ours.transitions, start=start, end=end, compiled=compiled)
        chain.log_partition().sum().backward()

    return {
        "pytorch-crf": lambda: theirs(x, y, mask=mask).backward(),
        "ours, compiled": lambda: log_z(True),
        "ours, plain torch": lambda: log_z(False),
        "ours, loss": lambda: ours(x, y).backward(),
    }


def paths(size):
    x, _, theirs, ours = batch(*size)
    x, mask = x.detach(), torch.ones(size[:2], dtype=torch.bool)
    return {"pytorch-crf": lambda: theirs.decode(x, mask=mask), "ours, compiled": lambda: ours.best(x)}


class Counting(pycrfsuite.Trainer):
    """Counts the evaluations of the objective that CRFsuite reports."""

    def __init__(self):
        super().__init__(verbose=False)
        self.evaluations = 0

    def message(self, message):
        """Read the number of evaluations off one line of the log."""
        self.evaluations += sum(map(int, re.findall(r"Line search trials: (\d+)", message)))


def crfsuite_seconds(size, folder):
    """CPU seconds of one evaluation of B sequences."""
    B, T = size[:2]
    _, y, _, _ = batch(*size)
    words = torch.randint(50, (B, T), generator=torch.Generator().manual_seed(1))

    def run(iterations):
        trainer = Counting()
        for b in range(B):
            trainer.append([[f"w{w}"] for w in words[b].tolist()], [str(k) for k in y[b].tolist()])
        trainer.select("lbfgs")
        trainer.set_params({"max_iterations": iterations, "feature.possible_transitions": 1, "epsilon": 0, "delta": 0})
        started = time.process_time()
        trainer.train(str(folder / "model.crfsuite"))
        return time.process_time() - started, trainer.evaluations

    (short, few), (long, many) = run(2), run(8)  # few, since a line search that fails is not counted
    return (long - short) / (many - few)


def sizes_case(size, rounds):
    needs = dict(zip(("ours, compiled", "ours, plain torch", "best"), SIZES[size], strict=True))
    rows = []
    for what, ways in (("log Z + gradient", sums(size)), ("best path", paths(size))):
        times = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, way in ways.items():
                times[name].append(cpu_seconds(way, REPEATS[name]))
        times = {name: own[1:] for name, own in times.items()}  # the first round has warmed
        for name, found in measuring.compared(times, "pytorch-crf").items():
            needed = needs.get("best" if what == "best path" and name.startswith("ours") else name)
            row = {"case": f"{what}, (B, T, K) = {size}", "way": name, "seconds": min(times[name])} | found
            rows.append(row if needed is None else row | {"needs": needed})
    return rows


def crfsuite_case(size, rounds):
    """CRFsuite's time divided by ours; promised: ours is faster."""
    ways, theirs, ours = sums(size), [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            theirs.append(crfsuite_seconds(size, Path(folder)))
            ours.append(cpu_seconds(ways["ours, compiled"], 40))
    found = measuring.compared({"CRFsuite": theirs, "ours, compiled": ours}, "CRFsuite")["ours, compiled"]
    case = f"one evaluation next to CRFsuite, (B, T, K) = {size}"
    return [{"case": case, "way": "ours, compiled", "seconds": min(ours), "needs": 1} | found]


def memory_case(size, rounds):
    rows, emissions = [], size[0] * size[1] * size[2] * 4 / 2**20
    for way, promised in (("ours, compiled", True), ("ours, plain torch", False), ("pytorch-crf", False)):
        found = measuring.peak_memory(__file__, "--peak", way, *map(str, size))
        row = {"case": f"peak memory, (B, T, K) = {size}", "way": way, "megabytes": found}
        rows.append(row | {"at_most_megabytes": 6 * emissions} if promised else row)
    return rows


def peak(way, *size):
    """Megabytes of one forward and backward pass in this process, which has done smaller ones before."""
    torch.set_num_threads(1)
    sums((2, 4, int(size[2])))[way]()
    work = sums(tuple(map(int, size)))[way]
    return [measuring.growth(work)]


def cases(quick):
    torch.set_num_threads(1)
    found = {}
    for size in list(SIZES)[: 1 if quick else None]:
        found[f"sums {size}"] = lambda rounds, size=size: sizes_case(size, rounds)
        found[f"crfsuite {size}"] = lambda rounds, size=size: crfsuite_case(size, rounds)
    for size in [] if quick else [(32, 64, 50), (8, 512, 50)]:
        found[f"memory {size}"] = lambda rounds, size=size: memory_case(size, rounds)
    return found


def measure(rounds, quick):
    return [row for case in cases(quick).values() for row in case(rounds)]


if __name__ == "__main__":
    measuring.main(measure, "chain", cases, peak)
