"""The experiments that ship, each from end to end on data so small that it takes seconds."""

import gzip
import json
import re
import struct
import tomllib
from importlib import resources

import numpy as np
import pytest

from freenergy import UserError
from freenergy.core.files import read_json
from freenergy.recipes.load import experiments, load_experiment, load_run, make_experiment
from freenergy.runs.sweep.run import run_sweep

WORDS = re.findall(r"\w+", "the river runs down to a cold sea where men go out in boats and come home at night")
GERMAN = re.findall(r"\w+", "der fluss fließt hinab zu einer kalten see wo männer in booten hinaus und nachts heim")
SHORT = [f"recipe.base.optimisation.{change}" for change in ("steps=4", "validate_every=2", "warmup=0")]
SHORTER = ["continued.base.optimisation.steps=3", "continued.base.optimisation.validate_every=1"]
LANGUAGE = [
    "recipe.corpus.documents=paragraph", "recipe.corpus.deduplicate=0", "recipe.corpus.prefix=10",
    "recipe.corpus.continuation=5", "recipe.corpus.validation_share=0.1", "recipe.corpus.test_share=0.2",
    "recipe.tokenizer.vocab_size=300", "recipe.base.block=16",
    "recipe.base.validation_tokens=100", "recipe.evaluation.windows=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    path.write_text("\n\n".join(" ".join(rng.choice(WORDS, 60)) for _ in range(40)))
    return [f'recipe.corpus.source="{path}"', *LANGUAGE]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    for split, count in (("train", 60), ("val", 8), ("test_2016_flickr", 8)):
        chosen = [rng.integers(0, len(GERMAN), rng.integers(3, 8)) for _ in range(count)]
        for language, words in (("en", WORDS), ("de", GERMAN)):
            lines = [" ".join(words[i] for i in sentence) for sentence in chosen]
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
    small = ["vocabulary=300", "layers=1", "width=16", "heads=2", "feedforward=32", "longest=20", "batch_tokens=100",
             "resampled=[2]", "exposure_pairs=4"]  # fmt: skip
    sizes = [f"{part}.optimisation.batch_size=100" for part in ("recipe.base", "continued.base")]
    return [f'recipe.translation.path="{folder}"', *(f"recipe.translation.{each}" for each in small), *sizes]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("digits"), np.random.default_rng(0)
    for name, count in (("train", 24), ("t10k", 6)):
        pixels = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        content = struct.pack(">4I", 0x803, count, 8, 8) + pixels.tobytes()
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    small = ["blocks=1", "features=4", "head=4", "validation=6", "validation_images=6", "test_images=6",
             "train_images=6", "sheet=4", "fake=8"]  # fmt: skip
    sizes = [f"{part}.optimisation.batch_size=4" for part in ("recipe.base", "continued.base")]
    return [f'recipe.images.path="{folder}"', *(f"recipe.images.{each}" for each in small), *sizes]


def done(name, changes, folder):
    loaded = load_experiment(name, [*SHORT, *SHORTER, *changes])
    return run_sweep(loaded, folder), loaded


def whole_table(table, loaded):
    """Every row has finite numbers in the main column, its paper's numbers and its cost."""
    assert [row["name"] for row in table["rows"]] == loaded.row_names()
    for row in table["rows"]:
        assert row["numbers"][table["main_column"]]["mean"] > 0
        assert row["cpu_seconds"]["mean"] > 0
        assert row["paper"] == loaded.paper.get(row["name"], {})
    controls = [each for each in table["comparisons"] if each["is_control"]]
    assert len(controls) == sum(row["control"] is not None for row in table["rows"]) > 0
    return True


def test_every_experiment_is_read():
    names = ("wikitext", "level", "start-epoch", "multi30k", "tatoeba", "mnist", "overfit", "table-4")
    of_energies = ("chunks-wikitext", "ladder-wikitext", "equal-compute")
    assert set(experiments()) == {"taggers", *of_energies, *(f"earm-{name}" for name in names)}
    for name, about in experiments().items():
        assert about
        loaded = load_experiment(name)
        assert loaded.name == name
        has_control = any(row.of for rows in loaded.variants.values() for row in rows)
        # a row that stops when validation gets worse is its own control: more steps of it change nothing
        is_compared = name.startswith("earm") and name not in ("earm-overfit", "earm-table-4")
        assert has_control == is_compared, "rows of networks have a control of equal compute"


@pytest.mark.parametrize("name", ["earm-wikitext", "earm-level"])
def test_wikitext(text, tmp_path, name):
    changes = [*text, "recipe.evaluation.certified_windows=2", "recipe.evaluation.candidates=4", "seeds=[0]"]
    table, loaded = done(name, changes, tmp_path)
    assert whole_table(table, loaded)
    assert table["columns"] == ["perplexity", "perplexity of windows", "perplexity resampled (certified)",
                                "perplexity resampled (lower)", "perplexity resampled (upper)"]  # fmt: skip


def test_start_epoch(text, tmp_path):
    changes = [*text, "seeds=[0]", 'grid.vary={"base.earm.start_epoch"=[0,0.05]}', "grid.set.base.earm.length=5",
               "grid.set.base.earm.start_epoch=0"]  # fmt: skip
    table, loaded = done("earm-start-epoch", changes, tmp_path)
    assert whole_table(table, loaded)
    assert [row["point"].get("start_epoch") for row in table["rows"]] == [None, 0, 0.05, None]


def test_chunks(text, tmp_path):
    """All samplers are certified on the same windows, and rows of a seed share its corpus and base."""
    table = tomllib.loads((resources.files("freenergy.recipes") / "experiments/chunks-wikitext.toml").read_text())
    for row in table["rows"]:
        row["set"].pop("negatives", None)
    table["rows"][0]["set"]["evaluation"]["sequential"]["particles"] = 8
    table |= {"seeds": [0, 1]}
    table["set"] |= {
        "corpus": {"source": text[0].split('"')[1], "documents": "paragraph", "deduplicate": 0, "prefix": 10,
                   "continuation": 10, "validation_share": 0.1, "test_share": 0.2},
        "tokenizer": {"vocab_size": 300},
        "base": {"block": 16, "validation_tokens": 50, "optimisation": {"steps": 2, "validate_every": 1}},
        "negatives": {"windows": 20, "per_prefix": 4, "validation_windows": 4, "validation_per_prefix": 7},
        "energy": {"parts": [{"kind": "ngram", "order": 2}]},
        "evaluation": {"windows": 6, "samples": 1, "candidates": 8, "certified_windows": 4, "position_windows": 0},
    }  # fmt: skip
    found = run_sweep(make_experiment(table), tmp_path)
    numbers = {row["name"]: row["numbers"] for row in found["rows"]}
    assert list(numbers) == ["base", "particles", "chunks of 10", "chunks of 5", "local mix"]
    assert numbers["particles"]["certified gain of particles %"]["mean"] is not None
    assert numbers["local mix"]["gain over the lowest rung %"]["mean"] is not None
    for seed in (0, 1):
        trained = [read_json(path) for path in tmp_path.glob(f"seed-{seed}/*/base/stage.json")]
        assert len(trained) == 5
        assert len({json.dumps(record, sort_keys=True) for record in trained}) == 1, "the base is trained once"


def test_any_recipe_can_be_swept(text, tmp_path, call):
    """Orders of an n-gram base with an energy: each row is a run of the family residual."""
    corpus = {"source": text[0].split('"')[1], "documents": "paragraph", "deduplicate": 0, "prefix": 10,
              "continuation": 5, "validation_share": 0.1, "test_share": 0.2}  # fmt: skip
    recipe = {
        "corpus": corpus, "tokenizer": {"vocab_size": 300}, "base": {"kind": "ngram", "order": 3},
        "negatives": {"windows": 20, "per_prefix": 4, "validation_windows": 4, "validation_per_prefix": 7},
        "energy": {"kind": "ngram", "order": 2},
        "evaluation": {"windows": 6, "samples": 1, "candidates": 8, "certified_windows": 4},
    }  # fmt: skip
    rows = [{"name": "order 2", "set": {"base": {"order": 2}}}]
    made = {"name": "orders", "seeds": [0, 1], "recipe": recipe, "rows": rows}
    table = run_sweep(make_experiment(made), tmp_path)
    assert [row["name"] for row in table["rows"]] == ["base", "order 2"]
    assert table["columns"] == ["perplexity of the base", "certified perplexity", "certified gain %"]
    on_test = dict(table["comparisons"][0]["on_test"])
    assert set(on_test) == {"percent lower perplexity", "percent lower perplexity without our energy"}
    assert all(low <= value <= high for value, low, high in on_test.values())
    row = tmp_path / table["rows"][1]["folders"][0]
    assert load_run(row).recipe.base.order == 2
    assert call("verify", row)[0] == call("sample", row, "--prefix", "the", "--length", 2)[0] == 0
    with pytest.raises(UserError, match="rows of the family residual have no control"):
        make_experiment({**made, "rows": [{"name": "a", "control": True}]})


def test_multi30k(pairs, tmp_path):
    table, loaded = done("earm-multi30k", pairs, tmp_path)
    numbers = [row["numbers"]["nats/token test"]["mean"] for row in table["rows"]]
    assert len(numbers) == 8
    assert min(numbers) > 0
    assert table["main_column"] == "BLEU beam 5"
    assert set(loaded.paper["E-ARM"]) <= set(table["columns"])


def test_tatoeba_is_the_same_with_other_pairs():
    loaded = load_experiment("earm-tatoeba")
    (rows,) = loaded.variants.values()
    pairs = rows[0].recipe.translation
    assert (pairs.path, pairs.source, pairs.target) == ("tatoeba-en-es", "en", "es")
    assert rows[3].recipe.base.earm is not None


def test_mnist(digits, tmp_path):
    table, loaded = done("earm-mnist", [*digits, "seeds=[0]"], tmp_path)
    assert whole_table(table, loaded)
    assert len(table["rows"]) == 6, "four rows of the paper's table, and a control of each network"
    assert set(loaded.paper["PixelCNN: E-ARM"]) <= set(table["columns"])


def test_the_command(call, digits, tmp_path):
    """Tables on stdout; the second time JSON from what is kept; figures and sheets beside them."""
    changes = [*SHORT, *SHORTER, *digits, "seeds=[0]"]
    arguments = ["experiment", "earm-mnist", "--out", tmp_path / "out", *(x for c in changes for x in ("--set", c))]
    status, out, err = call(*arguments)
    assert status == 0, err
    for words in ("bits/dim test", "PixelCNN: E-ARM", "Against the control of equal compute", "table.md"):
        assert words in " ".join(out.split())
    status, out, _ = call(*arguments, "--json")
    found = json.loads(out)
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert {key: found[key] for key in table} == table
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"losses-pixelcnn.svg", "losses-gated-pixelcnn.svg", "pixelcnn-seed-0-e-arm.png"} <= names


