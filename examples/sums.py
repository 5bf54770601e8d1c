"""A task where right and wrong can be decided: sums.

    P(x | c) ∝ P_LM(x | c) · e^{−E(c, x)},        c = "347+589=",   x = "0936" and an end

    python examples/sums.py [--quick] [--seed 0] [--json] [--plot docs/figures/sums.png]

The base is a small transformer that was not trained for long, so its answers are nearly right and rarely right. The
energy E = α·(log P_LM − log Q) + w·pool(h_Q) + b, with Q at first a copy of the base, learns to distinguish right sums
from the base's own (ranking noise-contrastive estimation, fresh negatives at every step). Then n candidates are drawn
from the base and one is taken with probability proportional to e^{−E}. The share of right answers must rise from that
of the base (n = 1) towards the share of problems for which any of the n candidates is right, which is the ceiling.
Problems of the test are never seen in training.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, PreTrainedModel

from freenergy import Continuations, HuggingFaceLM, Rng, SequenceSpace
from freenergy.core.roles import Examples, Scores
from freenergy.energies.log_ratio import LogRatio, LogRatioEnergy
from freenergy.lm.presets import build
from freenergy.noise.from_lm import FromLM
from freenergy.objectives import RankingNCE

SYMBOLS = "$0123456789+="  # $ is the end
EOS = 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How large, and for how long."""

    digits: int = 3
    layers: int = 2
    width: int = 64
    base_steps: int = 1000  # at most
    base_loss: float = 0.5  # nats a symbol: it stops here, since how long that takes differs from seed to seed
    base_batch: int = 128
    base_rate: float = 3e-3
    energy_steps: int = 700
    energy_batch: int = 32
    energy_rate: float = 1.5e-3
    negatives: int = 7
    test: int = 400
    candidates: tuple[int, ...] = (1, 4, 16, 64, 256)

    @property
    def space(self) -> SequenceSpace:
        """Answers that end."""
        return SequenceSpace(vocab_size=len(SYMBOLS), length=self.digits + 2, eos=EOS)


QUICK = Settings(width=48, energy_steps=300, energy_rate=1e-3, negatives=3, test=300, candidates=(1, 4, 16))


def encode(text: str) -> list[int]:
    return [SYMBOLS.index(symbol) for symbol in text]


def is_for_test(problem: Tensor, digits: int) -> Tensor:
    """One problem in ten, by its number alone."""
    return (problem[:, 0] * 10**digits + problem[:, 1]) % 97 % 10 == 0


def problems(rng: Rng, num: int, digits: int, *, test: bool) -> Tensor:
    """Pairs of numbers [num, 2] to add up."""
    drawn = (rng.uniform(20 * num + 200, 2) * 10**digits).long()
    return drawn[is_for_test(drawn, digits) == test][:num]


def solved(pairs: Tensor, digits: int) -> Continuations:
    """Every problem with its right answer."""
    contexts = [encode(f"{a:0{digits}d}+{b:0{digits}d}=") for a, b in pairs.tolist()]
    return Continuations.from_lists(contexts, [[encode(f"{a + b:0{digits + 1}d}$")] for a, b in pairs.tolist()])


def descend(
    module: nn.Module, rate: float, steps: int, loss: Callable[[int], Tensor], label: str, enough: float = 0.0
) -> None:
    """Adam; the learning rate rises over 50 steps and falls over the last fifth. It stops when the loss is enough."""
    optimiser = torch.optim.Adam(module.parameters(), betas=(0.9, 0.98))
    mean = math.inf
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, step / 50, 5 * (1 - step / (steps + 1)))
        optimiser.zero_grad()
        value = loss(step)
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        mean = value.item() if step == 1 else 0.9 * mean + 0.1 * value.item()
        if step % 100 == 0 or mean < enough:
            print(f"{label} step {step}: mean loss {mean:.3f}", file=sys.stderr, flush=True)
        if mean < enough:
            break


def train_base(settings: Settings, rng: Rng) -> HuggingFaceLM:
    """Next-symbol prediction of the answers, and not for long."""
    config = GPT2Config(
        vocab_size=len(SYMBOLS), n_embd=settings.width, n_layer=settings.layers, n_head=4, n_positions=16,
        bos_token_id=EOS, eos_token_id=EOS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.1,  # for so narrow a network the usual 0.02 starts slowly
        tie_word_embeddings=False,
    )  # fmt: skip
    model: PreTrainedModel = build(config, rng.child("weights"))

    def loss(step: int) -> Tensor:
        x = solved(problems(rng.child("step", step), settings.base_batch, settings.digits, test=False), settings.digits)
        tokens, start = x.joined().tokens, x.contexts.tokens.shape[1]
        logits = model(tokens[:, :-1], use_cache=False).logits[:, start - 1 :]
        return cross_entropy(logits.flatten(0, 1), tokens[:, start:].flatten())

    descend(model, settings.base_rate, settings.base_steps, loss, "base", settings.base_loss)
    return HuggingFaceLM(model, eos=EOS)


