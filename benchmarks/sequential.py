"""Sequential Monte Carlo compared with plain resampling at equal base tokens: how far are they from the residual model?

    python benchmarks/sequential.py RUN [--particles 8 32 128] [--repeats 4] [--prefixes 12] [--out FILE.json]

Quality is log Z − E[log Ẑ] in nats, an upper bound of KL(law of an emitted text ‖ residual model) for both. E[log Ẑ] is
a mean over repeats; log Z cancels in the difference between the two, which is paired by prefix with Student's t
interval over prefixes. For the gaps themselves log Z is the mean of all Ẑ of sequential runs of the prefix, weighted by
their particles. Both draw ``particles`` × length tokens from the base. "Plain needs" is how many plain candidates reach
the same gap, interpolated. Not in the cost: the energy reads a text once for plain resampling, and at each look here;
the CPU seconds tell what that comes to. ``--repeats`` counts runs with the most particles; with fewer there are as many
more, so that all have the same number of particles in total.
"""

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from scipy.stats import t as student

from freenergy import Rng, Sequences, Target, load
from freenergy.corpus import Corpus
from freenergy.samplers.particles import run_island

ROWS = 128  # particles in the machine at once


def contexts_of(corpus, split, num):
    """Prefixes from all over a split."""
    windows = corpus.windows(split)
    rows = np.unique(np.linspace(0, len(windows) - 1, num).astype(int))
    return windows.continuations(rows).contexts


def plain(joint, space, context, total, rng):
    """log-weights of independent draws."""
    return joint.residual.propose(context, total, space, rng, batch_size=ROWS).log_weight[0]


def sequential(joint, space, context, num, repeats, rng, every, share):
    """log Ẑ of independent runs, several of them side by side."""
    found, batch_size = [], max(1, ROWS // num)
    for first in range(0, repeats, batch_size):
        count = min(batch_size, repeats - first)
        copies = Sequences(context.tokens.expand(count, -1), context.lengths.expand(count))
        stream = rng.shift(contexts=first)
        target = Target(joint.residual, copies, space)
        island = run_island(target, num, stream, check_every=every, share=share, batch_size=ROWS)
        assert island.base_tokens <= count * num * space.length
        found.append(island.log_partition)
    return torch.cat(found)


def log_mean(log_values, weights):
    return float((log_values + weights.log()).logsumexp(0) - weights.sum().log())


def measure(joint, space, context, arguments, rng):
    """Of one prefix: E[log Ẑ] of both for each number of particles, relative to log Z; and CPU seconds."""
    begun = time.process_time()
    pool = plain(joint, space, context, arguments.pool, rng.child("plain"))
    seconds = {"plain": (time.process_time() - begun) / arguments.pool}
    runs, begun = {}, time.process_time()
    for num in arguments.particles:
        repeats = arguments.repeats * max(arguments.particles) // num
        stream = rng.child("sequential", num)
        runs[num] = sequential(joint, space, context, num, repeats, stream, arguments.every, arguments.share)
    particles = sum(num * len(values) for num, values in runs.items())
    seconds["sequential"] = (time.process_time() - begun) / particles
    weights = torch.cat([torch.full_like(values, num) for num, values in runs.items()])
    log_z = log_mean(torch.cat(list(runs.values())), weights)
    sizes = [2**k for k in range(1 + int(math.log2(arguments.pool)))]
    groups = {n: pool[: len(pool) // n * n].view(-1, n).logsumexp(1) - math.log(n) for n in sizes}
    return {
        "log_z": log_z,
        "plain": {n: log_z - values.mean().item() for n, values in groups.items()},
        "sequential": {n: log_z - values.mean().item() for n, values in runs.items()},
        "spread": pool.std().item(),
        "seconds": seconds,
    }


def interval(values):
    """Mean and half-width of a 95 % interval over prefixes."""
    values = np.array(values)
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def needed(curve, gap):
    """How many plain candidates have this gap: between two sizes by a line over log n; None beyond the last."""
    sizes = sorted(curve)
    for low, high in itertools.pairwise(sizes):
        if curve[low] >= gap >= curve[high]:
            share = (curve[low] - gap) / max(curve[low] - curve[high], 1e-12)
            return low * (high / low) ** share
    return None


def table(found, arguments, length):
    curve = {n: np.mean([row["plain"][n] for row in found]).item() for n in found[0]["plain"]}
    rows = []
    for n in arguments.particles:
        gap, _ = interval([row["sequential"][n] for row in found])
        saved, half = interval([row["plain"][n] - row["sequential"][n] for row in found])
        rows.append(
            {
                "particles": n,
                "base_tokens": n * length,
                "plain": curve[n],
                "sequential": gap,
                "saved": saved,
                "interval": [saved - half, saved + half],
                "plain_needs": needed(curve, gap),
            }
        )
    return rows, curve


def show(rows, pool):
    print("particles  base tokens   plain gap   sequential   saved (95 % interval)      plain needs")
    for row in rows:
        low, high = row["interval"]
        needs = f"> {pool}" if row["plain_needs"] is None else f"{row['plain_needs']:.0f}"
        print(
            f"{row['particles']:9d}  {row['base_tokens']:11d}  {row['plain']:10.3f}  {row['sequential']:11.3f}   "
            f"{row['saved']:.3f} ({low:.3f} – {high:.3f})   {needs:>14}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--particles", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--repeats", type=int, default=4, help="runs with the most particles")
    parser.add_argument("--prefixes", type=int, default=12)
    parser.add_argument("--pool", type=int, default=2048, help="plain candidates of each prefix")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--split", default="test")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    joint, corpus, found = load(arguments.run), Corpus.open(arguments.run / "corpus"), []
    contexts = contexts_of(corpus, arguments.split, arguments.prefixes)
    for b in range(len(contexts)):
        found.append(measure(joint, corpus.space, contexts[b : b + 1], arguments, Rng(b)))
        print(f"prefix {b}: log Z {found[-1]['log_z']:.2f}, gaps {found[-1]['sequential']}", flush=True)
    rows, curve = table(found, arguments, corpus.space.length)
    show(rows, arguments.pool)
    seconds = {way: float(np.mean([row["seconds"][way] for row in found])) for way in ("plain", "sequential")}
    spread = float(np.mean([row["spread"] for row in found]))
    print(
        f"CPU ms a particle: { ({way: round(1000 * value, 2) for way, value in seconds.items()}) }; spread {spread:.2f}"
    )
    if arguments.out:
        about = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        about.pop("out")
        about["run"] = arguments.run.name
        told = {"settings": about, "rows": rows, "plain": curve, "seconds_a_particle": seconds, "prefixes": found}
        arguments.out.write_text(json.dumps(told | {"spread": spread}, indent=2) + "\n")


if __name__ == "__main__":
    main()
