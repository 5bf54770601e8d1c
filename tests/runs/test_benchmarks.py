"""The benchmarks' own sums: what is compared with what, which falls are seen, and the run from end to end."""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from freenergy import __version__

FOLDER = Path(__file__).parents[2] / "benchmarks"


def module(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


measuring, comparing = module("measuring"), module("comparing")


def row(ratio, case="six, n = 256", way="ours", **more):
    return {"case": case, "way": way, "ratio": ratio, "smallest": ratio, "largest": ratio} | more


def test_ways_take_turns_and_the_order_turns_round():
    seen = []
    ways = {name: lambda name=name: seen.append(name) for name in "abc"}
    times = measuring.interleaved(ways, 3)
    assert "".join(seen) == "abc" + "abc" + "cba" + "abc"  # warm, then three rounds
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(value > 0 for values in times.values() for value in values)


def test_smaller_calls_may_warm():
    seen = []
    ways = {name: lambda name=name: seen.append(name) for name in "ab"}
    measuring.interleaved(ways, 1, {name: lambda name=name: seen.append(f"small {name}") for name in "ab"})
    assert seen == ["small a", "small b", "a", "b"]


def test_a_ratio_is_a_median_of_ratios_within_rounds():
    """The machine is ten times as slow in the second round: ratios of medians would say 1, 1 / 2 and so on."""
    times = {"theirs": [2.0, 40.0, 3.0], "ours": [1.0, 10.0, 1.0]}
    found = measuring.compared(times, "theirs")
    assert found["ours"] == {"ratio": 3.0, "smallest": 2.0, "largest": 4.0}
    assert found["theirs"] == {"ratio": 1.0, "smallest": 1.0, "largest": 1.0}
    assert measuring.share(60.0, times["ours"], [100.0, 10.0, 120.0]) == pytest.approx(0.6)


def test_memory_is_seen_and_what_was_there_before_is_not(tmp_path):
    script = tmp_path / "grows.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
        "import measuring, torch\n"
        "kept = torch.ones(20_000_000)\n"
        "print('words first')\n"
        "print(measuring.growth(lambda: torch.ones(10_000_000).sum()))\n"
    )
    assert measuring.peak_memory(script) == pytest.approx(38, abs=6)  # 40 MB in units of 2^20


def test_a_child_that_fails_says_why(tmp_path):
    (tmp_path / "bad.py").write_text("raise ValueError('out of luck')")
    with pytest.raises(RuntimeError, match="out of luck"):
        measuring.peak_memory(tmp_path / "bad.py")


@pytest.mark.parametrize(("now", "seen"), [(7.5, True), (8.5, False), (12.0, False)])
def test_a_fall_of_a_quarter_is_seen_and_of_a_seventh_is_not(now, seen):
    lines = comparing.regressions("decoding", [row(now)], [row(10.0)], whole=True)
    assert (lines == ["decoding: six, n = 256, ours fell by 25%, from 10.00× to 7.50×"]) is seen
    assert len(lines) == seen


def test_a_missing_case_is_named_unless_the_run_was_a_quick_one():
    then = [row(10.0), row(4.0, way="ours, fused")]
    assert comparing.regressions("decoding", [row(10.0)], then, whole=True) == [
        "decoding: six, n = 256, ours, fused was 4.00× and is missing"
    ]
    assert comparing.regressions("decoding", [row(10.0)], then, whole=False) == []


def test_promises():
    """Each kind of promise once kept and once broken."""
    kept = row(6.0, needs=6, share=0.6, needs_share=0.6, seconds=0.5, at_most_seconds=0.5, megabytes=900)
    assert comparing.unmet("decoding", [kept | {"at_most_megabytes": 1000}]) == []
    broken = kept | {"ratio": 5.9, "share": 0.55, "seconds": 0.6, "at_most_megabytes": 800}
    about = "decoding: six, n = 256, ours: "
    assert comparing.unmet("decoding", [broken]) == [
        about + "ratio 5.9, promised at least 6",
        about + "share 0.55, promised at least 0.6",
        about + "seconds 0.6, promised at most 0.5",
        about + "megabytes 900, promised at most 800",
    ]


def of(*rows, processor="a"):
    return {"a": {"rows": list(rows), "processor": processor}}


