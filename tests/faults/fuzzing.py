"""Mutated recipes, JSON lines and checkpoints through the command line: ``python fuzzing.py WORLD FIRST COUNT``.

    seed  →  a kind of input, a mutation, a command  →  status 0 or 2, one sentence, no traceback, an end

Prints one JSON object: how often which status came, and every case that broke the rule with its seed. Runs without the
tests' own checks of types, as users do. Each batch is a fork: a crash, a hang or a bomb of memory costs one batch, and
its seed is told.
"""

import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import tomllib
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

os.environ["FREENERGY_WORKERS"] = "local:1"
sys.path.insert(0, str(Path(__file__).parent))
from mutating import mutate_bytes, mutate_file, mutate_lines, nasty, places, toml

from freenergy import cli
from freenergy.core.errors import UserError
from freenergy.recipes.load import EXPERIMENTS, RECIPES

TEXT = "few.jsonl"
BATCH = 50
SECONDS = 60  # after which a case hangs
MEMORY = 6 << 30  # bytes of address space beyond what the process has
KINDS = ["recipe", "recipe", "set", "set", "experiment", "text", "lists", "prefixes", "run", "run"]
LISTS = [
    {
        "id": "a",
        "prefix": "The class",
        "candidates": [" is", " was"],
        "scores": {"acoustic": [0.5, 1]},
        "reference": "it is",
    },
    {"prefix": "Return", "candidates": [" it", " that"], "scores": {"acoustic": [0, -1.5]}, "reference": " it"},
    {"candidates": ["x", "y", "y"], "scores": {"acoustic": [0.5, 1, 1e3]}, "document": 3, "reference": "y z"},
]
PREFIXES = [{"prefix": "The"}, {"prefix": ""}, {"prefix": "ß 漢字", "id": 3}]


def call(arguments):
    """The command line in this process: status and everything that it said."""
    sys.argv, out = ["freenergy", *map(str, arguments)], io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
    return status, out.getvalue()


def make_case(seed, world, folder):
    """The command of a seed; what it reads is in ``folder``."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    os.link(world / TEXT, folder / TEXT)  # recipes name it without a folder, so that a seed is the same input anywhere
    made = {"recipe": _recipe, "set": _set, "experiment": _experiment, "text": _text, "lists": _lists,
            "prefixes": _prefixes, "run": _run}[kind](rng, world, folder)  # fmt: skip
    return kind, made + (["--json"] if rng.random() < 0.3 else [])


def _recipe(rng, world, folder):
    path = folder / "mutated.toml"
    path.write_bytes(mutate_bytes(rng.choice(_templates(world)).encode(), rng))
    return ["run", path, "--out", folder / "out", "--stage", "corpus"]


def _set(rng, world, folder):
    path = folder / "given.toml"
    path.write_text(rng.choice(_templates(world)))
    return ["run", path, "--out", folder / "out", "--stage", "corpus", *_changes(rng, path)]


def _experiment(rng, world, folder):
    path = folder / "mutated.toml"
    text = rng.choice([each.read_text() for each in sorted(EXPERIMENTS.glob("*.toml"))])
    path.write_text(text)
    changes = _changes(rng, path)
    if rng.random() < 0.5:
        path.write_bytes(mutate_bytes(text.encode(), rng))
    return ["experiment", path, "--out", folder / "out", *changes]


def _changes(rng, path):
    """A value or two of other kinds than the recipe's."""
    table, words = tomllib.loads(path.read_text()), []
    for _ in range(rng.choice([1, 1, 2])):
        keys = [place for place in places(table) if place and all(isinstance(key, str) for key in place)]
        place = rng.choice(keys)
        if rng.random() < 0.2:
            place = (*place[:-1], rng.choice(["x", "kind", "preset", "start", "path", "order", "steps", "layers"]))
        value = "[" * 3000 + "]" * 3000 if rng.random() < 0.01 else toml(nasty(rng))
        words += ["--set", f"{'.'.join(place)}={value}"]
    return words


def _templates(world):
    """Recipes that have every section, with the small text as their corpus."""
    text = (world / "recipe.toml").read_text()
    wide = (RECIPES / "wikitext-baselines.toml").read_text().replace('"wikitext-2"', f'"{TEXT}"')
    wide = wide.replace("fallback", "validation_share = 0.2\ntest_share = 0.2\nfallback")
    return [text, wide.replace("vocab_size = 4096", "vocab_size = 300").replace("120", "12").replace("40", "4")]


def _text(rng, world, folder):
    path = folder / rng.choice(["text.jsonl", "text.jsonl", "text.jsonl", "text.txt", "text.jsonl.gz", "text.parquet"])
    data = (world / TEXT).read_bytes()
    path.write_bytes(mutate_lines(data, rng) if rng.random() < 0.5 else mutate_bytes(data, rng))
    recipe = folder / "given.toml"
    recipe.write_text((world / "recipe.toml").read_text())
    return ["run", recipe, "--out", folder / "out", "--stage", "corpus", "--set", f'corpus.source="{path}"']


