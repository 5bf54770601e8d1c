"""Sampling n candidates of one prefix with log-probabilities: ours beside what a user would do otherwise.

    python benchmarks/bench_decoding.py [--rounds 3] [--quick] [--continue] [--out benchmarks/results/decoding.json]

120 tokens of prefix and 40 of continuation unless the case says otherwise. What is compared is in ``ways``, how in
``measuring``. Memory is the peak beside weights and prefix, each way in a process of its own.
"""

import statistics
import tempfile
from functools import partial

import measuring
import ways
from ways import LENGTH, OURS, PREFIX

CASES = [("six", 1), ("six", 16), ("six", 64), ("six", 256), ("gpt2-small", 64), ("llama-135m", 64), ("six", 1024),
         ("gpt2-small", 256)]  # fmt: skip
QUICK = [("six", 16), ("six", 256)]
ROUNDS = {("six", 1024): 2, ("gpt2-small", 256): 2}  # at most: a round takes minutes
NEEDS = {  # how many times as fast as generate
    ("six", 256): {"ours": 6, "ours, fused": 10},
    ("six", 1024): {"ours": 9, "ours, fused": 13},
    ("gpt2-small", 64): {"ours": 3.5, "ours, fused": 5.5},
    ("gpt2-small", 256): {"ours": 5.5, "ours, fused": 8},
    ("llama-135m", 64): {"ours": 3},
}
RIVAL = {("six", 256): ((1, 64), (2, 32), (2, 64), (2, 128))}  # CTranslate2's settings
LEFT_OUT = {
    **{("six", n): ["ours, fused"] for n in (1, 16)},  # for so few candidates these are the plain steps
    **{key: ["expanded cache"] for key in (("gpt2-small", 256), ("six", 1024))},  # minutes, and nothing new
}
IN_PARTS = (("six", 256), ("six", 1024))  # where generate is also called for 64 candidates at a time
MANY = 10_000
PREFIXES, VOCABULARIES = (0, 30, 120, 480, 1000), (1000, 4000, 16_000, 64_000)
CURVE = {"ours": 256, "ours, fused": 256, "expanded cache": 32}  # candidates drawn for a point


def cases(quick):
    found = {f"{name}, n = {n}": partial(decoding, name, n) for name, n in (QUICK if quick else CASES)}
    if not quick:
        found["falling back"] = falling_back
        found["six, memory"] = memory
        found[f"six, n = {MANY}"] = many
        found["prefix length"] = lambda rounds: curve("prefix length", PREFIXES, rounds)
        found["vocabulary"] = lambda rounds: curve("vocabulary", VOCABULARIES, rounds)
    return found


def measure(rounds, quick):
    return [row for case in cases(quick).values() for row in case(rounds)]


def decoding(name, n, rounds):
    """One model, one n: every way."""
    key, model = (name, n), ways.made(ways.MODELS[name]())
    prefix = ways.prefix_of(model)
    with tempfile.TemporaryDirectory() as folder:
        drawing = {way: make(model) for way, make in ways.WAYS.items() if way not in LEFT_OUT.get(key, ())}
        if key in IN_PARTS:
            drawing["generate, 64 at once"] = partial(ways.in_parts, drawing["generate"], 64)
        drawing |= ways.ctranslate2_ways(model, folder, RIVAL.get(key, ()))
        calls, warm = ({way: partial(draw, prefix, m) for way, draw in drawing.items()} for m in (n, min(n, 4)))
        times, peaks = measuring.with_peak(calls, min(rounds, ROUNDS.get(key, rounds)), warm)
    case, work = f"{name}, n = {n}", operations(model, n)
    rows = []
    for way, found in measuring.compared(times, "generate").items():
        middle = statistics.median(times[way])
        row = {"case": case, "way": way, "tokens_per_second": n * LENGTH / middle, "milliseconds": 1000 * middle / n}
        rows.append(row | found | {"share": measuring.share(work, times[way], peaks)} | promised(key, way))
        if name == "six" and "CTranslate2" not in way:
            rows[-1] |= {"curve": "candidates", "at": n}
    return rows + against_ctranslate2(case, times)


def falling_back(rounds):
    """What an architecture costs whose steps we do not know; the ratio is to one that we know."""
    model, n = ways.made(ways.six()), 16
    prefix, drawing = ways.prefix_of(model), ways.fallbacks(model)
    calls, warm = ({way: partial(draw, prefix, m) for way, draw in drawing.items()} for m in (n, 1))
    times = measuring.interleaved(calls, rounds, warm)
    found = measuring.compared(times, "own steps")
    speeds = {way: n * LENGTH / statistics.median(times[way]) for way in times}
    case = f"six, n = {n}, falling back"
    return [{"case": case, "way": way, "tokens_per_second": speeds[way]} | found[way] for way in times]


