"""A run with an energy: negatives, training, the residual model, the certificate; killed at any moment and gone on."""

import json
import math
import shutil

import pytest
import torch

import freenergy
from freenergy import ResidualModel, UserError, load, load_recipe, run
from freenergy.core.files import file_hash, read_json
from freenergy.energies.ngram_features import NgramEnergy
from freenergy.recipes.load import make_recipe
from freenergy.testing.runs import tiny_run

CHANGES = [
    "base.optimisation.steps=6",
    "base.optimisation.validate_every=3",
]


@pytest.fixture
def recipe(write_recipe, tmp_path):
    return write_recipe(tmp_path, energy="product")


@pytest.fixture(scope="module")
def done(finished_run, corpus_file):
    """A finished run with an energy of three parts, and its results."""
    folder, _, results = finished_run(tiny_run(corpus_file, energy="product"), CHANGES)
    return folder, results


@pytest.fixture(scope="module")
def spoilt(done, tmp_path_factory):
    """A copy of it, for recipes that are refused: what they share is not done again."""
    return shutil.copytree(done[0], tmp_path_factory.mktemp("spoilt") / "run")


def some(joint, num=3):
    contexts = [[5, 6, 7, 8], [9]]
    rows = [[[b + n + t + 1 for t in range(4)] for n in range(num)] for b in range(2)]
    return freenergy.Continuations.from_lists(contexts, rows)


def test_the_stages_and_what_they_say(done):
    folder, results = done
    assert [result.name for result in results] == ["corpus", "base", "negatives", "energy", "candidates", "evaluation"]
    negatives, energy, _, evaluation = (result.summary for result in results[2:])
    assert negatives["train"] == {"windows": 24, "per_prefix": 4}
    assert [part["kind"] for part in energy["parts"]] == ["ngram", "probe", "log-ratio"]
    assert energy["validation"]["candidates"] == 8
    joint = evaluation["joint"]
    gain = joint["gain"]
    assert gain["nats_per_sequence"] <= math.log(8)
    assert joint["perplexity"]["certified"] < joint["base_perplexity"]  # a base of six steps is easily mended
    shrunk = joint["base_perplexity"] * (1 - gain["percent"] / 100)
    assert joint["perplexity"]["certified"] == pytest.approx(shrunk, rel=1e-9)
    assert 1 <= joint["ess"] <= 7
    assert gain["interval"][0] <= gain["percent"] <= gain["interval"][1]
    assert all("joint" in sample for sample in evaluation["samples"])
    card = (folder / "energy" / "model" / "README.md").read_text()
    assert "Product" in card
    assert "certified gain" in card


def test_the_joint_model_of_a_run(done, tmp_path):
    folder, _ = done
    joint = load(folder)
    x = some(joint)
    scores = joint.scored(x)
    assert torch.equal(joint.log_score(x), scores.log_base - scores.energy)
    torch.testing.assert_close(scores.log_base, joint.base.log_prob(x))
    by_part = joint.energy.energies(x)
    torch.testing.assert_close(sum(by_part.values()), scores.energy)
    assert scores.energy.std() > 0
    joint.save_pretrained(tmp_path / "pair", facts={"trained_on": "docstrings"})
    again = ResidualModel.from_pretrained(tmp_path / "pair")
    assert torch.equal(again.log_score(x), joint.log_score(x))
    assert torch.equal(load(tmp_path / "pair").log_score(x), joint.log_score(x))
    assert "trained on: docstrings" in (tmp_path / "pair" / "README.md").read_text()
    names = {path.suffix for path in (tmp_path / "pair").rglob("*") if path.is_file()}
    assert names <= {".json", ".safetensors", ".md"}


def test_nothing_is_done_twice(done):
    folder, results = done
    again = list(run(freenergy.load_run(folder).recipe, folder))
    assert all(result.was_cached for result in again)
    assert [result.summary for result in again] == [result.summary for result in results]


@pytest.mark.parametrize("kind", ["unit", "bit", "scratch"])
def test_networks_learn_in_a_run(recipe, tmp_path, kind):
    head, tail = recipe.read_text().split("[energy]\n")
    energy = {
        "unit": 'kind = "unit"',
        "bit": 'kind = "bit"\nprefix_once = true',
        "scratch": 'kind = "bit"\nstart = "scratch"',
    }[kind]
    masked = "[training.masked]\nsteps = 4\nbatch_size = 2\nvalidate_every = 2\n" if kind == "scratch" else ""
    recipe.write_text(f"{head}[energy]\n{energy}\n[training]{tail.split('[training]')[1]}\n{masked}")
    changes = [*CHANGES, "training.optimisation.ema=0.5", 'training.objective.kind="binary"']
    results = {result.name: result for result in run(load_recipe(str(recipe), changes), tmp_path / "out")}
    (part,) = results["energy"].summary["parts"]
    assert part["steps"] == 12
    assert math.isfinite(results["evaluation"].summary["joint"]["perplexity"]["certified"])
    records = [json.loads(line) for line in (tmp_path / "out/energy/training-0/metrics.jsonl").read_text().splitlines()]
    assert {"accuracy_data", "accuracy_noise", "energy_data", "spread", "certified_gain"} <= set(records[0]["metrics"])
    if kind == "scratch":
        infilled = '[[negatives.sources]]\nkind = "base"\n[[negatives.sources]]\nkind = "infilled"\n'
        infilled += f'model = "{tmp_path}/out/energy/trunk-0/model"\n'
        path = tmp_path / "infilled.toml"
        path.write_text(recipe.read_text() + infilled)
        *_, negatives = run(load_recipe(str(path), CHANGES), tmp_path / "infilled", stage="negatives")
        assert negatives.summary["relative_to_another_law"]


