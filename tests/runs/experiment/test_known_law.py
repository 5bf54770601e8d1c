"""The family of known laws: its numbers against sums over all strings, its data, and what it refuses."""

import itertools
import math
import tomllib
from importlib import resources

import pytest
import torch

from freenergy import Rng, UserError
from freenergy.core.files import read_arrays, read_json
from freenergy.core.progress import Silent
from freenergy.recipes.families.known_law import GRUBase, KnownLaw, LawSettings, log_q
from freenergy.recipes.load import load_experiment, make_experiment
from freenergy.runs.sweep.run import run_sweep
from freenergy.training.loop import read_records

SMALL = LawSettings(vocab_size=3, order=1, length=3, train=8, validation=5, test=80_000, samples=80_000)
EVERY = torch.tensor(list(itertools.product(range(3), repeat=3)))


@pytest.fixture(scope="module")
def domain():
    return KnownLaw(SMALL, GRUBase(width=6), seed=4)


@pytest.fixture(scope="module")
def network(domain):
    made = domain.network(Rng(2))
    with torch.no_grad():
        for weight in made.module.parameters():
            weight.mul_(3)
    return made


@pytest.fixture(scope="module")
def exact(domain, network):
    """The three numbers in nats per token and the variance of each string's share, by sums over all 27 strings."""
    log_p, log_model = domain.log_law(EVERY), log_q(network, EVERY)
    p, q = log_p.exp(), log_model.exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    assert q.sum().item() == pytest.approx(1, abs=1e-6)
    return {
        "nats above the law": _moments((p, log_p - log_model)),
        "KL(q ‖ law) of samples": _moments((q, log_model - log_p)),
        "samples' surprise": _moments((p, log_p), (q, -log_p)),
    }


def _moments(*parts):
    means = [(law * value).sum() for law, value in parts]
    spread = [(law * (value - mean) ** 2).sum() for (law, value), mean in zip(parts, means, strict=True)]
    return sum(means).item() / 3, sum(spread).item() / 9


def test_numbers_are_those_of_the_enumeration(domain, network, exact, tmp_path):
    """Within six standard errors of the exact ones: fails by chance with probability below 1e-8."""
    found = domain.measure(network, tmp_path, Rng(3), Silent())
    assert list(found) == ["nats above the law", "at the end", "KL(q ‖ law) of samples", "samples' surprise"]
    errors = {name: 6 * (variance / 80_000) ** 0.5 for name, (_, variance) in exact.items()}
    for name, (value, _) in exact.items():
        assert found[name] == pytest.approx(value, abs=errors[name]), name
    # mutants: the three are different numbers
    for (one, (a, _)), (other, (b, _)) in itertools.combinations(exact.items(), 2):
        assert abs(a - b) > errors[one] + errors[other], (one, other)
    assert math.isnan(found["at the end"])  # nothing was trained
    kept = read_arrays(tmp_path / "strings.safetensors")["above"]
    assert kept.mean() == pytest.approx(found["nats above the law"])


def test_strings_follow_the_law_and_splits_differ(domain):
    counts = torch.zeros(27).index_add_(0, _number(domain.strings["test"]), torch.ones(SMALL.test))
    share = counts / SMALL.test
    # 6 standard errors of a share are at most 6 · √(¼ / 80,000) = 0.0106: fails by chance below 1e-7
    assert (share.double() - domain.log_law(EVERY).exp()).abs().max() < 0.011
    assert (share - 1 / 27).abs().max() > 0.011  # mutant: uniform strings
    assert len({tuple(rows.flatten()[:15].tolist()) for rows in domain.strings.values()}) == 3
    other = KnownLaw(SMALL, GRUBase(width=6), seed=5)
    assert (other.log_law(EVERY) - domain.log_law(EVERY)).abs().max() > 0.1  # every seed has a law of its own


def _number(rows):
    return (rows * torch.tensor([9, 3, 1])).sum(1)


def test_an_epoch_reads_every_string_once(domain):
    data = domain.data(batch_size=4, accumulate=2, rng=Rng(1))
    assert data.epoch_steps == 2
    for epoch in range(2):
        steps = [2 * epoch + 1, 2 * epoch + 2]
        read = torch.cat([data.batch(step, micro).tokens for step in steps for micro in range(2)])
        assert sorted(read.tolist()) == sorted(domain.strings["train"].tolist())
    assert torch.equal(next(data.held_out()).tokens, domain.strings["validation"])


def test_the_shipped_sweep_in_short(tmp_path):
    """Two rows of it: the number at the end is that of the last validation, differences are paired by seed."""
    table = tomllib.loads((resources.files("freenergy.recipes") / "experiments/earm-overfit.toml").read_text())
    assert len(table["seeds"]) >= 10
    rows = [row for row in table["rows"] if row["name"] in ("E-ARM", "dropout 0.2")]
    rows[1]["set"]["base"]["earm"]["start_epoch"] = 2
    table |= {"seeds": [0, 1], "rows": rows}
    table["recipe"]["law"] |= {"test": 40, "samples": 30}
    table["recipe"]["base"]["width"] = 8
    table["recipe"]["base"]["optimisation"] |= {"steps": 12, "validate_every": 4, "batch_size": 30}
    found = run_sweep(make_experiment(table), tmp_path)
    assert [row["name"] for row in found["rows"]] == ["base", "dropout 0.2", "E-ARM"]
    base = tmp_path / "seed-0" / "base"
    last = [r["validation"] for r in read_records(base / "base" / "training") if r["validation"] is not None][-1]
    domain = KnownLaw(LawSettings(test=40, samples=30), GRUBase(width=8), seed=0)
    wanted = last + domain.log_law(domain.strings["validation"]).mean().item() / 16
    assert dict(read_json(base / "measurement" / "numbers.json")["numbers"])["at the end"] == pytest.approx(wanted)
    for pair in found["comparisons"]:
        on_test, over_seeds = dict(pair["on_test"]), dict(pair["over_seeds"])
        assert on_test["nats above the law"][0] == pytest.approx(over_seeds["nats above the law"][0])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"vocab_size": 1}, "law.vocab_size"),
        ({"spread": 0.0}, "law.spread"),
        ({"order": -1}, "law.order"),
        ({"vocab_size": 60, "order": 4}, "lower one of them"),
        ({"train": 0}, "law.train"),
    ],
)
def test_bad_laws_are_refused(changes, word):
    with pytest.raises(UserError, match=word):
        LawSettings(**changes)


def test_a_batch_of_more_strings_than_there_are_is_refused():
    with pytest.raises(UserError, match="more than the 60"):
        load_experiment("earm-overfit", ["recipe.base.optimisation.batch_size=61"])
    with pytest.raises(UserError, match="dropout"):
        GRUBase(dropout=1.0)
