"""A lesson: the Ising model, from television snow to one big patch.

    P(x) ∝ exp( (1/T) Σ_{i~j} x_i x_j ),      x_i = ±1 on a square lattice

    python examples/ising.py [--quick] [--seed 0] [--json] [--plot docs/figures/ising.png]

One spin given its neighbours is a coin: P(x_i = +1 | rest) = 1/(1 + exp(−(2/T) Σ_j x_j)). Spins of one colour of the
checkerboard do not see each other, so a whole colour is drawn at once, for 64 chains per machine word. The first table
compares chains on a 4 × 4 lattice with the exact answer (all 65,536 states). The second cools a 64 × 64 lattice: near
T = 2.27 the neighbours' correlation jumps and patches grow as large as the lattice.
"""

import argparse
import json
from pathlib import Path

import torch

from freenergy import Rng
from freenergy.models.ising import Ising
from freenergy.samplers.packed_ising import PackedIsing

TEMPERATURES = (5.0, 2.5, 2.4, 2.3, 2.0)


def small(temperature: float, chains: int, seed: int) -> dict[str, float]:
    """Chains on a lattice that can be enumerated, next to the exact means."""
    model = Ising.at_temperature(temperature, side=4)
    packed = PackedIsing(model=model)
    spins = packed.run(packed.start(chains, Rng(seed)), 60, Rng(seed + 1)).spins()
    edges = model.edges(spins) / model.num_edges
    exact = model.exact()
    return {
        "T": temperature,
        "correlation": float(edges.mean()),
        "error": float(edges.std()) / chains**0.5,
        "exact": exact["correlation"],
        "abs_magnetisation": float(spins.mean((1, 2)).abs().mean()),
        "exact_abs_magnetisation": exact["abs_magnetisation"],
        "log_partition": exact["log_partition"],
    }


def large(temperature: float, side: int, sweeps: int, seed: int) -> tuple[dict[str, float], torch.Tensor]:
    """64 chains of a large lattice: their mean correlation, and the picture of one of them."""
    model = Ising.at_temperature(temperature, side=side, boundary="periodic")
    packed = PackedIsing(model=model)
    spins = packed.run(packed.start(64, Rng(seed)), sweeps, Rng(seed + 2)).spins()
    row = {
        "T": temperature,
        "correlation": float((model.edges(spins) / model.num_edges).mean()),
        "abs_magnetisation": float(spins.mean((1, 2)).abs().mean()),
    }
    return row, spins[0]


def draw(pictures: dict[float, torch.Tensor], path: Path) -> None:
    """Write one picture per temperature, side by side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(pictures), figsize=(2.4 * len(pictures), 2.7))
    for ax, (temperature, spins) in zip(axes, pictures.items(), strict=True):
        ax.imshow(spins.numpy(), cmap="gray_r", vmin=-1, vmax=1, interpolation="nearest")
        ax.set_title(f"T = {temperature:g}")
        ax.set_axis_off()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer chains and a smaller lattice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--plot", type=Path, help="write the lattices here")
    arguments = parser.parse_args()
    chains, side, sweeps = (1280, 32, 100) if arguments.quick else (12_800, 64, 2000)
    exact = [small(temperature, chains, arguments.seed) for temperature in TEMPERATURES]
    found = {temperature: large(temperature, side, sweeps, arguments.seed) for temperature in TEMPERATURES}
    if arguments.plot:
        draw({temperature: spins for temperature, (_, spins) in found.items()}, arguments.plot)
    rows = [row for row, _ in found.values()]
    if arguments.json:
        print(json.dumps({"small": exact, "large": rows, "side": side}))
        return
    print("4 × 4, open:    T   correlation of neighbours (exact)      |m| (exact)")
    for row in exact:
        correlation = f"{row['correlation']:.4f} ± {row['error']:.4f} ({row['exact']:.4f})"
        print(
            f"{row['T']:17g}   {correlation:33s}  {row['abs_magnetisation']:.4f} ({row['exact_abs_magnetisation']:.4f})"
        )
    print(f"\n{side} × {side}, periodic, {sweeps} sweeps from snow:    T   correlation   |m|")
    for row in rows:
        print(f"{row['T']:48g}   {row['correlation']:11.4f}   {row['abs_magnetisation']:.3f}")


if __name__ == "__main__":
    main()