def test_fresh_negatives_and_a_saved_part(done, recipe, tmp_path):
    folder, _ = done
    head, tail = recipe.read_text().split("[energy]\n")
    parts = f'[[energy.parts]]\nkind = "saved"\npath = "{folder}/energy/part-0"\n[[energy.parts]]\nkind = "log-ratio"\n'
    recipe.write_text(f'{head}[energy]\nkind = "product"\n{parts}[training]{tail.split("[training]")[1]}')
    results = list(run(load_recipe(str(recipe), [*CHANGES, "negatives.fresh=true"]), tmp_path / "out"))
    assert "train" not in results[2].summary
    saved = results[3].summary["parts"][0]
    assert saved["kind"] == "saved"
    kept = load(tmp_path / "out").energy.parts[0]
    before = freenergy.load_energy(folder / "energy/part-0", base=load(folder).base, tokenizer=load(folder).tokenizer)
    assert torch.equal(kept.weight, before.weight)


def test_negatives_of_another_model_are_refused(done, recipe, tmp_path):
    """A store that was put into another run is not trained on in silence."""
    folder, _ = done
    from freenergy.noise.store import Identity, NegativeStore
    from freenergy.recipes.stages.negatives import stored_identity

    this = freenergy.load_run(folder)
    corpus = freenergy.Corpus.open(folder / "corpus")
    right = stored_identity(this, corpus, "train")
    NegativeStore.open(folder / "negatives/train", right)
    for name, word in (("lm", "language model"), ("tokenizer", "tokenizer")):
        fields = {key: getattr(right, key) for key in right.__dataclass_fields__}
        with pytest.raises(UserError, match=f"made with another {word}.*run the negatives stage again"):
            NegativeStore.open(folder / "negatives/train", Identity(**fields | {name: "0" * 16}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("negatives.per_prefix=0", "per_prefix is 0: set it to 1 or more, as contrast needs at least one negative"),
        ("training.optimisation.batch_size=512", "there are 24 training windows but a batch has 512"),
        ("training.negatives=9", "takes 9 negatives of each prefix but 4 are stored"),
        ("evaluation.candidates=1", "the upper estimate of log Z is undefined"),
        ("energy.parts=[]", "a product needs parts"),
        ('training.objective.kind="margin"', r"training\.objective\.kind is 'margin'; choose one of"),
        ('training.objective={kind="ranking", noise_ratio=2.0}', r"unknown key training\.objective\.noise_ratio"),
        ("energy.parts=[{}]", r"energy\.parts\.0 has no kind"),
        ('energy={kind="unit", dropout=2.0}', "dropout is 2.0: set it to at least 0 and below 1"),
        ('energy={kind="ngram", skips=[0]}', r"skips is \[0\]"),
        ('energy.parts=[{kind="probe", order=2}]', r"unknown key energy\.parts\.0\.order"),
        ('negatives.sources=[{kind="base", top_k=0}]', "top_k is 0"),
        ('energy.kind="bert"', r"energy\.kind is 'bert'; choose one of"),
        ('training.optimisation.preset="paper"', "no optimisation preset 'paper'"),
        ("negatives.fresh=true", "linear energies are fitted to stored negatives"),
    ],
)
def test_bad_settings_are_one_sentence(recipe, spoilt, change, words):
    with pytest.raises(UserError, match=words) as found:
        list(run(load_recipe(str(recipe), [*CHANGES, change]), spoilt))
    assert "\n" not in str(found.value)


def test_a_network_is_needed_where_its_states_are_read(write_recipe, tmp_path):
    changes = ["evaluation.candidates=4", "evaluation.certified_windows=2"]
    recipe = write_recipe(tmp_path, base="counts", energy="product")
    with pytest.raises(UserError, match="which a NgramLM does not show"):
        list(run(load_recipe(str(recipe), changes), tmp_path / "out"))
    text = recipe.read_text()
    recipe.write_text(text.split("[energy]")[0] + '[energy]\nkind = "ngram"\norder = 3\n')
    *_, evaluation = run(load_recipe(str(recipe), changes), tmp_path / "out")
    assert math.isfinite(evaluation.summary["joint"]["perplexity"]["certified"])
    assert load(tmp_path / "out").energy.settings == NgramEnergy(order=3)


