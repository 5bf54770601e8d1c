"""The command line as a user meets it: results on stdout, one sentence and status 2 for bad input."""

import gzip
import json
import resource
import shutil
import sys

import pytest

from freenergy.cli.show import Bars
from freenergy.core.rng import Rng
from freenergy.corpus.resources import ResourceUnavailable
from freenergy.lm.presets import build, preset
from freenergy.recipes.load import recipes
from freenergy.testing.runs import tiny_run

QUICK = ["--set", "base.optimisation.steps=4", "--set", "base.optimisation.validate_every=2"]


@pytest.fixture(scope="session")
def done(finished_run, corpus_file):
    """A finished run, and its recipe."""
    return finished_run(tiny_run(corpus_file), QUICK[1::2])[:2]


def refused(result, *words, after=""):
    """One sentence on stderr, status 2, no traceback; nothing on stdout but the stages ``after`` which it was."""
    status, out, err = result
    assert status == 2, err
    assert out.startswith(after) if after else out == ""
    assert "Traceback" not in err
    sentence = err.strip().splitlines()[-1]
    assert sentence.startswith("freenergy: ")
    for word in words:
        assert word in " ".join(err.split()), err


def test_run_prints_what_it_found(call, recipe, tmp_path):
    status, out, err = call("run", recipe, "--out", tmp_path / "run", *QUICK)
    assert status == 0, err
    for words in ("corpus", "windows", "per token", "per word", "per byte", "human", "freenergy sample"):
        assert words in out
    status, out, _ = call("run", recipe, "--out", tmp_path / "run", *QUICK)
    assert status == 0
    assert out.count("kept from before") == 3


def test_json_is_one_object_and_nothing_else(call, done):
    folder, recipe = done
    commands = [
        ("run", recipe, "--out", folder, *QUICK, "--json"),
        ("sample", folder, "--prefix", "The", "--num", 2, "--length", 5, "--json"),
        ("recipes", "--json"),
        ("resources", "--json"),
        ("doctor", "--json"),
    ]
    for command in commands:
        status, out, err = call(*command)
        assert status == 0, err
        assert isinstance(json.loads(out), dict)
        assert out.count("\n") == 1


def test_stage_stops_there(call, recipe, tmp_path):
    status, out, _ = call("run", recipe, "--out", tmp_path / "run", "--stage", "corpus", "--json")
    assert status == 0
    assert list(json.loads(out)["stages"]) == ["corpus"]
    assert not (tmp_path / "run" / "base").exists()


def test_sample_is_reproducible_and_seeded(call, done):
    outs = [call("sample", done[0], "--prefix", "The", "--seed", seed, "--json")[1] for seed in (1, 1, 2)]
    assert outs[0] == outs[1] != outs[2]
    status, out, _ = call("sample", done[0], "--length", 3, "--num", 1)  # an empty prefix begins a document
    assert status == 0
    assert "log P" in out


def test_help_is_complete(call):
    status, out, _ = call("--help")
    assert status == 0
    for command in ("run", "sample", "evaluate", "report", "recipes", "resources", "doctor"):
        assert command in out


def test_recipes_that_come_with_the_package_are_listed(call):
    status, out, _ = call("recipes")
    assert status == 0
    for name in recipes():
        assert name in out


def test_bad_recipes(call, recipe, tmp_path):
    refused(call("run", "no-such-recipe"), "there is no recipe 'no-such-recipe'")
    refused(call("run", tmp_path / "none.toml"), "there is no recipe file")
    refused(call("run", recipe, "--set", "corpus.prefx=3"), "unknown key corpus.prefx (did you mean prefix?)")
    refused(call("run", recipe, "--set", 'corpus.prefix="three"'), "corpus.prefix is 'three'", "integer")
    refused(call("run", recipe, "--set", "base.kind=magic"), "base.kind is 'magic'; choose one of")
    refused(call("run", recipe, "--set", "oops"), "not of the form a.b=c")
    refused(call("run", recipe, "--set", "seed.x=1"), "seed is a value, not a section")
    refused(call("run", recipe, "--stage", "cooking"), "there is no stage 'cooking'")
    refused(call("run", recipe, "--set", "base.optimisation.steps=0"), "steps is 0: set it to 1 or more")
    refused(call("run", recipe, "--set", "corpus.test_share=0.0"), "the corpus has no test text")
    refused(call("run", recipe, "--set", "evaluation.windows=0"), "windows is 0")
    (tmp_path / "broken.toml").write_text("[corpus\n")
    refused(call("run", tmp_path / "broken.toml"), "is not TOML", "line 1")
    (tmp_path / "broken.toml").write_text(f"seed = {'9' * 5000}\n")
    refused(call("run", tmp_path / "broken.toml"), "is not TOML", "digits")
    refused(call("run", recipe, "--set", f"seed={'9' * 5000}"), "--set seed=… has more digits or brackets than")