def test_bad_recipes_are_one_sentence(call, tmp_path):
    status, _, err = call("experiment", "no-such")
    assert status == 2
    assert "earm-wikitext" in err
    status, out, _ = call("experiment", "earm-mnist", "--set", "seeds=[]", "--json")
    assert status == 2
    assert "give at least one seed" in json.loads(out)["error"]
    status, _, err = call(
        "experiment", "earm-mnist", "--set", f'recipe.images.path="{tmp_path}/none"', "--out", tmp_path / "o"
    )
    assert status == 2
    assert err.count("freenergy:") == 1


TEXT = {"family": "language-model", "corpus": {"source": "a"}}
BASE = {"name": "x", "recipe": TEXT}
EARM = {"base": {"earm": {}}}
GRID = {"vary": {"base.earm.weight": [1.0]}, "set": EARM}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": []}, "give at least one seed"),
        ({"seeds": [1, 1]}, "none of them twice"),
        ({"seeds": [-1]}, "the seed is -1"),
        ({"name": "/"}, "without slashes"),
        ({"name": "-"}, "take up to 100 letters"),
        ({"rows": [{"name": "a b"}, {"name": "A-B"}]}, "two rows are called 'a b' and 'A-B'"),
        ({"rows": [{"name": "base"}]}, "two rows are called 'base'"),
        ({"rows": [{"name": "a", "control": True}]}, "the row 'a': the row has a control but no E-ARM"),
        ({"rows": [{"name": "a, control"}, {"name": "a", "control": True, "set": EARM}]}, "two rows are called"),
        ({"rows": [{"name": "a", "set": {"base": {"earm": {"length": 0}}}}]}, "rows.0, base.earm: length is 0"),
        ({"rows": [{"name": "a", "set": {"base": {"earm": {"lengths": 1}}}}]}, "did you mean length?"),
        ({"rows": [{"name": "a", "teaching": {}}]}, "unknown key rows.0.teaching"),
        ({"paper": {"q": {"x": 1.0}}}, "paper names the row 'q', which there is not: choose one of base"),
        ({"recipe": TEXT | {"base": {"block_": 3}}}, "unknown key base.block_"),
        ({"recipe": {"family": "images", "images": {"block_": 3}}}, "unknown key images.block_"),
        ({"recipe": {"family": "music"}}, "family is 'music': choose one of residual"),
        ({"recipe": {"family": "translation"}}, "translation is missing"),
        ({"recipe": "no-such"}, "there is no recipe 'no-such'"),
        ({"variants": {"v": {"base": {"block_": 3}}}}, "variants.v: unknown key base.block_"),
        ({"variants": 3}, "variants is 3"),
        ({"grid": {"vary": {}}}, "the grid varies nothing"),
        ({"grid": GRID | {"vary": {"base.earm.weight": [1.0, 1.0]}}}, "names a value of base.earm.weight twice"),
        ({"grid": GRID | {"full": False}}, "grid.set has no number for base.earm.weight"),
        ({"recipe": TEXT | EARM}, "the base has E-ARM"),
        ({"rowz": []}, "unknown key rowz (did you mean rows?)"),
    ],
)
def test_refusals(changes, words):
    with pytest.raises(UserError) as refused:
        make_experiment({**BASE, **changes})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_equal_compute(text, tmp_path):
    """A base that is tuned for longer is compared, without its energy, with the energy on a shorter tuning."""
    table = tomllib.loads((resources.files("freenergy.recipes") / "experiments/equal-compute.toml").read_text())
    table["rows"] = table["rows"][:2]
    for steps, row in enumerate(table["rows"], start=1):
        row["set"]["base"]["tune"] = {"block": 16, "validation_tokens": 50,
                                      "optimisation": {"steps": 4 * steps, "batch_size": 2, "learning_rate": 0.01,
                                                       "validate_every": 4}}  # fmt: skip
    table["recipe"] = {
        "corpus": {"source": text[0].split('"')[1], "documents": "paragraph", "deduplicate": 0, "prefix": 10,
                   "continuation": 10, "validation_share": 0.1, "test_share": 0.2},
        "chunk": 5,
        "tokenizer": {"vocab_size": 300},
        "base": {"block": 16, "validation_tokens": 50, "optimisation": {"steps": 2, "validate_every": 1},
                 "local": {"order": 2, "num_windows": 4}},
        "energy": {"kind": "probe"},
    }  # fmt: skip
    table["set"] = {
        "negatives": {"windows": 20, "per_prefix": 4, "validation_windows": 4, "validation_per_prefix": 7},
        "evaluation": {"windows": 6, "samples": 1, "candidates": 8, "certified_windows": 4, "position_windows": 0},
    }
    found = run_sweep(make_experiment(table), tmp_path)
    pairs = {(each["ours"], each["other"]): dict(each["on_test"]) for each in found["comparisons"]}
    assert set(pairs) == {("2T", "T"), ("T", "base"), ("2T", "base")}
    summaries = {row: read_json(tmp_path / "seed-0" / row / "evaluation" / "evaluation.json") for row in ("t", "2t")}
    longer, certified = summaries["2t"]["ladder"][-2], summaries["t"]["ladder"][-1]
    assert (longer["name"], certified["name"]) == ("local", "energy")
    without = pairs["2T", "T"]["percent lower perplexity without our energy"]
    ratio = longer["perplexity"] / certified["perplexity"]
    assert without[0] == pytest.approx(100 * (1 - ratio), abs=1e-3)
    table["rows"][1]["against"] = ["3T"]
    with pytest.raises(UserError, match=r"'2T' is against '3T': name one of the other rows"):
        make_experiment(table)
