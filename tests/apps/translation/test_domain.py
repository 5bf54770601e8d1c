"""Translation as a domain: it trains by the one task, with E-ARM too, is measured and compared."""

import dataclasses
import json
import math
import shutil

import pytest
import torch

from freenergy.apps.translation.domain import open_translation
from freenergy.apps.translation.settings import TranslationSettings
from freenergy.core.errors import UserError
from freenergy.core.files import file_hash
from freenergy.core.progress import Silent
from freenergy.core.rng import Rng
from freenergy.objectives.earm import EARM
from freenergy.recipes.families.network import Domain
from freenergy.training.loop import fit
from freenergy.training.settings import LanguageModelLoss, Optimisation
from freenergy.training.tasks.autoregressive import AutoregressiveTask

COLUMNS = [
    "BLEU greedy", "BLEU beam 2", "chrF beam 2", "ROUGE-1", "ROUGE-2", "ROUGE-L", "BLEU [0, 6)", "BLEU [6, ∞)",
    "BLEU sampled", "BLEU resampled 3", "BLEU highest of 3", "nats/token test", "nats/token after own words",
    "nats/token after true words",
]  # fmt: skip


@pytest.fixture(scope="module")
def domain(toy, tmp_path_factory):
    settings = TranslationSettings(
        path=str(toy), vocabulary=300, longest=30, layers=1, width=32, heads=2, feedforward=64, dropout=0.0,
        batch_tokens=300, beams=2, resampled=(3,), lengths=(6,), exposure_pairs=10,
    )  # fmt: skip
    return open_translation(settings, tmp_path_factory.mktemp("domain"), Silent())


def train(domain, folder, steps, *, earm=None, stop=None, often=60.0):
    network = domain.network(Rng(3))
    data = domain.data(batch_size=200, accumulate=1, rng=Rng(4))
    settings = Optimisation(
        steps=steps, batch_size=200, learning_rate=5e-3, warmup=10, validate_every=10, checkpoint_seconds=often
    )
    task = AutoregressiveTask(network, data, LanguageModelLoss(label_smoothing=0.05, earm=earm))
    records = []
    for record in fit(task, settings, folder, Rng(5)):
        records.append(record)
        if record.step == stop:
            break
    return network, records


@pytest.fixture(scope="module")
def trained(domain, tmp_path_factory):
    return train(domain, tmp_path_factory.mktemp("trained"), 150)


@pytest.fixture(scope="module")
def measured(domain, trained, tmp_path_factory):
    """Folders of the trained network and of a fresh one, with the numbers of the first."""
    folders = [tmp_path_factory.mktemp(name) for name in ("ours", "other")]
    numbers = domain.measure(trained[0], folders[0], Rng(6), Silent())
    domain.measure(domain.network(Rng(9)), folders[1], Rng(6), Silent())
    return numbers, folders


def test_it_plays_its_role(domain):
    assert isinstance(domain, Domain)
    assert domain.main_column == "BLEU beam 2"


def test_it_learns_the_toy_language(domain, trained, measured):
    _, records = trained
    numbers, _ = measured
    assert records[-1].validation < 1.0 < 3.0 < records[0].loss
    assert list(numbers) == COLUMNS
    assert all(math.isfinite(value) for value in numbers.values())
    assert numbers["nats/token test"] < 1.0
    assert numbers["BLEU beam 2"] >= numbers["BLEU greedy"] > 50  # a search that stops early is worse than none
    assert numbers["nats/token after true words"] <= numbers["nats/token after own words"]


def test_what_is_measured_is_written(domain, measured):
    numbers, (folder, _) = measured
    for name in ("greedy", "beam", "sampled", "resampled-3", "highest-3", "sources", "references"):
        assert len((folder / f"{name}.txt").read_text().splitlines()) == 16
    kept = json.loads((folder / "quality.json").read_text())["beam"]
    assert kept["BLEU"]["score"] == pytest.approx(numbers["BLEU beam 2"])
    assert "tok:13a" in kept["BLEU"]["signature"]


