"""A lesson: a restricted Boltzmann machine learns bars and stripes, and two ways to get its gradient wrong.

    ∂ log P(v) / ∂W = E[v h' | v from the data] − E[v h' | v from the model]

    python examples/rbm.py [--quick] [--seed 0] [--json] [--plot docs/figures/rbm.png]

The second mean needs draws of the model. Contrastive divergence (CD-1) starts a chain at the data and makes one sweep:
cheap, and biased, so the likelihood rises and then falls. Persistent chains (PCD, stochastic maximum likelihood) keep
their place between updates: right in the limit if the weights move slowly, and wrong if they run away from the chains.
With 12 hidden units log Z is an exact sum, so the true likelihood of all three is known at every point. The best that
any model can reach on the 30 patterns is −log 30 = −3.401 nats.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from freenergy import Continuations, Rng, Sequences
from freenergy.models.rbm import RBM

SIDE, HIDDEN, CHAINS, BATCH = 4, 12, 200, 60
WAYS = {"CD-1": (False, 0.2), "PCD, small steps": (True, 0.05), "PCD, large steps": (True, 0.2)}


def patterns() -> Tensor:
    """All images of full rows or full columns, each once: 30 of 16 pixels."""
    bits = torch.cartesian_prod(*[torch.arange(2)] * SIDE)
    rows = bits.unsqueeze(2).expand(-1, SIDE, SIDE)
    return torch.cat([rows.flatten(1), rows.transpose(1, 2).flatten(1)]).unique(dim=0)


def chains(v: Tensor) -> Continuations:
    """Visible vectors as positions of chains."""
    return Continuations(Sequences.from_lists([[]]), v.long().unsqueeze(0), torch.full((1, len(v)), v.shape[1]))


@torch.no_grad()
def statistics(rbm: RBM, v: Tensor) -> list[Tensor]:
    """Means of v h', v and h, with the probabilities of h in place of draws: less noise."""
    v, h = v.double(), rbm.hidden_probs(v.double())
    return [v.T @ h / len(v), v.mean(0), h.mean(0)]


def train(is_persistent: bool, rate: float, steps: int, every: int, seed: int) -> list[tuple[int, float]]:
    """Return the exact log-likelihood of the data, every so many steps."""
    rng, data = Rng(seed), patterns()
    rbm = RBM(visible=SIDE**2, hidden=HIDDEN, rng=rng.child("weights"), scale=0.05)
    x, curve = chains((rng.child("chains").uniform(CHAINS, SIDE**2) < 0.5).long()), []
    for t in range(1, steps + 1):
        batch = data[(rng.child("batch", t).uniform(BATCH) * len(data)).long()]
        x = rbm.sweep(x if is_persistent else chains(batch), rng.child("sweep", t))
        with torch.no_grad():
            gaps = zip(statistics(rbm, batch), statistics(rbm, x.tokens[0]), strict=True)
            for weight, (up, down) in zip((rbm.weights, rbm.visible_bias, rbm.hidden_bias), gaps, strict=True):
                weight += rate * (up - down)
            if t % every == 0:
                curve.append((t, float(rbm.log_prob(data).mean())))
    return curve


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Write the likelihoods against the number of steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 3.6))
    for name, curve in curves.items():
        ax.plot(*zip(*curve, strict=True), label=name)
    ax.axhline(-torch.tensor(30.0).log().item(), color="black", linestyle=":", label="best possible")
    ax.set(xlabel="updates", ylabel="log-likelihood, nats per image (exact)")
    ax.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer updates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the curves as JSON")
    parser.add_argument("--plot", type=Path, help="write the curves here")
    arguments = parser.parse_args()
    steps, every = (400, 100) if arguments.quick else (12_000, 200)
    curves = {name: train(*settings, steps, every, arguments.seed) for name, settings in WAYS.items()}
    if arguments.plot:
        draw(curves, arguments.plot)
    if arguments.json:
        print(json.dumps(curves))
        return
    print("log-likelihood in nats per image, exact; the best possible is -3.401")
    for name, curve in curves.items():
        best = max(curve, key=lambda point: point[1])
        print(f"{name:17s}  best {best[1]:7.3f} after {best[0]:6d} updates,  last {curve[-1][1]:7.3f}")


if __name__ == "__main__":
    main()
