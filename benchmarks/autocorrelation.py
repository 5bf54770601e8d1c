"""How many readings of the energy each kernel needs per independent draw, exactly: every transition matrix written out.

    τ(f) = 1 + 2 Σ_k corr(f(x_0), f(x_k)) = 2 ⟨f, (I − K + 1π)^{-1} f⟩ / ⟨f, f⟩ − 1        f centred, under π
    cost = max over f of τ(f) × readings per step          f: the log-score and every indicator [x_t = v]

    python benchmarks/autocorrelation.py [--quick] [--out benchmarks/results/autocorrelation.json]

π ∝ P_LM(x) e^{−E(x)} over all V^L strings, P_LM a bigram model, E a sum over pairs of places or a small network, of
growing strength. A step with gradients counts 3 readings, Gibbs V, exact neighbours V·L. The last lines give the total
variation between π and the stationary law of discrete Langevin without its correction, and compare the default mixture
with the best kernel of each column. tests/runs/samplers/test_autocorrelation.py compares the matrices with the kernels.
"""

import argparse
from itertools import product
from pathlib import Path

import torch

from freenergy import Rng
from freenergy.core.files import write_json

RESULTS = Path(__file__).parent / "results" / "autocorrelation.json"
TARGETS = {"pair 0.25": ("pair", 0.25), "pair 0.6": ("pair", 0.6), "pair 1.0": ("pair", 1.0), "net 0.5": ("net", 0.5),
           "net 1.5": ("net", 1.5)}  # fmt: skip
STEP_SIZES = (0.2, 0.4, 1.0)


class World:
    """All strings of L tokens, the base and the target as vectors."""

    def __init__(self, V, L, kind, strength):
        self.V, self.L = V, L
        self.x = torch.tensor(list(product(range(V), repeat=L)))
        self.first, self.next = Rng(1).normal(V).log_softmax(0), Rng(1).child("next").normal(V, V).log_softmax(1)
        self.pairs = {(s, t): Rng(2).child(s, t).normal(V, V) for s in range(L) for t in range(s + 1, L)}
        self.layers = [Rng(3).child(i).normal(*shape) for i, shape in enumerate([(L * V, 16), (16, 1)])]
        self.kind, self.strength = kind, strength
        hard = torch.nn.functional.one_hot(self.x, V).double().requires_grad_()
        score = self.log_score(hard)
        self.slope = torch.autograd.grad(score.sum(), hard)[0]
        self.score, self.base = score.detach(), self.log_base(hard).detach()
        self.P = self.score.softmax(0)
        self.kl = float(self.P @ (self.P.log() - self.base))
        self.changed = changed(self.x, V)

    def log_base(self, one):
        """Return log P_LM of one-hot strings."""
        steps = torch.einsum("nlv,vw,nlw->n", one[:, :-1], self.next, one[:, 1:])
        return one[:, 0] @ self.first + steps

    def log_score(self, one):
        """Return log P_LM − E of one-hot strings."""
        if self.kind == "pair":
            own = sum(torch.einsum("nv,vw,nw->n", one[:, s], J, one[:, t]) for (s, t), J in self.pairs.items())
        else:
            own = 2.0 * (torch.tanh(one.flatten(1) @ self.layers[0]) @ self.layers[1]).squeeze(1)
        return self.log_base(one) + self.strength * own


def changed(x, V):
    """The number of the string with token v at place t: [strings, place, token]."""
    L = x.shape[1]
    powers = V ** torch.arange(L - 1, -1, -1)
    number = (x @ powers).unsqueeze(1)
    return torch.stack([number + (torch.arange(V) - x[:, t : t + 1]) * powers[t] for t in range(L)], dim=1)


def corrected(q, score):
    """The Metropolis–Hastings matrix of a proposal matrix."""
    flow = score.exp().unsqueeze(1) * q
    K = torch.where(flow > 0, q * (flow.T / flow.clamp(min=1e-300)).clamp(max=1), 0.0)
    K.fill_diagonal_(0.0)
    return K + torch.diag(1 - K.sum(1))


def sites(world, log_q):
    """A random place, a token by log_q [strings, place, token]: the proposal matrix."""
    n, q = len(world.x), torch.zeros(len(world.x), len(world.x), dtype=torch.float64)
    return q.scatter_add(1, world.changed.view(n, -1), (log_q.softmax(-1) / world.L).view(n, -1))


def suffixes(world):
    q, n = torch.zeros(len(world.x), len(world.x), dtype=torch.float64), len(world.x)
    for t in range(world.L):
        size = world.V ** (world.L - t)
        rows = world.base.view(-1, size).log_softmax(1).exp()
        block = torch.block_diag(*[row.expand(size, size) for row in rows])
        q += block.view(n, n) / world.L
    return q