def promised(key, way):
    found = {"needs": NEEDS[key][way]} if way in NEEDS.get(key, {}) else {}
    return found | ({"needs_share": 0.6} if (key, way) == (("gpt2-small", 256), "ours, fused") else {})


def against_ctranslate2(case, times):
    """Ours beside its best setting."""
    theirs = [way for way in times if "CTranslate2" in way]
    if not theirs:
        return []
    best = min(theirs, key=lambda way: statistics.median(times[way]))
    found = measuring.compared({way: times[way] for way in (best, *OURS)}, best)
    about = {"case": f"{case}, against the best CTranslate2", "best": best}
    rows = [about | {"way": way} | found[way] for way in OURS]
    if case == "six, n = 256":
        rows[-1]["needs"] = 1.3
    return rows


def operations(model, n):
    """Of all products in n continuations; the last token is drawn and not read, the prefix is left out."""
    config = model.config
    matrices = [(name, w) for name, w in model.named_parameters() if w.dim() == 2]
    inside = sum(w.numel() for name, w in matrices if ".layers." in name or ".h." in name)
    products = inside + config.vocab_size * config.hidden_size
    attention = 2 * config.num_hidden_layers * config.hidden_size * (PREFIX + LENGTH / 2)
    return 2 * (products + attention) * n * (LENGTH - 1)


def memory(rounds):
    """Peak beside the weights at n = 1,024."""
    found = {way: measuring.peak_memory(__file__, "--peak", way, "1024") for way in ("generate", *OURS)}
    rows = []
    for way, megabytes in found.items():
        ratio = found["generate"] / megabytes
        row = {"case": "six, n = 1024, memory", "way": way, "megabytes": megabytes}
        rows.append(row | {"ratio": ratio, "smallest": ratio, "largest": ratio} | ({"needs": 7} if way in OURS else {}))
    return rows


def many(rounds):
    """Ten thousand candidates: peak memory, and the cost of one beside that at n = 256."""
    rows = []
    for way in OURS:
        megabytes, lot, *few = measuring.told(__file__, "--peak", way, str(MANY), "256")
        ratios = [one / 256 / (lot / MANY) for one in few]
        rows.append({
            "case": f"six, n = {MANY}, cost of one beside n = 256", "way": way, "ratio": statistics.median(ratios),
            "smallest": min(ratios), "largest": max(ratios), "needs": 1 / 1.1, "megabytes": megabytes,
            "at_most_megabytes": 1000, "curve": "candidates", "at": MANY, "milliseconds": 1000 * lot / MANY,
            "tokens_per_second": MANY * LENGTH / lot,
        })  # fmt: skip
    return rows


def peak(way, n, beside=None):
    """In a process of its own: megabytes and seconds of n candidates, then seconds of ``beside``, before and after."""
    model = ways.made(ways.six())
    prefix = ways.prefix_of(model)
    ways.WAYS[way](model)(prefix, 2)
    draw = ways.WAYS[way](model)
    few = [measuring.seconds(lambda: draw(prefix, int(beside))) for _ in range(4 if beside else 0)]
    draw, taken = ways.WAYS[way](model), []  # anew, so that copies of weights that it makes for itself are counted
    megabytes = measuring.growth(lambda: taken.append(measuring.seconds(lambda: draw(prefix, int(n)))))
    few += [measuring.seconds(lambda: draw(prefix, int(beside))) for _ in range(4 if beside else 0)]
    return [megabytes, *taken, *few]


def curve(what, values, rounds):
    """The cost of a candidate against the prefix's length or the vocabulary; the ratio is to the first value."""
    rows = []
    for way, n in CURVE.items():
        points = {value: point(what, value, way) for value in values}
        calls, warm = ({value: partial(draw, m) for value, draw in points.items()} for m in (n, 4))
        times = measuring.interleaved(calls, min(rounds, 2), warm)
        for value, found in measuring.compared(times, values[0]).items():
            row = {"case": f"six, {what} {value}", "way": way, "curve": what, "at": value}
            rows.append(row | {"milliseconds": 1000 * statistics.median(times[value]) / n} | found)
    return rows


def point(what, value, way):
    """A function of n."""
    model = ways.made(ways.six(room=1088) if what == "prefix length" else ways.six(vocabulary=value))
    prefix = ways.prefix_of(model, value if what == "prefix length" else PREFIX)
    if way == "expanded cache" and not prefix.numel():
        prefix = prefix.new_zeros(1, 1)  # a language model of transformers reads one token at least
    return partial(ways.WAYS[way](model), prefix)


if __name__ == "__main__":
    measuring.main(measure, "decoding", cases, peak)