def test_bad_input_as_json_says_the_error(call):
    status, out, err = call("run", "no-such-recipe", "--json")
    assert status == 2
    assert "no-such-recipe" in json.loads(out)["error"]
    assert "Traceback" not in err


def source(path):
    return ["--set", f'corpus.source="{path}"']


def test_bad_text(call, recipe, tmp_path):
    out = ["--out", tmp_path / "out"]
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(call("run", recipe, *out, *source(empty)), str(empty))
    (tmp_path / "blank.txt").write_text(" \n\n")
    refused(call("run", recipe, *out, *source(tmp_path / "blank.txt")), "blank.txt")
    (tmp_path / "latin.txt").write_bytes("Grüße\n".encode("latin-1") * 50)
    refused(call("run", recipe, *out, *source(tmp_path / "latin.txt")), "latin.txt", "UTF-8")
    (tmp_path / "short.jsonl").write_text('{"text": "too short"}\n{"text": "also short"}\n{"text": "short"}\n' * 9)
    short = call("run", recipe, *out, *source(tmp_path / "short.jsonl"), "--set", "corpus.prefix=400")
    refused(short, "404 tokens", "reduce prefix and continuation")
    with gzip.open(tmp_path / "torn.txt.gz", "wb") as file:
        file.write(b"some text " * 1000)
    torn = (tmp_path / "torn.txt.gz").read_bytes()[:-20]
    (tmp_path / "torn.txt.gz").write_bytes(torn)
    refused(call("run", recipe, *out, *source(tmp_path / "torn.txt.gz")), "torn.txt.gz")
    refused(call("run", recipe, *out, *source(tmp_path / "nowhere")), "nowhere")


def test_bad_checkpoints(call, recipe, tmp_path):
    out = ["--out", tmp_path / "out"]
    refused(call("run", recipe, *out, "--set", f'base.start="{tmp_path}"'), str(tmp_path))
    refused(call("run", recipe, *out, "--set", "base.preset=huge"), "there is no preset 'huge'")
    assert not (tmp_path / "out" / "corpus").exists()  # both were found out before any work
    refused(call("run", recipe, *out, "--set", "base.block=4000"), "must fit the network's", after="corpus")
    short = call("run", recipe, *out, "--set", "base.block=200", "--set", "base.validation_tokens=100")
    refused(short, "fewer than one block", after="corpus")
    model = build(preset("tiny").config(vocab_size=399, eos=0), Rng(0))
    model.save_pretrained(tmp_path / "other")
    refused(call("run", recipe, *out, "--set", f'base.start="{tmp_path / "other"}"'), "knows only 399", after="corpus")


def test_bad_runs_and_prefixes(call, done, tmp_path):
    done = shutil.copytree(done[0], tmp_path / "copy")
    refused(call("sample", tmp_path / "nothing"), "is not a run")
    refused(call("sample", done, "--prefix", "word " * 500), "do not fit the model's context of 256 tokens")
    refused(call("sample", done, "--num", 0), "num is 0")
    refused(call("sample", done, "--length", 0), "length is 0: set it to at least 1")
    refused(call("sample", done, "--top-k", 0), "top_k is 0")
    refused(call("sample", done, "--top-p", 0), "top_p is 0")
    refused(call("sample", done, "--temperature", 0), "temperature is 0")
    weights = done / "base" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    refused(call("sample", done, "--prefix", "The"), "model.safetensors is not as it was written", "copy it again")


def test_files_of_the_user_are_never_deleted(call, recipe, tmp_path):
    mine = tmp_path / "project" / "corpus" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    refused(call("run", recipe, "--out", tmp_path / "project"), "holds files that no run has made")
    assert mine.read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    refused(call("run", recipe, "--out", tmp_path / "file"), "cannot write to")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_base_of_another_corpus_is_not_written_with(call, done, tmp_path):
    folder, recipe = shutil.copytree(done[0], tmp_path / "copy"), done[1]
    changed = call("run", recipe, "--out", folder, *QUICK, "--set", "tokenizer.vocab_size=380", "--stage", "corpus")
    assert changed[0] == 0
    refused(call("sample", folder, "--prefix", "The"), "corpus has changed since base was made")


