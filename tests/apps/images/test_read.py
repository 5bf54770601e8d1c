"""Reading MNIST and CIFAR-10, and making pixels black or white."""

import gzip
import struct

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from freenergy.apps.images.data import as_tokens, read_cifar, read_idx, read_images
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng


def idx(images):
    return struct.pack(">4I", 0x803, *images.shape) + images.tobytes()


def some(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("dot", [".", "-"])
@pytest.mark.parametrize("is_zipped", [True, False])
def test_mnist_by_all_its_names(tmp_path, dot, is_zipped):
    train, test = some(5, 4, 3), some(2, 4, 3, seed=1)
    for name, images in (("train", train), ("t10k", test)):
        data = gzip.compress(idx(images)) if is_zipped else idx(images)
        (tmp_path / f"{name}-images{dot}idx3-ubyte{'.gz' if is_zipped else ''}").write_bytes(data)
    found_train, found_test = read_images(tmp_path)
    np.testing.assert_array_equal(found_train, train[..., None])
    np.testing.assert_array_equal(found_test, test[..., None])


def test_cifar_has_red_green_and_blue_of_every_pixel(tmp_path):
    images = some(4, 32, 32, 3)
    for name, part in (("data_batch_1", images[:2]), ("data_batch_2", images[2:3]), ("test_batch", images[3:])):
        records = [bytes([7]) + image.transpose(2, 0, 1).tobytes() for image in part]
        (tmp_path / f"{name}.bin").write_bytes(b"".join(records))
    found_train, found_test = read_images(tmp_path)
    np.testing.assert_array_equal(found_train, images[:3])
    np.testing.assert_array_equal(found_test, images[3:])


def test_what_is_wrong_is_said_in_a_sentence(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(idx(some(5, 4, 3))[:-1])
    with pytest.raises(UserError, match="59 bytes of pixels, not the 60"):
        read_idx(path)
    path.write_bytes(b"\x00\x00\x08\x01" + bytes(40))
    with pytest.raises(UserError, match="is not an idx file"):
        read_idx(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="is not an idx file"):
        read_idx(path)
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(idx(some(50, 4, 3)))[:-20])
    with pytest.raises(UserError, match=r"torn\.gz is truncated or damaged"):
        read_idx(torn)
    torn.write_bytes(b"no gzip at all")
    with pytest.raises(UserError, match=r"torn\.gz is truncated or damaged"):
        read_idx(torn)
    batch = tmp_path / "data_batch_1.bin"
    batch.write_bytes(bytes(3074))
    with pytest.raises(UserError, match="not a multiple of 3073"):
        read_cifar(batch)


def test_a_folder_without_images_says_what_to_put_there(tmp_path):
    with pytest.raises(UserError, match=r"no folder .*absent.*t10k-images-idx3-ubyte"):
        read_images(tmp_path / "absent")
    with pytest.raises(UserError, match="neither MNIST nor CIFAR-10"):
        read_images(tmp_path)
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073))
    with pytest.raises(UserError, match=r"test_batch\.bin cannot be read"):
        read_images(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(some(5, 4, 3)))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(some(5, 4, 4)))
    with pytest.raises(UserError, match="differ in size"):
        read_images(tmp_path)


def test_levels_and_threshold_are_in_raster_order_with_the_channel_last():
    images = some(2, 3, 4, 3)
    tokens = as_tokens(images, "none", Rng(0))
    assert tokens.dtype == torch.uint8
    assert tokens[1, (2 * 4 + 1) * 3 + 2] == images[1, 2, 1, 2]
    np.testing.assert_array_equal(tokens.numpy().reshape(images.shape), images)
    edge = np.array([0, 127, 128, 255], dtype=np.uint8).reshape(1, 2, 2, 1)
    assert as_tokens(edge, "threshold", Rng(0)).tolist() == [[0, 0, 1, 1]]


def deviation(tokens, intensity):
    """Σ over intensities of the squared z of the share of ones: χ² with as many degrees of freedom."""
    n, ones = (np.bincount(intensity.ravel(), weights)[1:255] for weights in (None, tokens.ravel()))
    p = np.arange(1, 255) / 255
    return float(((ones - n * p) ** 2 / (n * p * (1 - p))).sum())


@pytest.mark.statistical
def test_a_pixel_is_one_with_the_probability_of_its_intensity():
    """χ² over 254 intensities at 1e-7; the threshold, and a probability of intensity/256, are rejected."""
    images = some(1000, 28, 28, 1)
    intensity = images.reshape(1000, -1)
    limit = chi2.isf(1e-7, 254)
    tokens = as_tokens(images, "stochastic", Rng(3)).numpy()
    assert deviation(tokens, intensity) < limit
    assert set(tokens[intensity == 0].tolist()) == {0}
    assert set(tokens[intensity == 255].tolist()) == {1}
    assert deviation(as_tokens(images, "threshold", Rng(3)).numpy(), intensity) > limit
    u = np.random.default_rng(0).random(intensity.shape)
    assert deviation(u < (intensity + 2.0) / 257, intensity) > limit


def test_an_image_has_the_same_pixels_whatever_is_read_with_it():
    images = some(4100, 3, 3, 1)
    all_of_them = as_tokens(images, "stochastic", Rng(3))
    assert as_tokens(images[:7], "stochastic", Rng(3)).equal(all_of_them[:7])
    assert as_tokens(images[:4097], "stochastic", Rng(3)).equal(all_of_them[:4097])
    assert not as_tokens(images, "stochastic", Rng(4)).equal(all_of_them)


def test_the_real_mnist(real):
    images, held_out = read_images(real("mnist"))
    assert images.shape == (60000, 28, 28, 1)
    assert held_out.shape == (10000, 28, 28, 1)
    assert images.mean() == pytest.approx(33.318, abs=1e-3)
    binary = as_tokens(held_out, "stochastic", Rng(0))
    assert binary.double().mean().item() == pytest.approx(held_out.mean() / 255, abs=1e-3)
