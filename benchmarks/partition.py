"""Three ways to draw for log Z at equal cost: the variance of Ẑ compared with independent draws.

    python benchmarks/partition.py [--repeats 400] [--stories FOLDER] [--out benchmarks/results/partition.json]

Cost is tokens that the base continues a text by: draws times length, the same for all three. What is read again to get
there is not in it: ``distinct`` reads every string of its beam again at each token. A ratio of 0.5 says that half as
many draws give the same variance. Tables and energies are random; with ``--stories`` the trained model stories260K of
llama2.c is measured too, from a folder that holds it. The interval is by 2.5 and 97.5 % of a bootstrap over repeats.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import torch

from freenergy import HuggingFaceLM, Rng, Sequences, SequenceSpace, TabularLM
from freenergy.partition import ancestral, distinct, log_weights, stratified

DRAWINGS = (ancestral, stratified, distinct)


class Bigrams:
    """E = Σ of one number a pair of neighbouring tokens; ``first`` weighs the pair at the start."""

    def __init__(self, vocab_size, spread, first):
        self.values, self.first = spread * Rng(3).normal(vocab_size, vocab_size), first

    def __call__(self, x):
        """The energy of each continuation."""
        last = x.contexts.tokens.gather(1, (x.contexts.lengths - 1).unsqueeze(1))
        before = torch.cat([last.unsqueeze(1).expand(-1, x.shape[1], 1), x.tokens[:, :, :-1]], dim=2)
        values = self.values[before, x.tokens] * x.mask
        return values.sum(2) + (self.first - 1) * values[:, :, 0]


def stories(folder):
    path = Path(__file__).parents[1] / "tests" / "helpers" / "llama2c.py"
    spec = importlib.util.spec_from_file_location("llama2c", path)
    llama2c = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(llama2c)
    return HuggingFaceLM(llama2c.load(folder / "stories260K.bin"), eos=1)


def relative(values):
    """Variance over squared mean: of log Ẑ, nearly."""
    return (values.var(-1) / values.mean(-1).square()).clamp(min=1e-30)


def estimates(draw, base, energy, context, space, num, repeats):
    each = [log_weights(energy, draw(base, context, num, space, Rng(5).child(r))) for r in range(repeats)]
    return torch.stack([lw.exp().mean() for lw in each])


def measure(name, base, energy, space, num, repeats):
    context = Sequences.from_lists([[2, 1, 2]])
    found = [estimates(draw, base, energy, context, space, num, repeats) for draw in DRAWINGS]
    again = torch.randint(repeats, (1000, repeats), generator=torch.Generator().manual_seed(0))
    row = {"model": name, "length": space.length, "draws": num, "variance": relative(found[0]).item()}
    for draw, values in zip(DRAWINGS[1:], found[1:], strict=True):
        ratios = relative(values[again]) / relative(found[0][again])
        low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=ratios.dtype)).tolist()
        row[draw.__name__] = {"ratio": (relative(values) / relative(found[0])).item(), "interval": [low, high]}
    return row


def cases(folder):
    for V, length in ((8, 2), (8, 6), (64, 4)):
        base = TabularLM.random(Rng(1), vocab_size=V, order=1)
        for first in (1.0, 4.0):
            yield f"table of {V} tokens, first pair × {first:.0f}", base, Bigrams(V, 0.5, first), length
    if folder:
        for length in (1, 3, 8):
            yield "stories260K", stories(folder), Bigrams(512, 0.3, 1.0), length


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--stories", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name, base, energy, length in cases(arguments.stories):
        space = SequenceSpace(vocab_size=base.vocab_size, length=length)
        rows.append(measure(name, base, energy, space, 64, arguments.repeats))
        ways = [
            f"{draw.__name__} {found['ratio']:.3f} ({found['interval'][0]:.3f} – {found['interval'][1]:.3f})"
            for draw, found in ((draw, rows[-1][draw.__name__]) for draw in DRAWINGS[1:])
        ]
        print(f"{name}, {length} tokens, 64 draws: {', '.join(ways)}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"repeats": arguments.repeats, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
