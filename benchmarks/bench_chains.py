"""Speed of chains and draws: n-gram draws, Ising heat bath, MALA; next to the obvious way and to other packages.

    python benchmarks/bench_chains.py [--rounds 3] [--quick] [--out benchmarks/results/chains.json]

Each way does as much as suits it, and seconds are per unit of work: a token, a spin update, a step of 1,000 chains.
thrml and blackjax (jitted, on this processor) are compared with where they are installed. ``tokens_per_second`` counts
tokens, spin updates and steps of a chain. Times are CPU seconds, so that a busy machine changes little; one thread.
"""

import importlib.util
import statistics
import time

import measuring
import numpy as np
import torch

from freenergy import NgramLM, Rng, Sequences, SequenceSpace, Truncation
from freenergy.lm.stepping import in_chunks
from freenergy.models.ising import Ising
from freenergy.samplers.kernels.langevin import Langevin, points
from freenergy.samplers.packed_ising import PackedIsing

V, SIDE, DIMENSIONS, CHAINS = 10_000, 32, 10, 1000


def cpu(work, units):
    """CPU seconds per unit of one call."""
    started = time.process_time()
    work()
    return (time.process_time() - started) / units


def rows_of(case, ways, rounds, against, **needs):
    """``ways``: name → (work, units). Every way runs once before, then in turns."""
    for work, _ in ways.values():
        work()
    times = {name: [] for name in ways}
    for i in range(rounds):
        for name in list(ways) if i % 2 == 0 else reversed(ways):
            times[name].append(cpu(*ways[name]))
    ratios = measuring.compared(times, against)
    rows = [
        {"case": case, "way": way, "tokens_per_second": 1 / statistics.median(times[way])} | ratios[way] for way in ways
    ]
    rows[-1] |= needs
    return rows