def metropolised(world):
    """Another token by its full conditional without the present one."""
    log_p = world.score[world.changed]
    here = torch.nn.functional.one_hot(world.x, world.V).bool()
    return corrected(sites(world, log_p.masked_fill(here, -torch.inf)), world.score)


def balanced(world, d):
    """One move by exp(d/2)."""
    n, here = len(world.x), torch.nn.functional.one_hot(world.x, world.V).bool()
    w = (d / 2).masked_fill(here, -torch.inf).view(n, -1).softmax(1)
    return torch.zeros(n, n, dtype=torch.float64).scatter_add(1, world.changed.view(n, -1), w)


def langevin(world, d, step_size):
    """All places at once."""
    here = torch.nn.functional.one_hot(world.x, world.V).double()
    log_q = (d / 2 - (1 - here) / step_size).log_softmax(-1)
    return sum(log_q[:, t][:, world.x[:, t]] for t in range(world.L)).exp()


def kernels(world):
    """Every kernel: its matrix and its readings per step."""
    n, V, L = len(world.x), world.V, world.L
    near = world.score[world.changed]
    exact = near - world.score.view(n, 1, 1)
    guess = world.slope - world.slope.gather(2, world.x.unsqueeze(2))
    left = torch.cat([world.first.expand(n, 1, V), world.next[world.x[:, :-1]]], dim=1)
    whole = corrected(world.base.exp().expand(n, n).clone(), world.score)
    cloze = corrected(sites(world, world.base[world.changed]), world.score)
    found = {
        "independence": (whole, 1),
        "suffix": (corrected(suffixes(world), world.score), 1),
        "mixture (default)": ((whole + cloze) / 2, 1),
        "site, causal": (corrected(sites(world, left), world.score), 1),
        "site, cloze": (cloze, 1),
        "site, uniform": (corrected(sites(world, torch.zeros_like(left)), world.score), 1),
        "gibbs": (sites(world, near), V),
        "gibbs, metropolised": (metropolised(world), V),
        "gradients, one move": (corrected(balanced(world, guess), world.score), 3),
        "neighbours, one move": (corrected(balanced(world, exact), world.score), V * L),
    }
    for a in STEP_SIZES:
        found[f"discrete langevin {a}"] = (corrected(langevin(world, guess, a), world.score), 3)
    return found, langevin(world, guess, 0.4)


def worst_tau(world, K):
    """The largest τ of the score and of every indicator."""
    n = len(world.x)
    ones = torch.nn.functional.one_hot(world.x, world.V).double().view(n, -1)
    f = torch.cat([world.score.unsqueeze(1), ones], dim=1)
    f = f - world.P @ f
    solved = torch.linalg.solve(torch.eye(n, dtype=torch.float64) - K + world.P.expand(n, n), f)
    return float((2 * (world.P @ (f * solved)) / (world.P @ f.square()) - 1).max())


def measure(quick):
    V, L, columns = (3, 3, ["pair 0.6"]) if quick else (6, 4, list(TARGETS))
    table, bottom = {}, {"KL(P‖base), nats": {}, "unadjusted langevin 0.4: total variation": {}}
    for name in columns:
        world = World(V, L, *TARGETS[name])
        found, unadjusted = kernels(world)
        for kernel, (K, readings) in found.items():
            assert float((world.P @ K - world.P).abs().max()) < 1e-10, f"{kernel} does not leave its target invariant"
            table.setdefault(kernel, {})[name] = readings * worst_tau(world, K)
        law = torch.linalg.matrix_power(unadjusted, 4096)[0]
        bottom["KL(P‖base), nats"][name] = world.kl
        bottom["unadjusted langevin 0.4: total variation"][name] = float((law - world.P).abs().sum() / 2)
    best = {name: min(own[name] for own in table.values()) for name in columns}
    bottom["default / best"] = {name: table["mixture (default)"][name] / best[name] for name in columns}
    return {"tokens": V, "length": L, "readings_per_draw": table, "columns": columns, **bottom}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="27 strings, one target")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = measure(arguments.quick)
    write_json(arguments.out, found)
    print("| readings per independent draw |", " | ".join(found["columns"]), "|")
    print("|---|" + "---|" * len(found["columns"]))
    others = {key: own for key, own in found.items() if isinstance(own, dict) and key != "readings_per_draw"}
    rows = found["readings_per_draw"] | others
    for name, row in rows.items():
        print(f"| {name} |", " | ".join(f"{row[column]:.3g}" for column in found["columns"]), "|")


if __name__ == "__main__":
    main()