def test_the_last_lines():
    good, fine = comparing.last_lines(of(row(9.0), row(1.0, way="b")), of(row(10.0)), whole=True)
    assert (good, fine) == (["all promises are met", "all 1 ratios within 20 % of the committed ones"], True)
    first, fine = comparing.last_lines(of(row(9.0)), {"a": None}, whole=True)
    assert (first[-1], fine) == ("a: there are no committed results to compare with", True)
    bad, fine = comparing.last_lines(of(row(7.0, needs=8)), of(row(10.0)), whole=True)
    assert [line.split(":")[0] for line in bad] == ["promise not met", "regression"]
    assert not fine
    other, fine = comparing.last_lines(of(row(9.0)), of(row(10.0), processor="b"), whole=True)
    assert "a: the committed results are of another processor (b; this is a)" in other


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["sample", "--help"]])
def test_the_command_line_starts_without_heavy_modules(words):
    """What makes it quick, whatever the machine: none of the modules that take seconds is imported."""
    code = (
        "import sys\nfrom freenergy.cli import main\ntry:\n    main()\nexcept SystemExit as ended:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'scipy', 'pyarrow'} & set(sys.modules)\n"
        "    print(sorted(heavy), ended.code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.strip().splitlines()
    assert last == "[] 0"
    assert words != ["--version"] or first == f"freenergy {__version__}"


def test_a_run_is_opened_without_scipy_stats():
    code = "import sys\nimport freenergy.recipes.open_run\nprint('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


FAKE = """
import measuring

def cases(quick):
    return {"first": lambda rounds: [ROW | {"curve": "candidates", "at": 8, "milliseconds": 2.5, "megabytes": 12}],
            "second": lambda rounds: [ROW | {"case": "more", "needs": 2}] if RATIO else 1 / 0}

def measure(rounds, quick):
    return [row for case in cases(quick).values() for row in case(rounds)]

RATIO = %r
ROW = {"case": "fake", "way": "ours", "ratio": RATIO, "smallest": 1.0, "largest": 9.0, "share": 0.625}
measuring.main(measure, "fake", cases)
"""


@pytest.fixture
def benchmarks(tmp_path):
    """A folder of benchmarks with one that is made up, committed results beside it, and what runs them."""
    (tmp_path / "results").mkdir()
    committed = {"finished": ["first", "second"], "rows": [row(4.0, "fake"), row(4.0, "more")]}
    (tmp_path / "results" / "fake.json").write_text(json.dumps(committed))

    def run(ratio, *options):
        (tmp_path / "bench_fake.py").write_text(f"import sys; sys.path.insert(0, {str(FOLDER)!r})" + FAKE % ratio)
        line = [sys.executable, FOLDER / "run.py", "--benchmarks", tmp_path, *options]
        return subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False)

    return run


def test_a_run_from_end_to_end(benchmarks, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- written by make bench -->\nold\n<!-- end -->\nafter\n")
    done = benchmarks(4.5, "--page", page)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["all promises are met", "all 2 ratios within 20 % of the committed ones"]
    written = json.loads((tmp_path / "results" / "fake.json").read_text())
    assert [one["ratio"] for one in written["rows"]] == [4.5, 4.5]
    table = (tmp_path / "RESULTS.md").read_text()
    assert "| fake | ours | 4.50× (1.00 – 9.00) |  | 62 % | 12 |  |  |  |" in table
    assert "| more | ours | 4.50× (1.00 – 9.00) |  | 62 % |  |  |  | ≥ 2× |" in table
    assert page.read_text().startswith("before\n<!-- written by make bench -->\n| case | way |")
    assert "| ≥ 2× |\n\n![Cost of a candidate" in page.read_text()
    assert page.read_text().endswith("(results/cost.svg)\n<!-- end -->\nafter\n")
    assert "old" not in page.read_text()
    assert "| fake |" not in page.read_text()  # which promises nothing
    assert "<svg" in (tmp_path / "results" / "cost.svg").read_text()


def test_a_run_that_fell(benchmarks, tmp_path):
    done = benchmarks(1.5, "--out", tmp_path / "new" / "results")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-3:] == [
        "promise not met: fake: more, ours: ratio 1.5, promised at least 2",
        "regression: fake: fake, ours fell by 62%, from 4.00× to 1.50×",
        "regression: fake: more, ours fell by 62%, from 4.00× to 1.50×",
    ]
    assert json.loads((tmp_path / "results" / "fake.json").read_text())["rows"][0]["ratio"] == 4.0  # not touched


def test_a_stopped_run_keeps_its_cases_and_goes_on(benchmarks, tmp_path):
    out = tmp_path / "new" / "results"
    done = benchmarks(0, "--out", out)
    assert done.returncode == 1
    assert "fake did not end well" in done.stdout
    assert json.loads((out / "fake.json").read_text())["finished"] == ["first"]
    done = benchmarks(4.0, "--out", out, "--continue")
    written = json.loads((out / "fake.json").read_text())
    assert [(one["case"], one["ratio"]) for one in written["rows"]] == [("fake", 0), ("more", 4.0)]
    assert done.returncode == 1
    assert "fell by 100%" in done.stdout


def test_a_rival_that_takes_our_threads_gives_them_back(monkeypatch):
    """CTranslate2 sets the threads of the whole process; a rival with one each would halve everybody else's speed."""
    made, before = [], torch.get_num_threads()

    def generator(folder, **settings):
        made.append(settings)
        torch.set_num_threads(settings["intra_threads"])

    monkeypatch.setitem(sys.modules, "ctranslate2", SimpleNamespace(Generator=generator))
    ways = module("ways")
    monkeypatch.setattr(ways, "_convert", lambda *_: None)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=3))
    torch.set_num_threads(2)
    try:
        found = ways.ctranslate2_ways(model, "nowhere", ((2, 32), (1, 64)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert len(found) == 4
    assert [(each["inter_threads"], each["intra_threads"]) for each in made] == 2 * [(2, 1), (1, 2)]


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(script):
    """Benchmarks run by hand: what they import from the package must not move without them."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "freenergy":
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"
