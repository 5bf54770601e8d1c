"""What E-ARM's gradient consists of, and whether its parts help: on the base of a finished experiment.

    python earm_gradient.py FOLDER [--row e-arm] [--seed 0] [--batches 32] [--out FILE]

For each part p of Eq. 15 (``objectives.earm.Parts``), over B training batches with gradients g_1 … g_B:

    size   ‖mean g_b‖, without the bias of the mean's own noise: √max(0, ‖mean g‖² − Σ_b ‖g_b − mean g‖² / (B (B − 1)))
    noise  the root mean square of ‖g_b − mean g‖: what one batch adds to it
    helps  the cosine of mean g with the gradient of held-out cross-entropy; above 0 a small step against g lowers it

The spread of the cosine is over ten parts of the batches, each left out in turn (jackknife).
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from freenergy.core.files import write_json
from freenergy.core.progress import Silent
from freenergy.core.rng import Rng
from freenergy.objectives.earm import EARM, Denominators
from freenergy.recipes.load import load_run
from freenergy.training.tasks.autoregressive import cross_entropy_of, steps_of

_FOLDS = 10
_WARM = 8  # batches that the denominators see first


def main() -> None:
    """Measure, print a table, and write it where asked."""
    options = _options()
    base, row = (load_run(options.folder / f"seed-{options.seed}" / name) for name in ("base", options.row))
    domain = base.recipe.domain(base, Silent())
    network = domain.network(Rng(options.seed))
    domain.restore(network, base.stage("base"))
    network.module.eval()  # dropout would be one more noise
    steps, earm = row.recipe.base.optimisation, row.recipe.base.earm
    data = domain.data(batch_size=steps.batch_size, accumulate=1, rng=Rng(options.seed).child("gradient"))
    parts = _gradients(network, data, earm, options.batches, Rng(options.seed))
    held_out = _held_out(network, data)
    rows = {name: _told(each, held_out) for name, each in parts.items()}
    print("| part | size | noise of a batch | cosine with held-out cross-entropy |\n|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['size']:.3g} | {row['noise']:.3g} | {row['helps']:.3f} ± {2 * row['helps_error']:.3f} |"
        )
    if options.out:
        write_json(options.out, {"row": options.row, "batches": options.batches, "parts": rows})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--row", default="e-arm")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _gradients(network, data, earm: EARM, batches: int, rng: Rng) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """[B, weights] of every part; the base's weights stay as they are."""
    denominators, found = Denominators(earm.length, earm.decay), dict[str, list[Tensor]]()
    for step in range(1, _WARM + batches + 1):
        batch = data.batch(step, 0)
        with torch.set_grad_enabled(step > _WARM):
            logits = network.logits(batch.given, batch.tokens)
            true, fakes = steps_of(network, batch, logits, earm.length, rng.child(step))
        log_z = denominators.update(fakes)
        if step <= _WARM:
            continue
        parts = earm.parts(true, fakes, log_z)
        for name in ("cross_entropy", "level", "reweighted_prefix_term", "noise"):
            found.setdefault(name, []).append(_gradient(network, getattr(parts, name)))
    return {name: torch.stack(each) for name, each in found.items()}


def _gradient(network, value: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    weights = [weight for weight in network.module.parameters() if weight.requires_grad]
    slopes = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, slopes, strict=True)]
    return torch.cat([g.flatten() for g in filled])


def _held_out(network, data) -> Tensor:  # type: ignore[no-untyped-def]
    """The gradient of cross-entropy over the validation rows."""
    batches = list(data.held_out())
    slopes = (
        _gradient(network, cross_entropy_of(network.logits(each.given, each.tokens), each, 0.0)) for each in batches
    )
    return sum(slopes) / len(batches)  # type: ignore[return-value]


def _told(g: Tensor, held_out: Tensor) -> dict[str, float]:
    B, mean = len(g), g.mean(0)
    scatter = float(((g - mean) ** 2).sum())
    left = [g[torch.arange(B) % _FOLDS != fold].mean(0) for fold in range(_FOLDS)]
    cosines = torch.tensor([float(torch.cosine_similarity(each, held_out, dim=0)) for each in left])
    error = math.sqrt((_FOLDS - 1) / _FOLDS * float(((cosines - cosines.mean()) ** 2).sum()))
    return {
        "size": math.sqrt(max(0.0, float((mean**2).sum()) - scatter / (B * (B - 1)))),
        "noise": math.sqrt(scatter / (B - 1)),
        "helps": float(torch.cosine_similarity(mean, held_out, dim=0)),
        "helps_error": error,
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
    print(json.dumps({"threads": torch.get_num_threads()}))
