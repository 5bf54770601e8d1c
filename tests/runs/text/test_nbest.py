"""Lists on disk: what is read, and the one sentence for what cannot be."""

import gzip

import numpy as np
import pytest

from freenergy import UserError
from freenergy.text.nbest.nbest import edit_distance, read_lists

GOOD = {"prefix": "w1", "candidates": ["w2", "w3"]}


def test_what_a_line_may_hold(write):
    path = write(
        "lists.jsonl",
        [
            GOOD | {"scores": {"b": [1, 2.5], "a": [0, -1]}, "reference": "w2 w4", "id": {"any": [1]}, "document": "d"},
            "",
            {"candidates": ["w3"], "scores": {"a": [1], "b": [2]}},
        ],
    )
    first, second = read_lists(path)
    assert (first.line, second.line) == (1, 3)
    assert first.scores == {"a": (0.0, -1.0), "b": (1.0, 2.5)}
    assert (first.unit, first.units, first.errors()) == ("word", 2, (1.0, 2.0))
    assert (first.name, first.document) == ({"any": [1]}, "d")
    assert (second.prefix, second.unit) == ("", None)


def test_errors_that_are_given(write):
    [one] = read_lists(write("lists.jsonl", [GOOD | {"errors": [0.5, 0]}]))
    assert (one.unit, one.units, one.errors()) == ("list", 1, (0.5, 0.0))


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "lists.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"candidates": ["\xc3\xbc"]}\r\n')
    assert next(read_lists(path)).candidates == ("ü",)


def slow_distance(a, b):
    if not a or not b:
        return len(a) + len(b)
    return min(slow_distance(a[1:], b) + 1, slow_distance(a, b[1:]) + 1, slow_distance(a[1:], b[1:]) + (a[0] != b[0]))


def test_edit_distance_is_the_shortest_way():
    """Against the recursion that tries every way."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        a, b = (rng.choice(["x", "y", "z"], rng.integers(0, 6)).tolist() for _ in range(2))
        assert edit_distance(a, b) == slow_distance(a, b)


BAD = {
    "not valid JSON": ['{"candidates": ['],
    "no JSON object": ["[1]"],
    "the unknown key 'answer'": [GOOD | {"answer": "w2"}],
    "no list of texts as candidates": [{"prefix": "w1"}, {"candidates": []}, {"candidates": "w1"}, {"candidates": [1]}],
    "candidate 2 is empty": [{"candidates": ["w1", ""]}],
    "a prefix that is no text": [GOOD | {"prefix": None}],
    "scores that are no object": [GOOD | {"scores": [1, 2]}],
    "calls a score 'energy'": [GOOD | {"scores": {"energy": [1, 2]}}],
    "1 numbers as the score 'a' of 2 candidates": [GOOD | {"scores": {"a": [1]}}],
    "no list as errors of 2": [GOOD | {"errors": 3}],
    "something else than finite numbers in errors": [
        GOOD | {"errors": [0, True]},
        GOOD | {"errors": [0, "1"]},
        '{"candidates": ["w1"], "errors": [NaN]}',
        '{"candidates": ["w1"], "errors": [1' + "0" * 400 + "]}",
    ],
    "-1 errors": [GOOD | {"errors": [0, -1]}],
    "errors and a reference": [GOOD | {"errors": [0, 1], "reference": "w1"}],
    "a reference that is no text": [GOOD | {"reference": ["w1"]}],
    "a number in id that is not finite": ['{"candidates": ["w1"], "id": [1e999]}'],
    "a number in document that is not finite": ['{"candidates": ["w1"], "document": NaN}'],
    "half of a surrogate pair": ['{"candidates": ["\\ud800"]}'],
    "exceeds the limits of JSON parsers": ["[" * 100_000, '{"candidates": ["w1"], "errors": [1' + "0" * 5000 + "]}"],
}


@pytest.mark.parametrize(("why", "row"), [(why, row) for why, rows in BAD.items() for row in rows])
def test_a_bad_line_is_one_sentence_with_its_number(write, why, row):
    path = write("lists.jsonl", [GOOD, "", row])
    with pytest.raises(UserError) as found:
        list(read_lists(path))
    assert str(found.value).startswith(f"{path}, line 3")
    assert why in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"scores": {"a": [1, 2]}}, {}, "has the scores none, but line 1 has a"),
        ({}, {"scores": {"b": [1, 2]}}, "has the scores b, but line 1 has none"),
        ({"errors": [1, 2]}, {"reference": "w1"}, "has a reference, but line 1 has errors"),
    ],
)
def test_lists_that_are_not_alike(write, first, second, why):
    with pytest.raises(UserError, match=f"line 2 {why}: give all lists the same"):
        list(read_lists(write("lists.jsonl", [GOOD | first, GOOD | second])))


def test_files_that_are_none(tmp_path, write):
    for path, why in [
        (tmp_path / "nowhere.jsonl", r"cannot be read \(No such file"),
        (tmp_path, r"cannot be read \(Is a directory"),
        (write("empty.jsonl", ["", " "]), "there is no list in"),
    ]:
        with pytest.raises(UserError, match=why):
            list(read_lists(path))
    packed = tmp_path / "lists.jsonl.gz"
    packed.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(UserError, match=r"line 1 is not UTF-8 at byte 1 of the line"):
        list(read_lists(packed))
