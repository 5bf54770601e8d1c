"""Images as a domain: bits per dimension, drawn images, paired comparisons."""

import math
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import ttest_1samp

from freenergy.apps.images.domain import Images, ImageSettings, ImagesRecipe, build_module, nats_of
from freenergy.apps.images.pixelcnn import ImageShape
from freenergy.core.errors import UserError
from freenergy.core.progress import Silent
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Data, Network
from freenergy.objectives.earm import EARM
from freenergy.training.loop import fit
from freenergy.training.settings import LanguageModelLoss, Optimisation
from freenergy.training.tasks.autoregressive import AutoregressiveTask


@pytest.fixture
def folder(tmp_path):
    """Forty training and seven test images of 5 × 4."""
    for name, count in (("train", 40), ("t10k", 7)):
        images = np.random.default_rng(count).integers(0, 256, (count, 5, 4), dtype=np.uint8)
        data = struct.pack(">4I", 0x803, *images.shape) + images.tobytes()
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(data)
    return tmp_path


def settings(folder, **changes):
    small = {"blocks": 1, "features": 4, "head": 4, "validation": 10, "validation_images": 8, "train_images": 6}
    return ImageSettings(path=str(folder), sheet=3, fake=4, **{**small, **changes})


def opened(folder, **changes):
    return Images(settings(folder, **changes))


@pytest.mark.parametrize("network", ["pixelcnn", "gated-pixelcnn"])
def test_bits_per_dimension_are_those_of_the_product_of_conditionals(folder, tmp_path, network):
    images = opened(folder, network=network)
    q = images.network(Rng(1))
    assert isinstance(q, Network)
    row = images.measure(q, tmp_path / "out", Rng(2), Silent())
    for split, rows in (("test", images.test), ("train", images.train[:6])):
        nats = [
            -sum(q.logits(None, x[None, : t + 1].long())[0, t].log_softmax(-1)[x[t].long()].item() for t in range(20))
            for x in rows
        ]
        assert row[f"bits/dim {split}"] == pytest.approx(np.mean(nats) / (20 * math.log(2)), rel=1e-5)
        kept = load_file(tmp_path / "out/nats.safetensors")[split]
        assert kept.dtype == torch.float64
        torch.testing.assert_close(kept, torch.tensor(nats, dtype=torch.float64), rtol=1e-5, atol=0)
    assert row["nats/image test"] == pytest.approx(row["bits/dim test"] * 20 * math.log(2))
    assert ImagesRecipe.main_column in row


def test_a_uniform_network_has_as_many_bits_as_a_pixel_holds(folder, tmp_path):
    for binarise, bits in (("stochastic", 1), ("none", 8)):
        images = opened(folder, binarise=binarise)
        q = images.network(Rng(1))
        for weight in q.module.parameters():
            weight.data.zero_()
        row = images.measure(q, tmp_path / "out", Rng(2), Silent())
        assert row["bits/dim test"] == pytest.approx(bits, rel=1e-6)


