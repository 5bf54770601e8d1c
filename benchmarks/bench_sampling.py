"""Sampling n continuations of one prefix: ours beside what a user would do otherwise, in one process, interleaved.

    python benchmarks/bench_sampling.py [--rounds 3] [--out benchmarks/results/sampling.json]

The alternative is ``model.generate(num_return_sequences=n)`` of transformers, without its log-probabilities. Machines
are noisy, so only ratios are reported: the median over interleaved rounds, with the smallest and the largest.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from freenergy import HuggingFaceLM, Rng, Sequences, SequenceSpace
from freenergy.base.presets import build

PREFIX, LENGTH, VOCABULARY = 120, 40, 8000


def model():
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return build(config, Rng(0)).eval()


def ours(lm, context, num):
    space = SequenceSpace(vocab_size=VOCABULARY, length=LENGTH)
    return lm.sample(Sequences(context, torch.tensor([PREFIX])), num, space, Rng(0)).x.tokens


@torch.no_grad()
def theirs(lm, context, num):
    options = {"do_sample": True, "top_k": 0, "min_new_tokens": LENGTH, "max_new_tokens": LENGTH, "pad_token_id": 0}
    return lm.model.generate(
        context, attention_mask=torch.ones_like(context), num_return_sequences=num, eos_token_id=None, **options
    )


def seconds(function, *arguments):
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def measure(lm, num, rounds):
    context = torch.randint(1, VOCABULARY, (1, PREFIX), generator=torch.Generator().manual_seed(0))
    ours(lm, context, 2), theirs(lm, context, 2)  # warm
    ratios = [seconds(theirs, lm, context, num) / seconds(ours, lm, context, num) for _ in range(rounds)]
    return {"n": num, "ratio": statistics.median(ratios), "smallest": min(ratios), "largest": max(ratios)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lm = HuggingFaceLM(model(), eos=0)
    rows = [measure(lm, num, arguments.rounds) for num in (16, 64, 256)]
    for row in rows:
        print(f"n = {row['n']}: {row['ratio']:.1f}× generate ({row['smallest']:.1f} – {row['largest']:.1f})")
    if arguments.out:
        result = {"prefix": PREFIX, "length": LENGTH, "vocabulary": VOCABULARY, "threads": torch.get_num_threads()}
        arguments.out.write_text(json.dumps(result | {"rounds": arguments.rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
