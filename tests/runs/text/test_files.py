"""Whole files: ranked, tuned, measured, killed and resumed."""

import json
import os
import signal
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from filelock import FileLock

from freenergy import Continuations, ResidualModel, UserError
from freenergy.core.progress import Silent
from freenergy.text.nbest import rank_file, tables
from freenergy.text.nbest.nbest import edit_distance

PLAIN = {"resamples": 200, "restarts": 2}


class Words:
    """Hears what is said and how far it is."""

    def __init__(self):
        self.said, self.done = [], 0

    @contextmanager
    def track(self, label, total=None, unit=""):
        def advance(amount, note=""):
            self.done += amount

        yield advance

    def say(self, message):
        self.said.append(message)


def scored(joint, row, ends=False):
    """log_base, energy and tokens of a list's candidates, straight from the model."""
    end = [joint.tokenizer.eos] if ends else []
    xs = [joint.tokenizer.encode(text) + end for text in row["candidates"]]
    x = Continuations.from_lists([joint.tokenizer.encode(row["prefix"])], [xs])
    return [column[0].numpy() for column in (joint.base.log_prob(x), joint.energy(x), x.lengths.double())]


def test_ranks_follow_the_combined_score(joint, write, some_lists):
    """s = λ_base log_base − λ_energy E + Σ λ_k score_k + λ_length tokens, list by list."""
    rows = some_lists(20)
    weights = {"base": 0.5, "energy": 2.0, "ear": 1.5, "dice": -1.0, "length": 0.25}
    found = rank_file(joint, write("lists.jsonl", rows), weights=weights, **PLAIN)
    assert found["weights"] == weights
    for row, ranked in zip(rows, found["lists"], strict=True):
        log_base, E, tokens = scored(joint, row)
        s = 0.5 * log_base - 2 * E + 1.5 * np.array(row["scores"]["ear"]) - 0.5 + 0.25 * tokens
        assert [one["score"] for one in ranked["candidates"]] == pytest.approx(s.tolist(), abs=1e-12)
        order = sorted(range(len(s)), key=lambda i: (-s[i], i))
        assert [ranked["candidates"][i]["rank"] for i in order] == list(range(1, len(s) + 1))
        assert ranked["best"] == row["candidates"][order[0]]
        share = np.exp(log_base - E) / np.exp(log_base - E).sum()
        assert [one["share"] for one in ranked["candidates"]] == pytest.approx(share.tolist(), abs=1e-12)
        assert (ranked["id"], ranked["prefix"]) == (row["id"], row["prefix"])


def test_without_weights_it_is_the_joint_model(joint, write, some_lists):
    rows = [{key: row[key] for key in ("prefix", "candidates")} for row in some_lists(5)]
    found = rank_file(joint, write("lists.jsonl", rows), **PLAIN)
    assert (found["errors"], found["tuned"]) == (None, None)
    for row, ranked in zip(rows, found["lists"], strict=True):
        expected = joint.score(row["prefix"], row["candidates"])
        assert [one["score"] for one in ranked["candidates"]] == [one.log_score for one in expected.candidates]
        assert [one["rank"] for one in ranked["candidates"]] == [one.rank for one in expected.candidates]
        assert ranked["best"] == expected.best.text


def test_texts_that_end(joint, write, some_lists):
    row = some_lists(1)[0]
    ranked = rank_file(joint, write("lists.jsonl", [row]), ends=True, **PLAIN)["lists"][0]["candidates"]
    log_base, E, tokens = scored(joint, row, ends=True)
    assert [one["log_base"] for one in ranked] == pytest.approx(log_base.tolist(), abs=1e-12)
    assert [one["energy"] for one in ranked] == pytest.approx(E.tolist(), abs=1e-12)
    assert [one["tokens"] for one in ranked] == tokens.tolist() == [5] * len(tokens)


