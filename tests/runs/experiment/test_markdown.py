"""The tables that people read say what table.json holds."""

import pytest

from freenergy.runs.sweep.table import difference_rows, main_rows, markdown, over_seeds, summed


def row(name, kind, seeds, **more):
    found = {
        "name": name,
        "variant": "",
        "diverged": None,
        "kind": kind,
        "control": None,
        "numbers": {"BLEU": summed(seeds)},
    }
    found |= {"paper": {}, "steps": [100] * len(seeds), "cpu_seconds": summed([90.0] * len(seeds))}
    return found | more


@pytest.fixture
def table():
    rows = [
        row("base", "base", [20.0, 22.0], paper={"BLEU": 26.64, "METEOR": 50.0}),
        row("E-ARM | x", "row", [21.0, 25.0], control="control"),
        row("control", "control", [22.0, None], steps=[150, 170]),
    ]
    over = [["BLEU", [-1.0, -2.0, 0.0]], ["chrF", [9.0, 8.0, 10.0]]]
    pair = {"ours": "E-ARM | x", "on_test": [["BLEU", [-1.0, -1.5, -0.5]], ["p BLEU", [0.03] * 3]], "over_seeds": over}
    return {
        "name": "made up", "about": "a test", "seeds": [0, 1], "columns": ["BLEU"], "main_column": "BLEU", "rows": rows,
        "comparisons": [pair | {"other": "control", "is_control": True}, pair | {"other": "base", "is_control": False}],
        "budget": {"cpu_seconds": 540.0, "threads": 2},
    }  # fmt: skip


def test_main_rows(table):
    head, rows = main_rows(table)
    assert head == ["row", "BLEU", "BLEU, paper", "METEOR, paper", "steps", "CPU minutes"]
    # t_{97.5 %, 1} = 12.706; half the difference of two seeds is their standard error
    assert rows[0] == ["base (no more training)", "21 ± 13", "26.64", "50", "100", "1.5"]
    assert rows[1][1] == "23 ± 25"
    assert rows[2][1:] == ["–", "–", "–", "150–170", "1.5"]


def test_differences(table):
    _, rows = difference_rows(table, with_base=False)
    assert rows == [
        ["E-ARM | x − control", "BLEU", "−1 (−1.5 to −0.5)", "test data"],
        ["E-ARM | x − control", "p BLEU", "0.03", "test data"],
        ["E-ARM | x − control", "BLEU", "−1 (−2 to 0)", "seeds"],
    ]
    assert len(difference_rows(table, with_base=True)[1]) == 6
    assert len(difference_rows({**table, "seeds": [0]}, with_base=False)[1]) == 2, "one seed has no spread"


def test_markdown_is_made_of_whole_tables(table):
    text = markdown(table)
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "E-ARM \\| x" in text
    assert "Seeds 0, 1; 9 CPU minutes of training steps in all, 2 threads." in text
    assert text.index("equal compute") < text.index("Against the base")


def test_an_interval_needs_two_seeds_and_every_seed_a_number():
    assert over_seeds([3.0]).to_json() == [3.0, None, None]
    assert over_seeds([3.0, None]).to_json() == [None, None, None]
    value, low, high = over_seeds([1.0, 2.0, 3.0]).to_json()
    assert value == pytest.approx(2)
    assert high - value == pytest.approx(value - low) == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