def train_energy(base: HuggingFaceLM, settings: Settings, rng: Rng) -> LogRatio:
    """A copy Q of the base, held against it, learns to distinguish right answers from the base's."""
    energy = LogRatio(LogRatioEnergy(alpha=1.0, pool="sum"), base)
    source, objective, B = FromLM(base, settings.space), RankingNCE(), settings.energy_batch

    def loss(step: int) -> Tensor:
        data = solved(problems(rng.child("step", step), B, settings.digits, test=False), settings.digits)
        rows = torch.arange(step * B, (step + 1) * B)
        _, draws = source.draw(None, {}, Examples(data, rows), settings.negatives, rng.child("negatives"))
        energies = energy(Continuations.cat([data, draws.x], dim=1))
        return objective(Scores.relative(energies[:, :1]), Scores.relative(energies[:, 1:])).value

    descend(energy, settings.energy_rate, settings.energy_steps, loss, "energy")
    return energy.eval()


@torch.no_grad()
def answers(base: HuggingFaceLM, energy: LogRatio, settings: Settings, rng: Rng) -> tuple[Tensor, Tensor]:
    """Energy and rightness of the largest number of candidates, for every problem of the test."""
    data = solved(problems(rng.child("problems"), settings.test, settings.digits, test=True), settings.digits)
    energies, rights = [], []
    for first in range(0, settings.test, 10):
        some = data[first : first + 10]
        stream = rng.child("candidates").shift(contexts=first)
        x = base.sample(some.contexts, max(settings.candidates), settings.space, stream).x
        energies.append(energy(x))
        rights.append((x.tokens == some.tokens).all(-1))  # both are padded to the longest answer with ends
    return torch.cat(energies), torch.cat(rights)


def measure(energies: Tensor, right: Tensor, settings: Settings, rng: Rng) -> Iterator[dict[str, float]]:
    """Right answers after resampling among the first n candidates, and the most that any choice could have.

    ``flipped`` is a control: resampling with e^{+E} must find fewer than the base.
    """
    for n in settings.candidates:
        share = chosen_right(-energies[:, :n], right, rng.child("choice", n))
        flipped = chosen_right(energies[:, :n], right, rng.child("flipped", n))
        ceiling = right[:, :n].any(1).double().mean().item()
        error = math.sqrt(share * (1 - share) / settings.test)  # binomial
        yield {"n": n, "right": share, "error": error, "ceiling": ceiling, "flipped": flipped}


def chosen_right(log_weight: Tensor, right: Tensor, rng: Rng) -> float:
    """The share of right answers when one candidate of each problem is taken by weight."""
    chosen = rng.categorical(log_weight.double())
    return right.gather(1, chosen.unsqueeze(1)).double().mean().item()


def run(settings: Settings, seed: int) -> dict[str, object]:
    """Train both, measure."""
    torch.set_num_threads(1)  # such small tensors gain nothing from more, and one thread gives the same bits anywhere
    rng, started = Rng(seed), time.monotonic()
    base = train_base(settings, rng.child("base"))
    energy = train_energy(base, settings, rng.child("energy"))
    energies, right = answers(base, energy, settings, rng.child("test"))
    rows = list(measure(energies, right, settings, rng.child("test")))
    floor = right.double().mean().item()
    seconds = round(time.monotonic() - started, 1)
    return {"digits": settings.digits, "problems": settings.test, "seed": seed, "floor": floor, "rows": rows,
            "seconds": seconds}  # fmt: skip


def table(result: dict) -> str:
    lines = [f"sums of {result['digits']}-digit numbers, {result['problems']} problems; the base alone: "
             f"{result['floor']:.1%} right"]  # fmt: skip
    lines += ["", "  n   right after resampling   any of n is right"]
    for row in result["rows"]:
        lines.append(f"{row['n']:3d}   {row['right']:7.1%} ± {row['error']:.1%}          {row['ceiling']:7.1%}")
    return "\n".join(lines)


def plot(result: dict, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    n = [row["n"] for row in result["rows"]]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    errors = [1.96 * row["error"] for row in result["rows"]]
    axes.plot(n, [row["ceiling"] for row in result["rows"]], "--", color="grey", label="any of n is right (ceiling)")
    axes.errorbar(n, [row["right"] for row in result["rows"]], errors, marker="o", capsize=3, label="resampled")
    axes.axhline(result["floor"], linestyle=":", color="black", label="base")
    axes.set(xscale="log", xlabel="candidates n", ylabel="share of right sums", ylim=(0, 1))
    axes.set_xticks(n, [str(number) for number in n])
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller and shorter: less than a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", type=Path, help="write a picture (needs matplotlib)")
    arguments = parser.parse_args()
    result = run(QUICK if arguments.quick else Settings(), arguments.seed)
    print(json.dumps(result) if arguments.json else table(result))
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