def chosen_errors(joint, rows, pick):
    total = 0
    for row in rows:
        i = pick(row, *scored(joint, row)[:2])
        total += edit_distance(row["reference"].split(), row["candidates"][i].split())
    return total / sum(len(row["reference"].split()) for row in rows)


def test_error_rates_of_every_system(joint, write, some_lists):
    rows = some_lists(40)
    found = rank_file(joint, write("lists.jsonl", rows), **PLAIN)
    expected = {
        "first": chosen_errors(joint, rows, lambda row, log_base, E: 0),
        "base": chosen_errors(joint, rows, lambda row, log_base, E: int(log_base.argmax())),
        "joint": chosen_errors(joint, rows, lambda row, log_base, E: int((log_base - E).argmax())),
        "weighted": chosen_errors(
            joint, rows, lambda row, log_base, E: int((log_base - E + np.array(row["scores"]["ear"])).argmax())
        ),
        "oracle": 0.0,
    }
    rates = found["errors"]["rates"]
    assert {name: rate[0] for name, rate in rates.items()} == pytest.approx(expected)
    assert all(low <= value <= high for value, low, high in rates.values())
    pairs = [(row["system"], row["against"]) for row in found["errors"]["comparisons"]]
    assert pairs == [("joint", "first"), ("joint", "base"), ("weighted", "first"), ("weighted", "joint")]
    for row in found["errors"]["comparisons"]:
        assert row["difference"][0] == pytest.approx(expected[row["system"]] - expected[row["against"]])
        assert 0 <= row["p_value"] <= 1
    assert (found["errors"]["unit"], found["errors"]["lists"], found["errors"]["documents"]) == ("word", 40, 40)
    json.dumps(found, allow_nan=False)


def test_tuning_finds_the_score_that_knows_something(joint, write, some_lists):
    """On other lists it makes fewer errors than the weights that were not tuned; what says nothing keeps its weight."""
    lists, development = write("lists.jsonl", some_lists(50, seed=1)), write("dev.jsonl", some_lists(50, seed=2))
    found = rank_file(joint, lists, tune=development, **PLAIN)
    assert found["tuned"]["lists"] == 50
    assert found["tuned"]["after"] < found["tuned"]["before"]
    rates = {name: rate[0] for name, rate in found["errors"]["rates"].items()}
    assert rates["tuned"] < 0.8 * rates["joint"]
    assert found["weights"]["ear"] > abs(found["weights"]["energy"])
    again = rank_file(joint, lists, tune=development, **PLAIN)
    assert again == found
    shown = tables(found)
    assert [len(table.rows) for table in shown] == [5, 1, 5, 4]
    assert all(len(row) == len(table.columns) for table in shown for row in table.rows)
    assert shown[1].rows[0][:2] == [str(development), "50"]


def test_ties_go_to_the_earlier(joint, write):
    rows = [{"candidates": ["w2", "w3", "w2"], "scores": {"a": [1, 1, 1]}, "errors": [0, 1, 1]}]
    weights = {"base": 0.0, "energy": 0.0, "length": 0.0}
    found = rank_file(joint, write("lists.jsonl", rows), weights=weights, **PLAIN)
    assert [one["rank"] for one in found["lists"][0]["candidates"]] == [1, 2, 3]
    assert found["errors"]["rates"]["weighted"][0] == 0
    assert found["errors"]["unit"] == "list"


def test_forbidden_candidates_are_never_chosen(joint, write):
    joint.residual = replace(joint.residual, energy=lambda x: torch.where(x.tokens[..., 0] == 2, torch.inf, 0.0))
    rows = [{"candidates": ["w2", "w3"], "scores": {"a": [9, 0]}, "errors": [0, 1]}]
    weights = {"energy": 0.0, "a": 5.0}
    found = rank_file(joint, write("lists.jsonl", rows), tune=write("dev.jsonl", rows * 3), weights=weights, **PLAIN)
    forbidden, other = found["lists"][0]["candidates"]
    assert (forbidden["score"], forbidden["energy"], forbidden["rank"], other["rank"]) == (None, None, 2, 1)
    assert found["tuned"]["before"] == found["tuned"]["after"] == 1
    with pytest.raises(UserError, match=r"bad.jsonl, line 2: no candidate is acceptable"):
        rank_file(joint, write("bad.jsonl", [rows[0], rows[0] | {"candidates": ["w2", "w2 w3"]}]), **PLAIN)