def ngram(rounds, quick):
    """Draws of a 5-gram model of 900,000 tokens with Zipf's law, dense and down the orders."""
    p = 1 / np.arange(1, V + 1)
    stream = np.random.default_rng(0).choice(V, size=90_000 if quick else 900_000, p=p / p.sum())
    stream[::22] = 0
    lm = NgramLM.fit(np.append(stream, 0), vocab_size=V, eos=0, order=5)
    space, context = SequenceSpace(vocab_size=V, length=40, eos=0), Sequences.from_lists([[]])
    few, many = 256, 2_000 if quick else 20_000  # sentences of at most 40 tokens, most of them shorter
    drawn = {n: int(lm.sample(context, n, space, Rng(0)).x.lengths.sum()) for n in (few, many)}

    def dense():
        def read(some):
            return lambda count: lm.stepper(context[some], count, space.length)

        in_chunks(read, context, few, space, Rng(0), Truncation(), rows=2**24 // V)

    ways = {
        "V probabilities": (dense, drawn[few]),
        "ours": (lambda: lm.sample(context, many, space, Rng(0)), drawn[many]),
    }
    return rows_of("n-gram draws, V = 10,000", ways, rounds, "V probabilities", needs=100)


def naive_sweeps(chains, sweeps):
    """Heat bath by masks and rolls of float spins, in torch."""
    colour = Ising(side=SIDE, beta=0.44, boundary="periodic").colour()
    spins = torch.ones(chains, SIDE, SIDE)
    for _ in range(sweeps):
        for own in (colour, ~colour):
            field = sum(spins.roll(shift, dim) for shift in (1, -1) for dim in (1, 2))
            up = torch.rand(spins.shape) < torch.sigmoid(0.88 * field)
            spins = torch.where(own, 2.0 * up - 1, spins)
    return spins


def thrml_sweeps(chains, sweeps):
    """The same by thrml's block Gibbs, jitted; returns a call."""
    import jax
    import jax.numpy as jnp
    from thrml import Block, SamplingSchedule, SpinNode, sample_states
    from thrml.models import IsingEBM, IsingSamplingProgram

    nodes = [[SpinNode() for _ in range(SIDE)] for _ in range(SIDE)]
    flat = [node for row in nodes for node in row]
    places = [(i, j) for i in range(SIDE) for j in range(SIDE)]
    pairs = [((i, j), ((i + a) % SIDE, (j + b) % SIDE)) for i, j in places for a, b in ((0, 1), (1, 0))]
    edges = [(nodes[i][j], nodes[k][m]) for (i, j), (k, m) in pairs]
    model = IsingEBM(flat, edges, jnp.zeros(len(flat)), jnp.ones(len(edges)), jnp.array(0.44))
    colours = [Block([nodes[i][j] for i in range(SIDE) for j in range(SIDE) if (i + j) % 2 == c]) for c in (0, 1)]
    program = IsingSamplingProgram(model, colours, clamped_blocks=[])
    schedule = SamplingSchedule(n_warmup=sweeps - 1, n_samples=1, steps_per_sample=1)
    start = [jnp.ones((chains, SIDE * SIDE // 2), dtype=jnp.bool_) for _ in colours]

    def one(key, even, odd):
        return sample_states(key, program, schedule, [even, odd], [], [Block(flat)])

    run = jax.jit(lambda keys: jax.vmap(one)(keys, *start))
    return lambda: jax.block_until_ready(run(jax.random.split(jax.random.key(0), chains)))


def ising(rounds, quick):
    """Heat bath on 32 × 32 spins."""
    sweeps = (5, 20) if quick else (20, 100)
    packed = PackedIsing(model=Ising(side=SIDE, beta=0.44, boundary="periodic"))
    state = packed.start(1024, Rng(0))
    ways = {"torch": (lambda: naive_sweeps(256, sweeps[0]), 256 * sweeps[0] * SIDE**2)}
    if importlib.util.find_spec("thrml"):
        for chains in (64, 1024):
            ways[f"thrml, {chains} chains"] = (thrml_sweeps(chains, sweeps[0]), chains * sweeps[0] * SIDE**2)
    ways["ours"] = (lambda: packed.run(state, sweeps[1], Rng(1)), 1024 * sweeps[1] * SIDE**2)
    return rows_of("Ising 32 × 32, heat bath", ways, rounds, "torch", needs=10)


def blackjax_steps(steps):
    """MALA on the same density by blackjax, jitted; returns a call."""
    import blackjax
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    kernel = blackjax.mala(lambda x: -jnp.square(x).sum() / 2, 0.3)
    start = jax.vmap(kernel.init)(jnp.zeros((CHAINS, DIMENSIONS)))

    @jax.jit
    def run(key):
        def step(state, key):
            return jax.vmap(kernel.step)(jax.random.split(key, CHAINS), state)[0], None

        return jax.lax.scan(step, start, jax.random.split(key, steps))[0]

    return lambda: jax.block_until_ready(run(jax.random.key(0)))


class Normal:
    """N(0, I)."""

    def log_score(self, x):
        """−|x|²/2."""
        return -x.values.square().sum((-1, -2)) / 2


def mala(rounds, quick):
    """Adjusted Langevin on a normal density, 1,000 chains in ten dimensions, float64."""
    steps, kernel, target = 20 if quick else 200, Langevin(step_size=0.8), Normal()

    def ours():
        state = kernel.init(target, points(torch.zeros(CHAINS, DIMENSIONS, dtype=torch.float64)))
        for t in range(steps):
            state, _ = kernel.step(target, state, Rng(0).child(t))

    ways = {"ours": (ours, steps * CHAINS)}
    if importlib.util.find_spec("blackjax"):
        ways = {"blackjax": (blackjax_steps(steps), steps * CHAINS)} | ways
    return rows_of("MALA, 1,000 chains, 10 dimensions", ways, rounds, next(iter(ways)))


CASES = {"ngram": ngram, "ising": ising, "mala": mala}


def measure(rounds, quick):
    torch.set_num_threads(1)
    return [row for case in CASES.values() for row in case(rounds, quick)]


if __name__ == "__main__":
    measuring.main(measure, "chains")
