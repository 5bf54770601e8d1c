"""``freenergy sample``, ``next`` and ``score``: what they print, that they go on after a kill, and bad input."""

import io
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rich.console import Console

from freenergy import ResidualModel, Rng, Sequences, SequenceSpace, Truncation, UserError, load
from freenergy.cli.show.results import Live
from freenergy.core.progress import Silent
from freenergy.samplers import Plain, Resampling
from freenergy.text.task import GenerationTask, read_prefixes
from freenergy.text.write import Writing

FEW = ("--candidates", 12, "--num", 2, "--seed", 3)


@pytest.fixture(scope="module")
def folder(joint_run):
    return joint_run[0]


def sampled(call, *arguments):
    status, out, err = call("sample", *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_the_object_has_texts_weights_and_evidence(call, folder):
    found = sampled(call, folder, "--prefix", "Return the", *FEW, "--keep-candidates")
    (result,) = found["results"]
    assert len(result["texts"]) == 2
    for text in result["texts"]:
        assert text["log_score"] == pytest.approx(text["log_base"] - text["energy"], abs=1e-9)
    (step,) = result["steps"]
    assert (step["method"], step["law"], step["candidates"][0].keys() >= {"text", "energy", "share"}) == (
        "resampling", "restricted", True,
    )  # fmt: skip
    rows = step["candidates"]
    assert len(rows) == 12
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert sum(row["chosen"] for row in rows) == 2
    assert 1 <= step["ess"] <= 12
    assert step["distance_is_estimated"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(call, folder):
    outs = [call("sample", folder, "--prefix", "The", *FEW[:-1], seed, "--json")[1] for seed in (3, 3, 4)]
    assert outs[0] == outs[1] != outs[2]


def test_for_a_person(call, folder):
    status, out, err = call("sample", folder, "--prefix", "Return the", *FEW)
    assert status == 0, err
    for words in ("Return the", "of the weight", "effective", "total variation", "log P_LM", "base tokens"):
        assert words in " ".join(out.split())


SAMPLERS = {
    "resampling": ["candidates=4"],
    "best-of-n": ["candidates=8", "by=likelihood"],
    "quasi-rejection": ["distance=0.2", "pilot=16"],
    "metropolis": ["steps=4"],
    "sequential": ["particles=4"],
    "autoregressive": ["completions=2", "top_k=3"],
    "base": [],
    "independence": ["steps=4"],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_writes_and_says_how_far_it_may_be(call, folder, name):
    settings = [text for setting in SAMPLERS[name] for text in ("--set", setting)]
    found = sampled(call, folder, "--prefix", "The", "--sampler", name, *settings, "--num", 2)
    (result,) = found["results"]
    assert len(result["texts"]) == 2
    assert all(step["distance"] is None or 0 <= step["distance"] <= 1 for step in result["steps"])
    assert all(step["base_tokens"] > 0 for step in result["steps"])


def test_rejection_with_a_bound(call, folder):
    joint = load(folder)
    context = Sequences.from_lists([joint.tokenizer.encode("The")])
    highest = joint.residual.propose(context, 500, joint.space, Rng(0)).log_weight.max().item()
    found = sampled(
        call, folder, "--prefix", "The", "--sampler", "rejection", "--set", f"log_bound={highest + 0.5}", "--num", 1
    )
    step = found["results"][0]["steps"][0]
    assert step["distance"] == 0
    assert not step["distance_is_estimated"]
    refused(call("sample", folder, "--sampler", "rejection"), "the sampler rejection needs log_bound")


def test_long_text_chunk_by_chunk(call, folder):
    found = sampled(call, folder, "--prefix", "The", "--chunks", 3, "--num", 1, "--candidates", 8)
    (result,) = found["results"]
    (text,) = result["texts"]
    assert len(result["steps"]) == 3 or text["has_ended"]
    assert text["tokens"] == 12 or text["has_ended"]
    status, out, _ = call("sample", folder, "--prefix", "The", "--chunks", 2, "--num", 2, "--candidates", 8)
    assert (status, sum(line.startswith("The") for line in out.splitlines())) == (0, 2)


def test_many_prefixes_from_a_file(call, folder, tmp_path):
    lines, rows = tmp_path / "prefixes.txt", tmp_path / "prefixes.jsonl"
    lines.write_text("The\nReturn the\n\n")
    rows.write_text("".join(json.dumps({"prefix": text}) + "\n" for text in ("The", "Return the", "")))
    found = sampled(call, folder, "--prefixes", lines, *FEW)
    assert [result["prefix"] for result in found["results"]] == ["The", "Return the", ""]
    assert sampled(call, folder, "--prefixes", rows, *FEW) == found
    alone = sampled(call, folder, "--prefix", "The", *FEW)
    assert alone["results"][0] == found["results"][0]
    status, out, _ = call("sample", folder, "--prefixes", lines, *FEW, "--out", tmp_path / "out.jsonl", "--json")
    assert (status, json.loads(out)["prefixes"]) == (0, 3)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == found["results"]


def test_kill_9_while_prefixes_are_continued(folder, tmp_path, begin):
    lines, out = tmp_path / "prefixes.txt", tmp_path / "out.jsonl"
    lines.write_text("".join(f"The number {i}\n" for i in range(60)))
    command = ("sample", folder, "--prefixes", lines, "--candidates", 64, "--num", 2, "--out")

    def begun():
        return any(path.stat().st_size > 3000 for path in tmp_path.glob(".out.jsonl.*"))

    begin(*command, out).kill_when(begun)
    assert not out.exists()
    torn = next(iter(tmp_path.glob(".out.jsonl.*")))
    kept = torn.read_bytes()
    for name in ("out.jsonl", "whole.jsonl"):
        begin(*command, tmp_path / name).succeed()
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert kept.rpartition(b"\n")[0] in out.read_bytes()
    assert not list(tmp_path.glob(".out.jsonl.*"))


def test_what_comes_next(call, folder):
    status, out, err = call("next", folder, "--prefix", "Return", "--top-k", 4, "--completions", 8, "--json")
    assert status == 0, err
    found = json.loads(out)
    total = sum(row["joint"] for row in found["rows"]) + found["other"]["joint"]
    assert total == pytest.approx(1)
    assert all(row["standard_error"] >= 0 and row["text"] for row in found["rows"])
    status, out, _ = call("next", folder, "--prefix", "Return", "--top-k", 4, "--completions", 8)
    assert (status, "± s.e." in out, "(other)" in out) == (0, True, True)


def test_ranking_a_file(call, folder, tmp_path):
    path = tmp_path / "lists.jsonl"
    rows = [{"prefix": "Return the", "candidates": [" number of items", " of of of"], "errors": [0, 1]}] * 3
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, out, err = call("score", folder, path, "--json")
    assert status == 0, err
    found = json.loads(out)
    ranked = load(folder).score("Return the", rows[0]["candidates"])
    assert [row["log_score"] for row in found["lists"][0]["candidates"]] == [
        pytest.approx(candidate.log_score) for candidate in ranked.candidates
    ]
    status, out, _ = call("score", folder, path, "--weight", "energy=0.5")
    assert (status, "residual model" in out) == (0, True)


def refused(result, *words):
    status, out, err = result
    assert (status, out) == (2, ""), err
    assert "Traceback" not in err
    for word in words:
        assert word in " ".join(err.split()), err


def test_bad_input_is_one_sentence(call, folder, tmp_path):
    refused(call("sample", folder, "--candidates", 0), "candidates is 0")
    refused(call("sample", folder, "--num", 0), "num is 0")
    refused(call("sample", folder, "--chunks", 0), "chunks is 0")
    refused(call("sample", folder, "--set", "effective=300"), "effective candidates out of at most 256")
    refused(call("sample", folder, "--num", 9, "--candidates", 4, "--set", "replacement=false"), "9 different results")
    refused(call("sample", folder, "--prefixes", tmp_path / "none.txt"), "cannot be read")
    (tmp_path / "bad.jsonl").write_text('{"prefix": "a"}\n{"text": "b"}\n')
    refused(call("sample", folder, "--prefixes", tmp_path / "bad.jsonl"), "line 2 has no text under prefix")
    (tmp_path / "empty.txt").write_text("")
    refused(call("sample", folder, "--prefixes", tmp_path / "empty.txt"), "has no prefixes")
    refused(call("next", folder, "--top-k", 0), "top_k is 0")
    refused(call("next", folder, "--completions", 1), "2 or more")
    (tmp_path / "lists.jsonl").write_text('{"prefix": "a", "candidates": ["b", ""]}\n')
    refused(call("score", folder, tmp_path / "lists.jsonl"), "is empty")
    refused(call("score", folder, tmp_path / "lists.jsonl", "--weight", "energy"), "NAME=NUMBER")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sampler", "metropolis", "--candidates", 9], "the sampler metropolis has no setting 'candidates'"),
        (["--sampler", "metropolis", "--set", "effective=3"], "the sampler metropolis has no setting 'effective'"),
        (["--set", "log_bound=1"], "the sampler resampling has no setting 'log_bound': it has candidates"),
        (["--sampler", "autoregressive", "--temperature", 0.5], "has no setting 'truncation.temperature'"),
        (["--sampler", "base", "--candidates", 9], "the sampler base has no setting 'candidates'"),
        (["--candidates", 9, "--set", "candidates=8"], "the setting candidates is given twice"),
        (["--set", "candidates"], "is not KEY=VALUE"),
        (["--set", "candidates=many"], "candidates is 'many': set it to a whole number"),
        (["--sampler", "gibbs-ish"], "there is no sampler 'gibbs-ish': choose one of resampling"),
        (["--sampler", "no_such_module:Thing"], "cannot be imported"),
        (["--sampler", "base", "--chunks", 2, "--look-ahead", 2], "take resampling and 2 chunks or more"),
        (["--look-ahead", 2], "take resampling and 2 chunks or more"),
        (["--prefix", "a", "--prefixes", "b.txt"], "give one of them"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_options_that_a_sampler_does_not_have_are_refused(call, folder, options, words):
    refused(call("sample", folder, *options), words)


KERNEL = """
from dataclasses import dataclass, replace

from freenergy.samplers.kernels.independence import Independence


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    stay: float = 0.5

    def init(self, target, x):
        return Independence().init(target, x)

    def step(self, target, state, rng):
        moved, info = Independence().step(target, state, rng.child("move"))
        is_still = float(rng.child("stay").uniform(1)) < self.stay
        return (state if is_still else moved), replace(info, is_accepted=info.is_accepted & (not is_still))
"""


def test_a_kernel_of_ones_own_is_a_sampler(call, folder, tmp_path, monkeypatch):
    (tmp_path / "my_kernels.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    own = ("--prefix", "The", "--sampler", "my_kernels:Lazy", "--set", "steps=3", "--num", 2)
    found = sampled(call, folder, *own, "--set", "stay=0.25")
    assert len(found["results"][0]["texts"]) == 2
    assert found["results"][0]["steps"][0]["distance"] is None
    refused(call("sample", folder, *own, "--candidates", 4), "has no setting 'candidates'")


def test_short_options_are_settings_of_the_sampler(call, folder):
    """--top-k is the proposal's, or the sampler's own where it has one."""
    short = sampled(call, folder, "--prefix", "The", *FEW, "--top-k", 5, "--temperature", 0.8)
    settings = ("candidates=12", "truncation.top_k=5", "truncation.temperature=0.8")
    long = sampled(call, folder, "--prefix", "The", *FEW[2:], *(part for text in settings for part in ("--set", text)))
    assert short == long
    own = ("--prefix", "The", "--num", 1, "--sampler", "autoregressive", "--set", "completions=2")
    assert sampled(call, folder, *own, "--top-k", 2) == sampled(call, folder, *own, "--set", "top_k=2")


def test_prefixes_as_other_programs_write_them(tmp_path):
    lines, rows, bad = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "bad.txt"
    lines.write_bytes("\ufeffThe river\r\n\r\nü\r\n".encode())
    assert list(read_prefixes(lines)) == ["The river", "", "ü"]
    rows.write_text('{"prefix": "a"}\n\n{"prefix": "b"}\r\n')
    assert list(read_prefixes(rows)) == ["a", "b"]
    bad.write_bytes(b"The\n\xff\n")
    with pytest.raises(UserError, match="not UTF-8"):
        list(read_prefixes(bad))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[" * 100_000, "exceeds the limits of JSON"),
        ('{"prefix": "\\ud800"}', "contains half of a surrogate pair"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_prefix_that_is_none_is_one_sentence_with_its_line(tmp_path, line, why):
    path = tmp_path / "prefixes.jsonl"
    path.write_text('{"prefix": "a"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"line 2 {why}"):
        list(read_prefixes(path))


def test_where_it_cannot_be_written_is_said_before_anything_is_drawn(call, folder, tmp_path):
    refused(call("sample", folder, *FEW, "--out", tmp_path), "is a folder")
    (tmp_path / "file").write_text("")
    refused(call("sample", folder, *FEW, "--out", tmp_path / "file" / "out.jsonl"), "cannot write to")
    assert [left.name for left in tmp_path.iterdir()] == ["file"]


def test_brackets_and_colons_are_text(call, folder):
    odd = "a [/] [bold] :cat:"
    for command in ("sample", "next"):
        few = ("--candidates", 4, "--num", 1) if command == "sample" else ("--top-k", 2, "--completions", 2)
        status, out, err = call(command, folder, "--prefix", odd, *few)
        assert (status, odd in out) == (0, True), err
    status, out, err = call("sample", folder, "--prefix", odd, "--chunks", 2, "--candidates", 4, "--num", 1)
    assert (status, odd in out) == (0, True), err


def test_chunks_of_several_prefixes_are_told_apart(call, folder, tmp_path):
    path = tmp_path / "prefixes.txt"
    path.write_text("Return the\nThe number\n")
    status, out, err = call("sample", folder, "--prefixes", path, "--chunks", 2, "--candidates", 4, "--num", 2)
    assert status == 0, err
    starts = [line[:10] for line in out.splitlines() if line.startswith(("Return the", "The number"))]
    assert starts == ["Return the"] * 2 + ["The number"] * 2


def test_a_screen_sees_whole_lines_only():
    """Bars below would wipe out a part of a line; nothing is lost and nothing is broken at the border of chunks."""
    shown = io.StringIO()
    screen = Console(file=shown, force_terminal=True, no_color=True, width=20, emoji=False)
    live = Live(lambda: nullcontext(screen))
    words = ["The", " river runs thr", "ough a wide", " [/] valley\nand then", " on"]
    for chunk in words[1:]:
        live.chunk(words[0], 0, chunk)
        assert shown.getvalue() == "" or shown.getvalue().endswith("\n")
    live.end()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert plain.split() == "".join(words).split()
    assert max(map(len, plain.splitlines())) <= 20


def forbidding(x):
    """An energy that accepts nothing."""
    return torch.full(x.shape, torch.inf)


def test_an_energy_that_accepts_nothing_fails_one_prefix_and_not_the_others(folder, tmp_path):
    joint = load(folder)
    strict = ResidualModel(joint.base, forbidding, joint.tokenizer, space=joint.space)
    with pytest.raises(UserError, match="no candidate is acceptable"):
        strict.sample("The", candidates=8)
    path = tmp_path / "prefixes.txt"
    path.write_text("The\nReturn\n")
    task = GenerationTask.of(strict, path, None, 0, Writing(sampler=Resampling(candidates=8)))
    assert ["no candidate is acceptable" in failed.error for failed in task.results(Silent())] == [True, True]


def test_from_python(folder):
    joint = load(folder)
    texts = joint.sample("Return the", candidates=16, n=3, truncation=Truncation(top_k=20), seed=1)
    assert len(texts) == 3
    assert str(texts).count("▸") == 3
    frame = texts.to_frame()
    assert len(frame) == 16
    assert frame["share"].sum() == pytest.approx(1)
    assert frame["chosen"].sum() == 3
    other = joint.write("The", SequenceSpace(vocab_size=joint.base.vocab_size, length=2), Rng(0), Writing())
    assert any("trained on continuations of 4 tokens, not of 2" in note for note in other.all_notes())
    long = joint.sample("The " * (joint.max_context + 1), candidates=4)
    assert any(f"trained with {joint.max_context} tokens before" in note for note in long.all_notes())


@pytest.mark.parametrize("chunks", [1, 2])
def test_python_and_the_command_line_write_the_same(call, folder, chunks):
    found = sampled(call, folder, "--prefix", "Return the", *FEW, "--chunks", chunks)
    texts = load(folder).sample("Return the", candidates=12, n=2, seed=3, chunks=chunks)
    assert found["results"] == [json.loads(json.dumps(texts.to_json()))]


def test_the_base_says_that_it_is_the_base(call, folder):
    found = sampled(call, folder, "--prefix", "The", "--sampler", "base", "--num", 1)
    (step,), (text,) = found["results"][0]["steps"], found["results"][0]["texts"]
    assert (step["law"], step["distance"]) == ("base", 0)
    joint = load(folder)
    texts = joint.write("The", joint.space, Rng(0).child("prefix", 0), Writing(sampler=Plain()))
    x = texts.steps[0].x
    assert text["energy"] == pytest.approx(joint.scored(x).energy.item())
    assert "total variation from the base" in str(texts)


def test_a_saved_joint_model_remembers_what_it_was_trained_on(folder, tmp_path):
    joint = load(folder)
    joint.save_pretrained(tmp_path / "saved")
    again = ResidualModel.from_pretrained(tmp_path / "saved")
    assert (again.space, again.max_context) == (joint.space, joint.max_context)
    assert again.sample("The", candidates=8).texts == joint.sample("The", candidates=8).texts


def test_memory_is_that_of_the_candidates_at_hand(joint_run):
    """The benchmark in small: growth for 1,000 candidates of 10 chunks is bounded, and flat over prefixes."""
    script = Path(__file__).parents[3] / "benchmarks" / "memory.py"
    command = [sys.executable, str(script), str(joint_run[0]), "--prefixes", "24"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert (found["candidates"], found["chunks"]) == (1000, 10)
    assert found["long_text_growth_mb"] < 2000
    assert found["prefixes_growth_mb"] < 30