def test_what_is_odd_is_told_once(joint, write):
    rows = [
        {"prefix": "w1", "candidates": ["w2", " w2 zebra", " w3"]},
        {"prefix": "w1", "candidates": [" zebra", "w3"]},
    ]
    path, words = write("lists.jsonl", rows), Words()
    found = rank_file(joint, path, progress=words, **PLAIN)
    assert found["counts"] == {"lists": 2, "candidates": 5, "apart": 2, "misread": 4, "uneven": 1}
    assert [one["is_apart"] for one in found["lists"][0]["candidates"]] == [True, False, False]
    assert found["lists"][0]["candidates"][1]["reads_as"] == " w2 w0"
    apart, misread, uneven = words.said
    assert apart.startswith(
        f"2 of 5 candidates in {path} were encoded apart from the prefix (first: line 1, candidate 1)"
    )
    assert "first: line 1, candidate 1, 'w2' as ' w2'" in misread
    assert uneven.startswith(f"1 of 2 lists in {path} have candidates of different length (first: line 1)")
    assert words.done == 2
    rank_file(joint, path, progress=(quiet := Words()), ends=True, **PLAIN)
    assert len(quiet.said) == 2


class Dying:
    """An energy that gives up after some lists."""

    def __init__(self, energy, lives):
        self.energy, self.lives = energy, lives

    def __call__(self, x):
        self.lives -= 1
        if self.lives < 0:
            raise KeyboardInterrupt
        return self.energy(x)


def test_an_interrupted_scoring_goes_on(joint, write, some_lists, tmp_path):
    """The same bytes, nothing scored twice but the first list, and nothing left behind; a torn line is scored again."""
    lists, development = write("lists.jsonl", some_lists(9, seed=1)), write("dev.jsonl", some_lists(6, seed=2))
    ask = {"tune": development, **PLAIN}
    whole = rank_file(joint, lists, out=tmp_path / "whole.jsonl", **ask)
    energy, out = joint.energy, tmp_path / "out.jsonl"
    joint.residual = replace(
        joint.residual, energy=Dying(energy, 1 + 6 + 1 + 4)
    )  # each file's first list says which model it is
    with pytest.raises(KeyboardInterrupt):
        rank_file(joint, lists, out=out, **ask)
    assert not out.exists()
    [kept] = tmp_path.glob(".out.jsonl.scores/.*.part")
    assert len(kept.read_text().splitlines()) == 4
    with kept.open("ab") as file:
        file.write(b'[{"text": "w')
    joint.residual = replace(joint.residual, energy=Dying(energy, 1 + 1 + 5))
    again = rank_file(joint, lists, out=out, **ask)
    assert joint.energy.lives == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert again | {"out": None} == whole | {"out": None}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev.jsonl", "lists.jsonl", "out.jsonl", "whole.jsonl"]
    assert [json.loads(line)["line"] for line in out.read_text().splitlines()] == list(range(1, 10))


