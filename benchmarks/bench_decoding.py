"""Sampling n candidates of one prefix: the fast decoder beside what a user would do otherwise, interleaved.

    OMP_NUM_THREADS=2 python benchmarks/bench_decoding.py [--quick] [--only six] [--out benchmarks/results/decoding.json]

Others: ``model.generate(num_return_sequences=n)`` of transformers, which gives no log-probabilities, and CTranslate2 in
float32 and int8 where it is installed. Machines are noisy and shared, so only ratios of neighbours in time are
reported: the median over interleaved rounds, with the smallest and the largest. ``share`` is the part of the speed of
a large matrix product, measured in the same round, that all products of the step reach. Memory is the peak beside the
weights, each measured in a process of its own.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import GPT2Config, LlamaConfig

from freenergy import Rng, Sequences, SequenceSpace
from freenergy.base.decoding.opening import Decoder, read
from freenergy.base.decoding.sampling import sample
from freenergy.base.presets import build
from freenergy.base.stepping import in_chunks
from freenergy.protocols import ANCESTRAL

PREFIX, LENGTH = 120, 40
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
MODELS = {
    "six": lambda: LlamaConfig(
        vocab_size=8000, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
        max_position_embeddings=256, tie_word_embeddings=True, **SPECIAL,
    ),
    "gpt2-small": lambda: GPT2Config(**SPECIAL),
    "llama-135m": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, **SPECIAL,
    ),
}  # fmt: skip
CASES = [("six", 256), ("six", 1024), ("gpt2-small", 64), ("gpt2-small", 256), ("llama-135m", 64)]
QUICK = [("six", 256), ("gpt2-small", 64)]
MANY = 10_000  # candidates whose cost and memory are looked at, of the smallest model


def ways(model, folder):
    """Functions of a prefix and n, by name."""
    found = {"generate": lambda prefix, n: generate(model, prefix, n)}
    for name, compiled in (("plain", False), ("compiled", True)):
        decoder = Decoder.of(model, compiled=compiled)
        found[name] = lambda prefix, n, decoder=decoder: ours(decoder, prefix, n)
    if folder is not None and model.config.model_type == "llama":
        found |= ctranslate2_ways(model, folder)
    return found


@torch.no_grad()
def generate(model, prefix, n):
    model.generate(
        prefix, attention_mask=torch.ones_like(prefix), num_return_sequences=n, do_sample=True, top_k=0,
        min_new_tokens=LENGTH, max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def ours(decoder, prefix, n):
    """Draws with log-probabilities, in chunks, as ``HuggingFaceLM.sample`` makes them."""
    contexts = Sequences(prefix, torch.tensor([prefix.shape[1]]))
    space = SequenceSpace(vocab_size=decoder.model.config.vocab_size, length=LENGTH)
    with torch.no_grad():
        first = read(decoder.model, contexts, ())
    return in_chunks(
        lambda some: lambda count: decoder.stepper(first, count, LENGTH), contexts, n, space, Rng(0), ANCESTRAL,
        rows=decoder.rows_at_once(LENGTH), draw=sample,
    )  # fmt: skip


def ctranslate2_ways(model, folder):
    try:
        import ctranslate2
        from ctranslate2.converters.transformers import LlamaLoader
    except ImportError:
        return {}
    names = [f"<{i}>" for i in range(model.config.vocab_size)]
    spec = LlamaLoader().get_model_spec(model)
    spec.register_vocabulary(names)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = names[0]
    spec.validate()
    spec.save(folder)
    found = {}
    for kind in ("float32", "int8"):
        generator = ctranslate2.Generator(folder, compute_type=kind, intra_threads=torch.get_num_threads())
        for batch in (64, 256):
            found[f"ctranslate2 {kind}, batches of {batch}"] = translator(generator, names, batch)
    return found


def translator(generator, names, batch):
    def run(prefix, n):
        start = [names[token] for token in prefix[0].tolist()]
        generator.generate_batch(
            [start] * n, max_batch_size=batch, max_length=LENGTH, min_length=LENGTH, sampling_topk=0,
            include_prompt_in_result=False, return_scores=True, end_token=[],
        )  # fmt: skip

    return run


def seconds(function, *arguments):
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def gemm_speed():
    """Operations a second of a large matrix product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / min(seconds(torch.mm, a, b) for _ in range(5))


