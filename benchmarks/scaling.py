"""The cost model of docs/scaling.md beside what real runs do, at three sizes.

    python benchmarks/scaling.py [--out benchmarks/results/scaling.json]

Each size is a whole small run. Operations are those that torch counts while a stage runs (every matrix product and
attention, forward and backward), bytes those of the files that the stage has left; both are compared with what
``freenergy.apps.cost_model`` says of the recipe alone. Neither depends on how fast the machine is.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from freenergy import load_recipe, run
from freenergy.apps.cost_model import Cost, cost_of
from freenergy.apps.cost_model.planning import Known
from freenergy.recipes.families.residual import ResidualRecipe
from freenergy.recipes.load import make_recipe

SIZES: dict[str, dict[str, Any]] = {
    "small": {"preset": "tiny", "vocab": 512, "prefix": 24, "continuation": 8, "windows": 40, "n": 16},
    "medium": {"preset": "tiny", "vocab": 4096, "prefix": 120, "continuation": 40, "windows": 40, "n": 32},
    "large": {"preset": "small", "vocab": 8192, "prefix": 120, "continuation": 40, "windows": 24, "n": 48},
}


Shape = tuple[int, ...]


def _added(total: Shape, a: Shape, b: Shape, *rest: object, **more: object) -> int:
    return 2 * math.prod(a) * b[-1]


def _attention(query: Shape, key: Shape, value: Shape, *rest: object, **more: object) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(slope: Shape, query: Shape, key: Shape, value: Shape, *rest: object, **more: object) -> int:
    return sdpa_backward_flop_count(slope, query, key, value)


# torch's counter knows neither products that are added in place nor the attention of CPUs
_COUNTED = {
    torch.ops.aten.addmm_: _added,
    torch.ops.aten.baddbmm_: _added,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Also write the numbers here, as JSON.")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    chosen = parser.parse_args()
    rows = [row for name in chosen.sizes for row in compared(name, recipe_of(SIZES[name]))]
    print(table(rows))
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=2, sort_keys=True) + "\n")


def recipe_of(size: dict[str, Any]) -> ResidualRecipe:
    """All stages with networks: a base from scratch, a product of three energies, all of an evaluation."""
    table = load_recipe("demo-tiny").to_json()
    table["corpus"] |= {"prefix": size["prefix"], "continuation": size["continuation"]} | size.get("corpus", {})
    table["tokenizer"]["vocab_size"] = size["vocab"]
    table["base"] |= {
        "preset": size["preset"],
        "block": size["prefix"] + size["continuation"],
        "validation_tokens": 4000,
    }
    table["base"]["optimisation"] |= {"steps": 12, "warmup": 2, "validate_every": 6, "batch_size": 4}
    table["negatives"] |= {
        "windows": size["windows"], "per_prefix": 4, "validation_windows": 8, "validation_per_prefix": 15,
    }  # fmt: skip
    table["energy"] = {"kind": "product", "parts": [{"kind": "ngram"}, {"kind": "probe"}, {"kind": "bit"}]}
    table["training"]["negatives"] = 3
    table["training"]["optimisation"] |= {"steps": 8, "warmup": 2, "validate_every": 4, "batch_size": 4, "patience": 0}
    table["evaluation"] |= {
        "windows": 24, "candidates": size["n"], "certified_windows": 8, "position_windows": 1, "position_draws": 4,
    }  # fmt: skip
    return make_recipe(table)  # type: ignore[return-value]


def compared(name: str, recipe: ResidualRecipe) -> list[dict[str, Any]]:
    """One row a stage."""
    predicted, rows = cost_of(recipe, Known()), []
    with tempfile.TemporaryDirectory() as folder:
        work = run(recipe, Path(folder))
        while True:
            before = sizes(Path(folder))
            with FlopCounterMode(display=False, custom_mapping=_COUNTED) as counter:
                result = next(work, None)
            if result is None:
                return rows
            if result.name in predicted:
                left = sum(size for path, size in sizes(Path(folder)).items() if path not in before and counts(path))
                rows.append(row(name, result.name, predicted[result.name], counter.get_total_flops(), left))


def sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def counts(path: str) -> bool:
    """Files that grow with the numbers of the recipe: draws, features, scores, weights."""
    if path.startswith("energy/"):
        return path.endswith("energy.safetensors")
    return path.endswith((".parquet", ".safetensors")) and "windows/" not in path and "positions/" not in path


def row(size: str, stage: str, predicted: Cost, flops: int, left: int) -> dict[str, Any]:
    found = {"size": size, "stage": stage, "flops": flops, "flops_predicted": predicted.flops}
    return found | {"bytes": left, "bytes_predicted": predicted.bytes}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| size | stage | GFLOP counted | predicted | ratio | kB left | predicted | ratio |", "|" + "---|" * 8]
    for each in rows:
        cells = [each["size"], each["stage"]]
        for name, unit in (("flops", 1e9), ("bytes", 1e3)):
            seen, said = each[name], each[f"{name}_predicted"]
            cells += [f"{seen / unit:,.1f}", f"{said / unit:,.1f}", f"{said / seen:.2f}" if seen else "–"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