def test_odd_values(call, done, recipe, tmp_path):
    folder = done[0]
    refused(call("sample", folder, "--seed", -1), "the seed is -1")
    refused(call("sample", folder, "--prefix", "\udcff"), "is not UTF-8")
    refused(call("sample", folder, "--length", 10**12), "and at most 1000000 tokens")
    refused(call("sample", folder, "--length", 300), "ask for a shorter continuation")
    for change, words in {
        "seed=-1": "the seed is -1",
        'name="../up"': "without slashes",
        "base.optimisation.beta1=2.0": "beta1 is 2.0",
        "base.optimisation.clip=nan": "clip is",
        "corpus.prefix=999999999999999999999999": "corpus.prefix is",
        "tokenizer.vocab_size=999999999999": "tokenizer.vocab_size is",
    }.items():
        refused(call("run", recipe, "--out", tmp_path / "odd", "--set", change), words)
    status, out, _ = call("sample", folder, "--temperature", "1e-310", "--num", 2, "--json")
    assert status == 0
    first, second = json.loads(out)["results"][0]["texts"]
    assert first == second  # the likeliest token at every place
    exploded = ["--set", "base.optimisation.learning_rate=1e30", "--set", "base.optimisation.warmup=0"]
    refused(call("run", recipe, "--out", tmp_path / "odd", *exploded), "diverged at step", after="corpus")


def test_bad_python_recipes(call, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def broken():\n    return 1 / 0\n\ndef number():\n    return 3\n")
    refused(call("run", f"{path}:broken"), "failed with ZeroDivisionError")
    refused(call("run", f"{path}:number"), "returned a int")
    refused(call("run", f"{path}:missing"), "has no function 'missing'")


def test_a_python_recipe_runs(call, recipe, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"from freenergy import load_recipe\n\ndef mine():\n    return load_recipe({str(recipe)!r})\n")
    status, out, err = call("run", f"{path}:mine", "--out", tmp_path / "run", "--stage", "corpus", "--json")
    assert status == 0, err
    assert list(json.loads(out)["stages"]) == ["corpus"]


def test_a_server_s_address_holds_no_password(call, recipe, tmp_path):
    text = recipe.read_text().split("[base]")[0]
    for url, words in {"http://me:secret@127.0.0.1/v1": "FREENERGY_API_KEY", "nonsense": "such as http://"}.items():
        path = tmp_path / "remote.toml"
        path.write_text(f'{text}[base]\nkind = "remote"\nurl = "{url}"\n')
        refused(call("run", path, "--out", tmp_path / "out"), words)


def test_an_endpoint_that_is_down(call, recipe, tmp_path):
    text = recipe.read_text()
    remote = tmp_path / "remote.toml"
    base = '[base]\nkind = "remote"\nurl = "http://127.0.0.1:9/v1"\ntimeout_seconds = 2.0\n'
    remote.write_text(text.split("[base]")[0] + base)
    refused(call("run", remote, "--out", tmp_path / "out"), "127.0.0.1:9", after="corpus")


@pytest.mark.parametrize("limit", [3_000, 60_000, 2_000_000])
def test_no_room_on_disk(recipe, tmp_path, limit, begin):
    """The system refuses files above a size, in the corpus or in training: one sentence; later it goes on."""
    command = ("run", recipe, "--out", tmp_path / "out", *QUICK)

    def small():
        # Python would keep what it could write of compiled modules, cut short, for the next process that imports them
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    status, _, err = begin(*command, before=small).wait()
    refused((status, "", err), "no space left to write")
    assert not list((tmp_path / "out").rglob("*.part"))
    begin(*command).succeed()


def test_where_weights_cannot_be_fetched_the_fallback_is_run(call, monkeypatch, tmp_path):
    def unavailable(name, *_):
        raise ResourceUnavailable(f"{name} cannot be had: no route answers")

    ran = []

    def run_recipe(recipe, folder, **_):
        ran.append((recipe.name, folder.name))
        if recipe.name == "demo":
            unavailable("smollm2-135m")
        return iter(())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("freenergy.recipes.run", run_recipe)
    status, _, err = call("run", "demo", "--workers", "local:1")
    assert (status, ran) == (0, [("demo", "demo"), ("demo-tiny", "demo-tiny")])
    assert "no route answers; demo-tiny is run instead" in err
    ran.clear()
    status, _, err = call("run", "demo", "--set", 'fallback=""', "--workers", "local:1")
    assert (status, [name for name, _ in ran]) == (2, ["demo"])
    assert "no route answers" in err


def test_a_log_gets_a_line_of_progress_every_half_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("freenergy.cli.show.time.monotonic", lambda: now[0])
    with Bars() as bars, bars.track("reading", 100, "windows") as advance:
        for _ in range(10):
            now[0] += 8
            advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "reading: 20 of 100 windows, about 2:08 left",
        "reading: 40 of 100 windows, about 1:36 left",
    ]