def operations(model, n):
    """Of all products in n continuations, the prefix left out."""
    config = model.config
    inside = sum(
        w.numel() for name, w in model.named_parameters() if w.dim() == 2 and ".layers." in name or ".h." in name
    )
    products = inside + config.vocab_size * config.hidden_size
    attention = 2 * config.num_hidden_layers * config.hidden_size * (PREFIX + LENGTH / 2)
    return 2 * (products + attention) * n * LENGTH


def measure(name, n, rounds):
    """Interleaved rounds of every way."""
    model = make(name)
    prefix = torch.randint(1, model.config.vocab_size, (1, PREFIX), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        functions = ways(model, folder)
        for function in functions.values():
            function(prefix, 2)  # warm
        taken = {way: [] for way in functions}
        peaks = []
        for _ in range(rounds):
            peaks.append(gemm_speed())
            for way, function in functions.items():
                taken[way].append(seconds(function, prefix, n))
    work = operations(model, n)
    rows = []
    for way, times in taken.items():
        ratios = [theirs / own for theirs, own in zip(taken["generate"], times, strict=True)]
        share = [work / time_ / peak for time_, peak in zip(times, peaks, strict=True)]
        rows.append({
            "model": name, "n": n, "way": way, "ratio": statistics.median(ratios), "smallest": min(ratios),
            "largest": max(ratios), "tokens_per_second": n * LENGTH / statistics.median(times),
            "share": statistics.median(share),
        })  # fmt: skip
    return rows


def make(name):
    return build(MODELS[name](), Rng(0)).eval().requires_grad_(False)


def peak_beside_weights(name, way, n):
    """Megabytes, in this process: call it in a fresh one."""
    model = make(name)
    prefix = torch.randint(1, model.config.vocab_size, (1, PREFIX), generator=torch.Generator().manual_seed(0))
    function = ways(model, None)[way]
    function(prefix, 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = peak()
    function(prefix, n)
    return peak() - before


def peak():
    status = Path("/proc/self/status")
    if not status.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def memory(name, n, which):
    rows = []
    for way in which:
        command = [sys.executable, __file__, "--peak", name, way, str(n)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows.append({"model": name, "n": n, "way": way, "megabytes": float(out)})
    return rows


def many(rounds):
    """Cost of a candidate at large n beside that at n = 256."""
    model = make("six")
    prefix = torch.randint(1, model.config.vocab_size, (1, PREFIX), generator=torch.Generator().manual_seed(0))
    rows = []
    for way, function in ways(model, None).items():
        if way != "generate":
            few = [seconds(function, prefix, 256) / 256 for _ in range(rounds)]
            lot = seconds(function, prefix, MANY) / MANY
            few += [seconds(function, prefix, 256) / 256 for _ in range(rounds)]
            rows.append({"way": way, "n": MANY, "cost_beside_256": lot / statistics.median(few)})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer cases, no memory")
    parser.add_argument("--only", choices=list(MODELS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak", nargs=3, metavar=("MODEL", "WAY", "N"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        name, way, n = arguments.peak
        print(peak_beside_weights(name, way, int(n)))
        return
    cases = [case for case in (QUICK if arguments.quick else CASES) if arguments.only in (None, case[0])]
    result = {"prefix": PREFIX, "length": LENGTH, "threads": torch.get_num_threads(), "rounds": arguments.rounds}
    result |= {"rows": [], "memory": [], "many": []}
    for name, n in cases:
        for row in measure(name, n, arguments.rounds):
            result["rows"].append(row)
            print(
                f"{name} n = {n}, {row['way']}: {row['ratio']:.1f}× generate ({row['smallest']:.1f} – "
                f"{row['largest']:.1f}), {row['tokens_per_second']:.0f} tokens/s, {row['share']:.0%} of the GEMM peak",
                flush=True,
            )
    if not arguments.quick and arguments.only in (None, "six"):
        result["memory"] = memory("six", 1024, ["generate", "plain", "compiled"])
        result["memory"] += memory("six", MANY, ["plain", "compiled"])
        result["many"] = many(arguments.rounds)
        for row in result["memory"]:
            print(f"{row['model']} n = {row['n']}, {row['way']}: {row['megabytes']:.0f} MB beside the weights")
        for row in result["many"]:
            print(f"six n = {row['n']}, {row['way']}: a candidate costs {row['cost_beside_256']:.2f} of one at n = 256")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