def test_what_another_model_has_scored_is_not_taken(joint, write, some_lists, tmp_path):
    lists, out, energy = write("lists.jsonl", some_lists(5)), tmp_path / "out.jsonl", joint.energy
    joint.residual = replace(joint.residual, energy=Dying(energy, 4))
    with pytest.raises(KeyboardInterrupt):
        rank_file(joint, lists, out=out, **PLAIN)
    joint.residual = replace(joint.residual, energy=lambda x: energy(x) + 0.001 * x.tokens[..., 0])
    rank_file(joint, lists, out=out, **PLAIN)
    rank_file(joint, lists, out=tmp_path / "alone.jsonl", **PLAIN)
    assert out.read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_killed_while_a_list_is_scored(joint, write, some_lists, tmp_path, fork):
    """kill −9 in a process of its own; the next one resumes, and the result has the same bytes."""
    lists, out = write("lists.jsonl", some_lists(6)), tmp_path / "out.jsonl"

    def act(calls):
        whole, left = joint.energy, iter(range(calls))

        def energy(x):
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(x)

        rank_file(ResidualModel(joint.base, energy, joint.tokenizer), lists, out=out, **PLAIN)

    assert [fork(partial(act, calls)).wait()[0] for calls in (3, 99)] == [-signal.SIGKILL, 0]
    rank_file(joint, lists, out=tmp_path / "whole.jsonl", **PLAIN)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_memory_does_not_grow_with_the_file(joint, write, some_lists, tmp_path):
    """Peak of Python's own memory for 5 lists and for 25, each with 100 kB that must not be held."""
    peaks = []
    for count in (5, 25):
        rows = [{"prefix": "w1", "candidates": ["w2", "w3"], "id": "x" * 100_000, "errors": [0, 1]}] * count
        path = write(f"{count}.jsonl", rows)
        tracemalloc.start()
        rank_file(joint, path, out=tmp_path / f"out.{count}.jsonl", **PLAIN)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 20 * 10_000


def test_bad_input_is_one_sentence(joint, write, some_lists, tmp_path):
    lists, rows = write("lists.jsonl", some_lists(2)), some_lists(2)
    bare = write("bare.jsonl", [{"candidates": row["candidates"]} for row in rows])
    plain = write("plain.jsonl", [{key: row[key] for key in ("prefix", "candidates", "scores")} for row in rows])
    lost = write("lost.jsonl", [*rows, {"candidates": [""]}])
    for ask, why in [
        ({"out": lists}, "would be written over the lists"),
        ({"tune": lists}, "would be tuned and measured on at once"),
        ({"tune": bare}, "bare.jsonl has the scores none, but .*lists.jsonl has dice, ear: give both"),
        ({"tune": plain}, "plain.jsonl: no list says how wrong its candidates are"),
        ({"tune": tmp_path / "no.jsonl"}, r"no.jsonl cannot be read"),
        ({"weights": {"loud": 1.0}}, "there is no score 'loud'"),
        ({"resamples": 5}, "5 resamples"),
        ({"restarts": -1}, "-1 restarts"),
    ]:
        with pytest.raises(UserError, match=why):
            rank_file(joint, lists, **PLAIN | ask)
    joint.residual = replace(joint.residual, energy=Dying(joint.energy, 0))
    with pytest.raises(UserError, match=r"lost.jsonl, line 3: candidate 1 is empty"):
        rank_file(joint, lost, tune=lists, **PLAIN)  # before anything is scored


def test_too_long_says_where_and_what_to_do(joint, write, monkeypatch):
    """The base's own sentence, with the line before it."""

    def too_long(x):
        raise UserError("a prefix of 9 tokens and a continuation of 3 do not fit: shorten the prefix")

    monkeypatch.setattr(joint.base, "log_prob", too_long)
    with pytest.raises(UserError, match=r"lists.jsonl, line 1: a prefix of 9 tokens .*: shorten the prefix"):
        rank_file(joint, write("lists.jsonl", [{"candidates": ["w1"]}]), **PLAIN)


def test_two_writers_are_one_too_many(joint, write, some_lists, tmp_path):
    lists, out = write("lists.jsonl", some_lists(2)), tmp_path / "out.jsonl"
    with FileLock(tmp_path / ".out.jsonl.lock"), pytest.raises(UserError, match="another process is writing"):
        rank_file(joint, lists, out=out, **PLAIN)
    assert rank_file(joint, lists, out=out, progress=Silent(), **PLAIN)["lists"] is None