def test_a_run_without_an_energy_says_so(write_recipe, tmp_path):
    path = write_recipe(tmp_path)
    loaded = load_recipe(str(path), ["base.optimisation.steps=2", "base.optimisation.validate_every=2"])
    list(run(loaded, tmp_path / "out", stage="base"))
    with pytest.raises(UserError, match="has no energy: add an"):
        load(tmp_path / "out")
    with pytest.raises(UserError, match=r"no stage 'energy' \(the recipe has no energy\)"):
        list(run(loaded, tmp_path / "out", stage="energy"))


def test_presets_of_the_paper_can_be_named_and_changed(recipe):
    loaded = load_recipe(str(recipe), ['training.optimisation={preset="paper-bit-base", steps=7}'])
    found = loaded.training.optimisation
    assert (found.batch_size, found.warmup, found.steps) == (60, 2000, 7)
    assert (found.learning_rate, found.clip) == (5e-5, 0.25)


def test_kill_9_in_negatives_training_and_evaluation_ends_with_the_same_bits(done, recipe, tmp_path, hashes, begin):
    """Killed in each stage that an energy adds; the folder ends as if nothing had happened."""
    command = ["run", recipe, *(word for change in CHANGES for word in ("--set", change)), "--out"]
    cut, whole = tmp_path / "cut", done[0]
    metrics = cut / "energy" / "training-2" / "metrics.jsonl"
    moments = [
        ("negatives", (cut / "negatives" / "train" / "shard-00001.parquet").exists),
        ("energy", lambda: any((cut / "features").glob("*/*.safetensors"))),
        ("energy", (cut / "energy" / "part-1" / "energy.json").exists),
        ("energy", lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 6),
        ("candidates", (cut / "candidates" / "shard-00000.parquet").exists),
        ("evaluation", (cut / "evaluation" / "scores" / "00000.safetensors").exists),
    ]
    for stage, moment in moments:
        begin(*command, cut).kill_when(moment)
        assert not (cut / stage / "stage.json").exists(), stage
    for folder in (cut, whole):  # the second one has all but the figures
        begin(*command, folder).succeed()
    for name in ("energy/model/2/energy.safetensors", "negatives/train/shard-00002.parquet"):
        assert file_hash(cut / name) == file_hash(whole / name)
    assert read_json(cut / "evaluation/evaluation.json") == read_json(whole / "evaluation/evaluation.json")
    assert hashes(cut) == hashes(whole)


def test_linear_parts_are_done_together_or_not_at_all(done, tmp_path):
    """Killed between the saving of two linear parts: both are fitted again, and all ends with the same bits."""
    folder, results = done
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    energy = again / "energy"
    (energy / "stage.json").unlink()
    shutil.rmtree(energy / "part-1")
    shutil.rmtree(energy / "part-2")
    shutil.rmtree(energy / "training-2")
    redone = list(run(freenergy.load_run(again).recipe, again))
    assert [result.was_cached for result in redone] == [True, True, True, False, True, True]
    assert redone[3].summary == results[3].summary
    for part in range(3):
        name = f"energy/part-{part}/energy.safetensors"
        assert file_hash(again / name) == file_hash(folder / name)


def test_a_saved_part_that_is_missing_costs_nothing(done, tmp_path):
    folder, _ = done
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    parts = [{"kind": "saved", "path": str(tmp_path / "gone")}, {"kind": "ngram"}]
    for path, words in ((tmp_path / "gone", "there is no energy in"), (again / "energy/part-0", "lies in the folder")):
        parts[0]["path"] = str(path)
        table = freenergy.load_run(again).recipe.to_json() | {"energy": {"kind": "product", "parts": parts}}
        with pytest.raises(UserError, match=words):
            list(run(make_recipe(table), again))
    load(again)


def test_an_energy_of_an_older_base_is_not_loaded(done, tmp_path):
    folder, _ = done
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    table = freenergy.load_run(again).recipe.to_json()
    table["base"]["optimisation"]["steps"] = 3
    list(run(make_recipe(table), again, stage="base"))
    with pytest.raises(UserError, match="base has changed since negatives was made"):
        load(again)


def test_folders_of_others_are_kept(done, tmp_path):
    joint = load(done[0])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for each in (joint, joint.energy, *joint.energy.parts):
        with pytest.raises(UserError, match="contains other files"):
            each.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_what_has_no_numbers_is_scored_as_nothing(done):
    joint = load(done[0])
    nothing = joint.scored(freenergy.Continuations.from_lists([[5, 6]], [[]]))
    assert tuple(nothing.energy.shape) == (1, 0)
    empty = joint.scored(freenergy.Continuations.from_lists([[5, 6]], [[[]]]))
    assert torch.isfinite(empty.log_score).all()
    with pytest.raises(UserError, match="a token id is not below"):
        joint.scored(freenergy.Continuations.from_lists([[5, 6]], [[[10_000]]]))
