"""Which device is in force, and which names are refused."""

import pytest
import torch

from freenergy.core import device as devices
from freenergy.core.device import asked_device, check_device_name, computing_on, device, on_cpu, preferring
from freenergy.core.errors import UserError


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.delenv(devices.VARIABLE, raising=False)


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that says it has two GPUs; nothing is computed on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:17", "mps"])
def test_names_of_devices(name):
    assert check_device_name(name) == name


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:-1", "cuda:1000", "cuda:1 ", "CPU", "meta", "cpu:0"])
def test_other_names_are_refused_with_the_names_there_are(name):
    with pytest.raises(UserError, match="take auto, cpu, cuda, cuda:1"):
        check_device_name(name)


def test_an_explicit_choice_beats_the_recipe_beats_the_environment_beats_auto(two_gpus, monkeypatch):
    assert device() == torch.device("cuda")
    monkeypatch.setenv(devices.VARIABLE, "cuda:1")
    assert device() == torch.device("cuda:1")
    with preferring("cuda:0"):
        assert device() == torch.device("cuda:0")
        with computing_on("cpu"):
            assert device() == torch.device("cpu")
            with computing_on(None), preferring("cuda:1"):
                assert device() == torch.device("cpu")
        assert device() == torch.device("cuda:0")
    with preferring("auto"):
        assert asked_device() == "cuda:1"


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device() == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device() == torch.device("mps")


def test_a_gpu_that_is_not_here_is_refused_at_once(two_gpus, monkeypatch):
    with pytest.raises(UserError, match=r"there are 2 GPUs here: take one of cuda:0 … cuda:1"), computing_on("cuda:2"):
        pytest.fail("not refused")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="take --device cpu"), computing_on("cuda"):
        pytest.fail("not refused")
    assert asked_device() == "auto"
    monkeypatch.setenv(devices.VARIABLE, "tpu")
    with pytest.raises(UserError, match=r"\$FREENERGY_DEVICE is 'tpu'"):
        device()


def test_files_keep_tensors_that_are_contiguous_and_have_no_graph():
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    kept = on_cpu({"w": weight.t()})["w"]
    assert kept.is_contiguous()
    assert not kept.requires_grad
    assert torch.equal(kept, weight.detach().t())
