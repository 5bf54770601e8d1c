"""Memory of writing: peak growth over the loaded model, for one long text and over many prefixes.

    python benchmarks/memory.py RUN [--candidates 1000] [--chunks 10] [--prefixes 40] [--out results.json]

Growth is the peak of resident memory minus what the process held when the model was loaded and had drawn once.
"""

import argparse
import json
import resource
from pathlib import Path

from freenergy import Resampling, Rng, Writing, load
from freenergy.cli.show import Bars

PREFIX = "The river flows through the city of"


def resident():
    """Megabytes now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def peak():
    """Megabytes at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--prefixes", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = load(options.run)
    model.sample(PREFIX, candidates=16)
    loaded, sampler = resident(), Resampling(candidates=options.candidates)
    with Bars() as bars:
        writing = Writing(sampler=sampler, chunks=options.chunks, max_context=model.max_context)
        long = model.write(PREFIX, model.space_of(None), Rng(0), writing, progress=bars)
    found = {"loaded_mb": loaded, "long_text_growth_mb": peak() - loaded, "tokens": len(long[0].tokens)}
    after = []
    for i in range(options.prefixes):
        model.sample(f"{PREFIX} {i}", candidates=32, seed=i)
        after.append(resident())
    quarter = max(1, len(after) // 4)
    found["prefixes_growth_mb"] = max(after[-quarter:]) - max(after[:quarter])
    found |= {"candidates": options.candidates, "chunks": options.chunks, "prefixes": options.prefixes}
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