def _mutated_lines(rng, rows, path):
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(mutate_lines(data, rng) if rng.random() < 0.6 else mutate_bytes(data, rng))
    return path


def _lists(rng, world, folder):
    path = _mutated_lines(rng, LISTS[: rng.choice([1, 3])], folder / "lists.jsonl")
    more = rng.choice(
        [[], ["--ends"], ["--weight", "acoustic=0.5"], ["--tune", path], ["--out", folder / "ranked.jsonl"]]
    )
    return ["score", world / "counted", path, *more]


def _prefixes(rng, world, folder):
    path = _mutated_lines(rng, PREFIXES, folder / rng.choice(["prefixes.jsonl", "prefixes.txt"]))
    return ["sample", world / "counted", "--prefixes", path, "--num", 1, "--candidates", 2, "--length", 2]


def _run(rng, world, folder):
    """A run, one of whose files is damaged."""
    of = rng.choice(["counted", "counted", "trained"])
    run = Path(shutil.copytree(world / of, folder / "run", copy_function=os.link))
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix not in (".svg", ".png", ".html"))
    files = [path for path in files if path.name != ".lock"]
    mutate_file(rng.choice(files), rng)
    return rng.choice(_commands(run, world, of))


def _commands(run, world, of):
    sample = ["sample", run, "--prefix", "The", "--num", 1, "--candidates", 2, "--length", 2]
    again = ["run", world / f"{of}.toml", "--out", run, "--stage", "evaluation"]
    other = ["evaluate", run, "--windows", 2, "--candidates", 4]
    changed = [*again, "--set", "training.l2=[0.25]"]  # what was computed for the energy before is read again
    asked = [["evaluate", run], ["score", run, world / "lists.jsonl"], ["cite", run], ["report", run]]
    return [sample, sample, again, changed, other, [*other, "--baselines"], ["verify", run], *asked]


def make_world(world):
    """Two finished runs and the small texts, made once."""
    os.chdir(world)
    (world / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LISTS))
    for name in ("counted", "trained"):
        text = (world / f"{name}.toml").read_text()
        if name == "counted":
            (world / "recipe.toml").write_text(text)
        if not (world / name / "evaluation" / "stage.json").is_file():
            status, said = call(["run", world / f"{name}.toml", "--out", world / name, "--stage", "evaluation"])
            assert status == 0, said
    for command in _commands(world / "trained", world, "trained"):
        assert call(command)[0] == 0, command  # and what they import is there in all forks
    import freenergy.runs.sweep.run as running

    def enough(experiment, out, *, progress):
        raise UserError("this experiment is good: it would be done now")

    running.run_sweep = enough


def judge(status, said):
    """What is wrong with an answer, or nothing."""
    if status not in (0, 2):
        return f"status {status}"
    if "Traceback" in said:
        return "a traceback"
    if status == 2 and "freenergy: " not in said and "Usage" not in said:
        return "no sentence"
    return ""


def batch(world, seeds, report):
    """In a fork: one line a case, before it and after it."""
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with report.open("a") as file:
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
                signal.alarm(SECONDS)
                print(json.dumps({"seed": seed}), file=file, flush=True)
                kind, arguments = make_case(seed, world, Path(folder))
                os.chdir(folder)
                status, said = call(arguments)
                os.chdir("/")
                signal.alarm(0)
            found = {"seed": seed, "kind": kind, "status": status, "wrong": judge(status, said)}
            if found["wrong"]:
                found |= {"command": " ".join(map(str, arguments))[:500], "said": said[-2500:]}
            print(json.dumps(found), file=file, flush=True)


def _address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def fuzz(world, first, count):
    """All cases; the seeds that a dead batch did not come to are begun again after the one that it died of."""
    report = world / f"report-{os.getpid()}.jsonl"
    counts, wrong, todo = Counter(), [], list(range(first, first + count))
    while todo:
        report.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            batch(world, todo[:BATCH], report)
            os._exit(0)
        _, code = os.waitpid(pid, 0)
        rows = [json.loads(line) for line in report.read_text().splitlines()]
        ended = [row for row in rows if "status" in row]
        counts.update(f"{row['kind']} {row['status']}" for row in ended)
        wrong += [row for row in ended if row["wrong"]]
        seen = {row["seed"] for row in rows}
        if code or len(ended) < len(seen):
            dead = sorted(seen - {row["seed"] for row in ended})
            wrong.append({"seed": dead, "wrong": f"ended by {os.waitstatus_to_exitcode(code)}: a crash or a hang"})
        todo = [seed for seed in todo if seed not in seen]
    return {"counts": dict(sorted(counts.items())), "wrong": wrong}


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    place, first, count = Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3])
    make_world(place)
    print(json.dumps(fuzz(place, first, count), indent=1))
