"""The cost model beside what torch counts, and beside files."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from freenergy import UserError, load_recipe
from freenergy.apps.cost_model import Cost, Devices, Known, cost_of
from freenergy.apps.cost_model.stages import WindowCounts, drawing, reading, scoring, storing, training
from freenergy.lm.presets import preset, shape_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def shape():
    return shape_of(preset("tiny").config(vocab_size=100, eos=0))


def test_reading_and_predicting_are_what_torch_counts():
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, attn_implementation="eager")
    model, rows, T = GPT2LMHeadModel(config).eval(), 3, 8
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(rows, T, dtype=torch.long), use_cache=False)
    shape = shape_of(config)
    assert shape.reading(rows * T, T) + shape.predicting(rows * T) == counter.get_total_flops()


def test_grouped_heads_count_what_is_attended_to():
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    found = shape_of(config)
    assert found.attention == 64
    assert found.weights == 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 64


def test_a_training_step_is_three_readings(shape):
    once = reading(shape, WindowCounts(prefix=0, continuation=20), 4.0)
    learned = training(shape, 1, 4, 20, predicts=False)
    assert learned.flops == pytest.approx(3 * once.flops)
    assert learned.sent == 0
    assert training(shape, 1, 4, 20, predicts=False, ranks=4).sent == pytest.approx(1.5 * 4 * shape.parameters)


def test_the_prefix_enters_once(shape):
    windows = WindowCounts(prefix=100, continuation=10)
    one, many = (drawing(shape, windows, 1, n) for n in (1, 101))
    short = drawing(shape, WindowCounts(prefix=0, continuation=10), 1, 100)
    assert many.flops - one.flops < 2 * short.flops
    assert many.tokens == 100 + 101 * 10
    together, apart = (scoring(shape, windows, 50.0, once_for=n) for n in (50.0, 1.0))
    assert apart.tokens - together.tokens == 49 * 100


def test_stored_draws_grow_with_their_number_and_with_the_vocabulary():
    windows = WindowCounts(prefix=10, continuation=40)
    small, twice, wide = (
        storing(windows, M, 8, V, 64).bytes for M, V in ((640, 1024), (1280, 1024), (640, 1024 * 1024))
    )
    assert twice == 2 * small
    assert wide - small == pytest.approx(640 * 8 * 40 * 10 / 8)


def test_every_stage_of_a_recipe_has_its_cost():
    found = cost_of(load_recipe("demo-tiny"))
    assert list(found) == ["base", "negatives", "energy", "candidates", "evaluation"]
    assert all(cost.bytes > 0 for cost in found.values())
    # linear energies of kept activations are fitted without the base
    assert [name for name, cost in found.items() if not cost.flops] == ["energy"]
    # and the true text is read
    more = cost_of(load_recipe("demo-tiny", ["evaluation.candidates=2551"]))
    assert more["candidates"].flops / found["candidates"].flops == pytest.approx(10, rel=0.02)
    counted = cost_of(load_recipe("penn-treebank-5gram"), Known(vocab_size=10_000))
    assert counted["base"] == Cost()
    tuned = [cost_of(load_recipe("demo", [f"base.tune={{optimisation={{steps={n}}}}}"]))["tuned"] for n in (200, 400)]
    assert tuned[1].tokens - tuned[0].tokens == pytest.approx(200 * 4 * 128 + 10 * 10_000)  # and ten validations


def test_what_a_recipe_does_not_say_is_asked_for():
    with pytest.raises(UserError, match=r"--windows"):
        cost_of(load_recipe("demo-tiny", ["negatives.windows=0"]))
    everything = cost_of(load_recipe("demo-tiny", ["negatives.windows=0"]), Known(train_windows=800))
    assert everything == cost_of(load_recipe("demo-tiny"))
    with pytest.raises(UserError, match=r"--vocab-size"):
        cost_of(load_recipe("demo-tiny", ['tokenizer={kind="words"}']))


def test_hours_are_those_of_the_slower_of_work_and_sending():
    cost = Cost(flops=3.6e15, sent=7.2e13)
    assert Devices(count=1, peak=1e12, utilisation=0.5, bandwidth=1e13).hours(cost) == pytest.approx(2)
    assert Devices(count=10, peak=1e12, utilisation=0.5, bandwidth=1e10).hours(cost) == pytest.approx(2)
    for bad in ({"count": 0}, {"peak": 0.0}, {"utilisation": 1.5}, {"bandwidth": math.inf}):
        with pytest.raises(UserError, match=next(iter(bad)).replace("count", "devices")):
            Devices(**bad)


def test_the_command_line_tells_it(call):
    status, out, _ = call("cost", "demo-tiny", "--devices", 2, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["stages"]["negatives"]["flops"] == cost_of(load_recipe("demo-tiny"))["negatives"].flops
    status, out, _ = call("cost", "demo-tiny")
    assert status == 0
    assert "candidates" in out
    assert "assumption" in out
    status, _, err = call("cost", "demo-tiny", "--devices", 0)
    assert status == 2
    assert "Traceback" not in err


def test_a_real_run_costs_what_was_said(tmp_path):
    """Within 25 %, of operations and of files; three sizes are in docs/scaling.md."""
    spec = importlib.util.spec_from_file_location("scaling", BENCHMARKS / "scaling.py")
    scaling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scaling)
    text = tmp_path / "text.jsonl"
    pages = sorted(BENCHMARKS.parent.glob("docs/*.md"))
    text.write_text("".join(json.dumps({"text": page.read_text()}) + "\n" for page in pages))
    size = scaling.SIZES["small"] | {"corpus": {"source": str(text), "validation_share": 0.2, "test_share": 0.2}}
    rows = scaling.compared("small", scaling.recipe_of(size))
    assert [row["stage"] for row in rows] == ["base", "negatives", "energy", "candidates", "evaluation"]
    for row in rows:
        for what in ("flops", "bytes"):
            assert row[f"{what}_predicted"] == pytest.approx(row[what], rel=0.25), row