def test_test_nats_are_those_of_the_task(domain, trained, measured):
    """The same pairs by the one cross-entropy that training has."""
    network, _ = trained
    network.module.eval()
    total = count = 0.0
    with torch.no_grad():
        for i in range(len(domain.test)):
            batch = domain._test.batch([i])
            nats = -network.logits(batch.given, batch.tokens).log_softmax(-1).gather(-1, batch.tokens.unsqueeze(-1))
            total, count = total + nats.sum().item(), count + batch.tokens.numel()
    assert measured[0]["nats/token test"] == pytest.approx(total / count, rel=1e-5)


def test_the_better_network_is_found_better(domain, measured):
    _, (ours, other) = measured
    found = domain.compare([ours, ours], [other, other], Rng(0))
    assert found["BLEU beam 2"].low > 0
    assert found["nats/token test"].high < 0
    assert found["p bootstrap BLEU beam 2"].value < 0.05
    assert found["p randomisation BLEU beam 2"].value < 0.05
    assert found["% true words likelier after own words"].low > 50
    assert found["% true words likelier after true words"].low > 50
    back = domain.compare([other, other], [ours, ours], Rng(0))
    assert back["BLEU beam 2"].to_json() == pytest.approx(
        [-found["BLEU beam 2"].value, -found["BLEU beam 2"].high, -found["BLEU beam 2"].low], rel=0.2
    )


def test_a_network_does_not_differ_from_itself(domain, measured):
    _, (ours, _) = measured
    found = domain.compare([ours], [ours], Rng(0))
    for name in COLUMNS:
        assert found[name].to_json() == [0.0, 0.0, 0.0]
    assert found["p bootstrap BLEU beam 2"].value == 1.0
    assert found["% true words likelier after own words"].value == 0.0  # ties are not likelier


def test_measuring_again_writes_the_same_bytes(domain, trained, measured, tmp_path):
    numbers, (folder, _) = measured
    assert domain.measure(trained[0], tmp_path, Rng(6), Silent()) == numbers
    for path in folder.iterdir():
        assert file_hash(path) == file_hash(tmp_path / path.name)


def test_folders_that_do_not_belong_are_refused(domain, measured, tmp_path):
    _, (ours, other) = measured
    with pytest.raises(UserError, match="1 folders are compared with 2"):
        domain.compare([ours], [other, other], Rng(0))
    with pytest.raises(UserError, match="measure the network again"):
        domain.compare([tmp_path], [other], Rng(0))
    shutil.copytree(ours, tmp_path / "changed")
    (tmp_path / "changed" / "references.txt").write_text("Hund.\n" * 16)
    with pytest.raises(UserError, match="other test sentences"):
        domain.compare([tmp_path / "changed"], [other], Rng(0))


def test_earm_trains_it_and_a_stopped_training_ends_with_the_same_bits(domain, tmp_path):
    earm = EARM(length=12, start_epoch=0.5, weight=0.1)
    whole, records = train(domain, tmp_path / "whole", 14, earm=earm)
    assert any("gain" in record.metrics for record in records)
    train(domain, tmp_path / "cut", 14, earm=earm, stop=9, often=0.0)
    again, rest = train(domain, tmp_path / "cut", 14, earm=earm)
    assert rest[0].step in (9, 10)
    for name in ("checkpoint.safetensors", "best.safetensors"):
        assert file_hash(tmp_path / "whole" / name) == file_hash(tmp_path / "cut" / name)
    ends = [torch.cat([w.detach().flatten() for w in one.module.parameters()]) for one in (whole, again)]
    assert torch.equal(*ends)


def test_pairs_that_are_all_too_long_are_refused(domain, tmp_path):
    with pytest.raises(UserError, match=r"set translation\.longest higher"):
        open_translation(dataclasses.replace(domain.settings, longest=2), tmp_path / "short", Silent())


def test_a_network_that_cannot_translate_is_refused(domain, tmp_path):
    with pytest.raises(UserError, match="cannot translate"):
        domain.measure(_Other(), tmp_path, Rng(0), Silent())


class _Other:
    module, vocab_size = torch.nn.Linear(1, 1), 2

    def logits(self, given, tokens):
        return torch.zeros(*tokens.shape, 2)

    def draw(self, given, known, length, rng):
        return known, known > 0