def test_drawn_images_are_kept_from_black_to_white(folder, tmp_path):
    images = opened(folder)
    q = images.network(Rng(1))
    for place in ("a", "b"):
        images.measure(q, tmp_path / place, Rng(2), Silent())
    samples = load_file(tmp_path / "a/samples.safetensors")["samples"]
    assert samples.shape == (3, 5, 4, 1)
    assert samples.dtype == torch.uint8
    assert set(samples.unique().tolist()) == {0, 255}
    assert samples.equal(load_file(tmp_path / "b/samples.safetensors")["samples"])
    drawn, _ = q.draw(None, torch.zeros(3, 0, dtype=torch.long), 20, Rng(2).child("sheet"))
    assert (samples.view(3, 20) // 255).equal(drawn.to(torch.uint8))


def test_splits_do_not_overlap_and_the_seed_of_a_row_changes_no_pixel(folder):
    images = opened(folder)
    assert (len(images.train), len(images.held_out), len(images.test)) == (30, 8, 7)
    data = images.data(batch_size=4, accumulate=2, rng=Rng(3))
    assert isinstance(data, Data)
    assert data.epoch_steps == 7
    assert data.fake == 4
    assert torch.cat([batch.tokens for batch in data.held_out()]).equal(images.held_out.long())
    again = opened(folder, validation=5, test_images=3)
    assert again.train[:30].equal(images.train)
    assert again.train[30:35].equal(images.held_out[:5])
    assert again.test.equal(images.test[:3])
    assert not opened(folder, binarise_seed=1).test.equal(images.test)


def test_the_same_seed_gives_the_same_weights(folder):
    images = opened(folder)
    state = torch.random.get_rng_state()
    weights = [list(images.network(Rng(seed)).module.parameters()) for seed in (1, 1, 2)]
    assert all(a.equal(b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not weights[0][0].equal(weights[2][0])
    assert torch.random.get_rng_state().equal(state), "the seed of others is left alone"


@pytest.mark.parametrize("network", ["pixelcnn", "gated-pixelcnn"])
def test_a_few_steps_lower_the_bits(folder, network):
    images = opened(folder, network=network, binarise="threshold")
    images.train = images.train[:4]
    q = images.network(Rng(1))
    before = nats_of(q, images.train, Silent(), "before").mean()
    optimiser = torch.optim.Adam(q.module.parameters(), lr=1e-2)
    data = images.data(batch_size=4, accumulate=1, rng=Rng(3))
    for step in range(1, 61):
        tokens = data.batch(step, 0).tokens
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(q.logits(None, tokens).flatten(0, 1), tokens.flatten()).backward()
        optimiser.step()
    assert nats_of(q, images.train, Silent(), "after").mean() < 0.8 * before


def test_comparisons_are_paired_over_images(folder, tmp_path):
    """Against scipy's one-sample t of the differences."""
    images, rng = opened(folder), np.random.default_rng(0)
    hard = rng.normal(80, 30, (2, 50))  # of image i, whatever the network
    nats = {"ours": hard.mean(0) + rng.normal(-0.3, 0.2, (3, 50)), "others": hard.mean(0) + rng.normal(0, 0.2, (3, 50))}
    folders = {}
    for name, rows in nats.items():
        folders[name] = [tmp_path / f"{name}{seed}" for seed in range(3)]
        for place, row in zip(folders[name], rows, strict=True):
            place.mkdir()
            save_file({"test": torch.tensor(row), "train": torch.tensor(row[:9])}, place / "nats.safetensors")
    found = images.compare(folders["ours"], folders["others"], Rng(0))
    d = (nats["ours"] - nats["others"]) / (20 * math.log(2))
    for name, values in {
        "bits/dim test": d.mean(0),
        "bits/dim train": d[:, :9].mean(0),
    }.items():
        low, high = ttest_1samp(values, 0).confidence_interval(0.95)
        assert found.pop(name).to_json() == pytest.approx([values.mean(), low, high])
    assert not found
    assert np.ptp(nats["ours"][0]) / (20 * math.log(2)) > 1, "unpaired, no such interval could be told"


def test_one_seed_has_an_interval_over_images(folder, tmp_path):
    images = opened(folder)
    places = [tmp_path / "a", tmp_path / "b"]
    for seed, place in enumerate(places):
        images.measure(images.network(Rng(seed)), place, Rng(2), Silent())
    found = images.compare(places[:1], places[1:], Rng(0))
    assert found["bits/dim test"].low < found["bits/dim test"].value < found["bits/dim test"].high


def test_what_cannot_be_compared_is_said(folder, tmp_path):
    images = opened(folder)
    for name, count in (("a", 3), ("b", 4)):
        (tmp_path / name).mkdir()
        save_file({"test": torch.ones(count), "train": torch.ones(2)}, tmp_path / name / "nats.safetensors")
    with pytest.raises(UserError, match="measured other images"):
        images.compare([tmp_path / "a"], [tmp_path / "b"], Rng(0))
    with pytest.raises(UserError, match="measure that network again"):
        images.compare([tmp_path / "a"], [tmp_path / "absent"], Rng(0))
    (tmp_path / "b/nats.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="measure that network again"):
        images.compare([tmp_path / "a"], [tmp_path / "b"], Rng(0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fake": 0}, "fake is 0"),
        ({"sheet": 0}, "sheet is 0"),
        ({"blocks": -1}, "blocks is -1"),
        ({"kernel": 5}, "PixelCNN's is always 3"),
    ],
)
def test_settings_are_checked(changes, words):
    with pytest.raises(UserError, match=words):
        ImageSettings(**changes)


def test_too_much_validation_is_refused(folder):
    with pytest.raises(UserError, match="holds out all of the 40 training images"):
        opened(folder, validation=40)


def test_presets_have_the_published_sizes(folder):
    """15 blocks of h = 128 and 32 maps before the logits; 20 layers of 384 maps, 5 × 5."""
    whole = {"blocks": 0, "features": 0, "head": 0, "preset": "paper"}
    plain = opened(folder, **whole).network(Rng(0)).module
    assert len(plain.blocks) == 15
    assert plain.blocks[0].spatial.weight.shape == (128, 128, 2, 3)
    assert plain.head.layers[-1].weight.shape == (2, 32, 1, 1)
    small = opened(folder, **{**whole, "preset": "small"}).network(Rng(0)).module
    assert sum(weight.numel() for weight in small.parameters()) < 100_000
    with torch.device("meta"):  # 60 million weights need not be made to be counted
        gated = build_module(
            settings(folder, **whole, network="gated-pixelcnn"), ImageShape(height=32, width=32, channels=3, levels=256)
        )
    assert len(gated.layers) == 1 + 20
    assert gated.layers[1].vertical.weight.shape == (2 * 384, 384, 3, 5)
    assert gated.head.layers[-1].weight.shape == (3 * 256, 1024, 1, 1)


@pytest.mark.parametrize("network", ["pixelcnn", "gated-pixelcnn"])
def test_the_common_task_trains_images_with_e_arm(folder, tmp_path, network):
    """The task of texts and translations: cross-entropy with E-ARM; a second run gives the same bits."""
    images = opened(folder, network=network)
    weights = []
    for run in ("a", "b"):
        q, data = images.network(Rng(1)), images.data(batch_size=4, accumulate=2, rng=Rng(3))
        earm = EARM(length=4, start_epoch=0.2, decay=0.0)
        task = AutoregressiveTask(q, data, LanguageModelLoss(earm=earm))
        steps = Optimisation(steps=4, batch_size=4, accumulate=2, validate_every=2)
        (tmp_path / run).mkdir()
        records = list(fit(task, steps, tmp_path / run, Rng(5)))
        assert ["gain" in record.metrics for record in records] == [False, False, True, True], "from 0.2 of 7 steps on"
        assert all(math.isfinite(record.loss) for record in records)
        assert records[-1].validation == pytest.approx(
            nats_of(q, images.held_out, Silent(), "").mean().item() / 20, rel=1e-2
        )
        weights.append(torch.cat([weight.detach().flatten() for weight in q.module.parameters()]))
    assert weights[0].equal(weights[1])
