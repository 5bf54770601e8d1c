"""Memory of a run's stages at 1, 4 and 16 times a corpus, all of whose windows get negatives.

    python benchmarks/memory_of_stages.py [--sizes 1 4 16] [--documents 40] [--draws 100 10000] [--out FILE.json]

Every stage runs in a process of its own. What is told is the peak of its anonymous memory (RssAnon, looked at every two
milliseconds) less what the process held once the library was imported: pages of mapped files are the operating
system's cache, which it takes back when memory is short, and no memory that a larger corpus needs. Text is drawn from
a chain of made-up words, so that more of it has no new words. A line each for corpora, then for draws a window in
evaluation, at the smallest corpus.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from freenergy.core.files import write_json

STAGES = ("corpus", "base", "negatives", "energy", "candidates", "evaluation")
RECIPE = """
name = "memory"
[corpus]
source = "{source}"
prefix = 16
continuation = 16
validation_share = 0.1
test_share = 0.1
[tokenizer]
vocab_size = 400
[base]
kind = "ngram"
order = 2
[negatives]
per_prefix = 8
windows = 0
validation_windows = 64
validation_per_prefix = 16
{energy}
[evaluation]
windows = 64
certified_windows = 8
candidates = {candidates}
position_windows = 0
samples = 2
"""
LINEAR = '[energy]\nkind = "ngram"\norder = 2\n'
NETWORK = (
    '[energy]\nkind = "bit"\nstart = "scratch"\npreset = "tiny"\n'
    "[training.masked]\nsteps = 4\n[training.optimisation]\nsteps = 40\nvalidate_every = 20\n"
)
CHILD = """
import sys
sys.path.insert(0, {here!r})
import memory_of_stages
memory_of_stages.child({recipe!r}, {out!r}, {stage!r})
"""


def text(path, documents, words=300, length=600):
    """One JSON line a document."""
    rng = np.random.default_rng(0)
    spelled = ["".join(rng.choice(list("abcdefghijklmnop"), rng.integers(2, 7))) for _ in range(words)]
    nexts = rng.integers(words, size=(words, 6))  # each word has six that follow it
    with path.open("w") as file:
        for _ in range(documents):
            at, found = int(rng.integers(words)), []
            for choice in rng.integers(6, size=length):
                found.append(spelled[at])
                at = int(nexts[at, choice])
            file.write(json.dumps({"text": " ".join(found)}) + "\n")


def anonymous():
    """Megabytes now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def child(recipe, out, stage):
    """Do the run up to a stage, of which only that one is left, and print the megabytes that it took at most."""
    import freenergy.recipes.stages.energy
    import freenergy.training.fitting  # noqa: F401
    from freenergy import load_recipe, run

    recipe, before, seen, is_over = load_recipe(recipe), anonymous(), [], threading.Event()

    def watch():
        while not is_over.wait(0.002):
            seen.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in run(recipe, out, stage=stage):
        pass
    is_over.set()
    watcher.join()
    print(max([*seen, anonymous()]) - before)


def peaks(folder, source, energy, candidates, only=STAGES):
    """Megabytes of each stage."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(source=source, energy=energy, candidates=candidates))
    found = {}
    for stage in STAGES:
        code = CHILD.format(here=str(Path(__file__).parent), recipe=str(recipe), out=str(folder / "run"), stage=stage)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{stage} failed: {done.stderr[-800:]}")
        found[stage] = float(done.stdout.split()[-1])
        if stage == only[-1]:
            break
    return {stage: found[stage] for stage in only}


def windows_of(folder):
    """How many windows the training text has."""
    report = json.loads((folder / "run" / "corpus" / "corpus.json").read_text())
    return report["splits"]["train"]["windows"]


def measured(options, folder):
    rows = []
    for size in options.sizes:
        source = folder / f"text-{size}.jsonl"
        text(source, options.documents * size)
        linear = peaks(folder / f"linear-{size}", source, LINEAR, 16)
        network = peaks(folder / f"network-{size}", source, NETWORK, 16, STAGES[:4])["energy"]
        row = {"times": size, "windows": windows_of(folder / f"linear-{size}"), **linear, "energy (network)": network}
        rows.append(row)
        show(row)
    for draws in options.draws:
        source = folder / f"text-{options.sizes[0]}.jsonl"
        row = peaks(folder / f"draws-{draws}", source, LINEAR, draws + 1, STAGES)
        rows.append({"draws": draws, **{stage: row[stage] for stage in STAGES[-2:]}})
        show(rows[-1])
    return rows


def show(row):
    words = [f"{name} {value:.1f} MB" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()]
    print(", ".join(words), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--draws", type=int, nargs="*", default=[100, 10_000])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(options, Path(folder))
    if options.out:
        write_json(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
