"""PixelCNN and Gated PixelCNN: what each pixel sees, exact draws, gradients."""

import itertools
import math

import pytest
import torch

from freenergy.apps.images.gated_pixelcnn import GatedPixelCNN
from freenergy.apps.images.pixelcnn import ImageShape, PixelCNN, PixelNetwork
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.lm.networks.protocol import Network
from freenergy.testing import law

KINDS = ["plain", "gated", "gated5"]


def make(kind, shape, *, blocks=2, features=6, seed=0):
    """A network in float64 whose weights are large enough for every path to show."""
    torch.manual_seed(seed)
    match kind:
        case "plain":
            module = PixelCNN(shape, blocks=blocks, features=features, head=24)
        case "gated":
            module = GatedPixelCNN(shape, blocks=blocks, features=features, head=24)
        case "gated5":
            module = GatedPixelCNN(shape, blocks=blocks, features=features, head=24, kernel=5)
    for weight in module.parameters():
        weight.data *= 1.5
    return PixelNetwork(module.double())


def images(shape, rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.levels, (rows, shape.tokens), generator=generator)


GREY = ImageShape(height=5, width=4)
COLOUR = ImageShape(height=3, width=3, channels=3, levels=4)


def moved(network, s, rows=12):
    """Which logits change when token s does: [T]."""
    x = images(network.shape, rows)
    other = x.clone()
    other[:, s] = (x[:, s] + 1) % network.shape.levels
    with torch.no_grad():
        return (network.logits(None, x) != network.logits(None, other)).flatten(2).any(-1).any(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [GREY, COLOUR], ids=["grey", "colour"])
def test_no_pixel_sees_itself_or_a_later_one(kind, shape):
    network = make(kind, shape)
    assert isinstance(network, Network)
    assert network.vocab_size == shape.levels
    for s in range(shape.tokens):
        assert not moved(network, s)[: s + 1].any(), f"token {s} reaches back"


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_a_mask_too_wide_is_noticed(kind):
    """The test above can fail: the first convolution, unmasked, looks ahead."""
    network = make(kind, GREY)
    network.module.readers[-1].mask.fill_(1)
    assert any(moved(network, s)[: s + 1].any() for s in range(GREY.tokens))


@pytest.mark.parametrize("kind", ["gated", "gated5"])
@pytest.mark.parametrize("shape", [GREY, COLOUR], ids=["grey", "colour"])
def test_the_gated_network_sees_every_earlier_pixel(kind, shape):
    """Red, green and blue of one pixel in their order too."""
    network = make(kind, shape, features=6 * shape.channels)
    for s in range(shape.tokens - 1):
        assert moved(network, s)[s + 1 :].all(), f"a blind spot at token {s}"


def test_the_blind_spot_of_the_plain_network_is_the_known_one():
    """What a pixel sees = all sums of one step of the first kernel and one of each later kernel; nothing else."""
    shape, blocks = ImageShape(height=6, width=11), 3
    first = [(a, c) for a in range(-3, 1) for c in range(-3, 4) if a < 0 or c < 0]
    later = [(a, c) for a in (-1, 0) for c in (-1, 0, 1) if a < 0 or c <= 0]
    sees = set(first)
    for _ in range(blocks):
        sees = {(a + d, c + e) for (a, c), (d, e) in itertools.product(sees, later)}
    plain, gated = make("plain", shape, blocks=blocks), make("gated", shape, blocks=blocks)
    t = 4 * shape.width + 4
    blind = set()
    for s in range(t):
        offset = (s // shape.width - 4, s % shape.width - 4)
        assert moved(plain, s)[t] == (offset in sees), offset
        if offset[0] >= -3 and offset not in sees and moved(gated, s)[t]:
            blind.add(offset)
    assert (-1, 4) in blind
    assert all(c > 3 for _, c in blind), "the blind spot lies to the upper right"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [GREY, COLOUR], ids=["grey", "colour"])
def test_a_shorter_row_has_the_same_logits(kind, shape):
    network, x = make(kind, shape), images(shape, 3)
    whole = network.logits(None, x)
    assert whole.shape == (3, shape.tokens, shape.levels)
    for T in range(1, shape.tokens + 1):
        torch.testing.assert_close(network.logits(None, x[:, :T]), whole[:, :T], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape",
    [ImageShape(height=2, width=2), ImageShape(height=2, width=1, channels=2, levels=2)],
    ids=["grey", "channels"],
)
@pytest.mark.parametrize("known", [0, 1])
def test_the_law_of_draws(kind, shape, known):
    """Pr[draw = x] = Π_t softmax(f)[x_t]: every branch of the sampler is walked."""
    network = make(kind, shape)
    start = images(shape, 1)[:, :known]
    found = law(lambda rng: network.draw(None, start, shape.tokens, rng)[0], lambda drawn: tuple(drawn[0].tolist()))
    assert len(found) == shape.levels ** (shape.tokens - known)
    everything = torch.tensor([(*start[0].tolist(), *drawn) for drawn in found])
    log_q = network.logits(None, everything).log_softmax(-1).gather(-1, everything[..., None])[..., 0]
    wanted = log_q[:, known:].sum(1).exp()
    torch.testing.assert_close(torch.tensor(list(found.values()), dtype=torch.float64), wanted, rtol=1e-10, atol=0)
    assert wanted.std() > 0.01 * wanted.mean(), "a uniform law would pass with a broken network"


class Overhearing(Rng):
    """A stream that keeps the logits it is asked to draw from."""

    def __init__(self, seed):
        super().__init__(seed)
        self.heard = []

    def categorical(self, log_probs):
        self.heard.append(log_probs.clone())
        return super().categorical(log_probs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "known"),
    [(ImageShape(height=12, width=4), known) for known in (0, 3, 29, 32)]
    + [(ImageShape(height=11, width=3, channels=3, levels=4), known) for known in (0, 64, 74)],
)
def test_drawing_pixel_by_pixel_is_the_whole_network(kind, shape, known):
    """The logits that every pixel is drawn from are those of the network on the whole image, though only the rows in
    reach are read, once."""
    network, rng, length = make(kind, shape, blocks=1), Overhearing(3), 23
    network.module.train()
    start = images(shape, 4)[:, :known]
    drawn, counts = network.draw(None, start, length, rng)
    assert drawn.shape == counts.shape == (4, min(length, shape.tokens - known))
    assert counts.all()
    assert network.module.training
    assert not drawn.is_floating_point()
    whole = network.logits(None, torch.cat([start, drawn], dim=1))
    torch.testing.assert_close(torch.stack(rng.heard, dim=1), whole[:, known:].detach(), rtol=0, atol=1e-12)
    assert len(drawn.unique()) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_reading_too_few_rows_would_be_noticed(kind):
    """The test above can fail: a crop one row shorter gives other logits."""
    network, rng = make(kind, ImageShape(height=12, width=4), blocks=1), Overhearing(3)
    start = images(network.shape, 4)[:, :32]
    network.module.reach -= 1
    drawn, _ = network.draw(None, start, 3, rng)
    whole = network.logits(None, torch.cat([start, drawn], dim=1))[:, 32:]
    assert (torch.stack(rng.heard, dim=1) - whole).abs().max() > 1e-6


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_drawing_again_gives_the_same_pixels_and_learns_nothing(kind):
    network = make(kind, GREY)
    start = images(GREY, 2)[:, :3]
    first, again = (network.draw(None, start, 9, Rng(5))[0] for _ in range(2))
    assert first.equal(again)
    assert not first.equal(network.draw(None, start, 9, Rng(6))[0])
    assert all(weight.grad is None for weight in network.module.parameters())
    full, none = network.draw(None, images(GREY, 2), 9, Rng(5))
    assert full.shape == none.shape == (2, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [GREY, COLOUR], ids=["grey", "colour"])
def test_gradients_agree_with_finite_differences(kind, shape):
    """⟨∇ loss, d⟩ = (loss(θ + εd) − loss(θ − εd)) / 2ε for a random direction d of every weight."""
    network, x = make(kind, shape, blocks=1), images(shape, 2)

    def loss():
        logits = network.logits(None, x)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())

    loss().backward()
    torch.manual_seed(2)
    for name, weight in network.module.named_parameters():
        d, epsilon, sides = torch.randn_like(weight), 1e-6, []
        for sign in (1, -1):
            weight.data += sign * epsilon * d
            sides.append(loss().item())
            weight.data -= sign * epsilon * d
        assert (weight.grad * d).sum().item() == pytest.approx((sides[0] - sides[1]) / (2 * epsilon), abs=1e-7), name


def test_what_is_masked_has_no_gradient():
    network, x = make("gated", COLOUR), images(COLOUR, 2)
    network.logits(None, x).pow(2).sum().backward()
    reader = network.module.readers[1]
    assert (reader.mask == 0).any()
    assert (reader.weight.grad[reader.mask == 0] == 0).all()
    assert (reader.weight.grad[reader.mask == 1] != 0).any()


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_it_learns(kind):
    """Stripes: the pixel above says all. From ln 2 to near nothing but the first row."""
    shape = ImageShape(height=5, width=4)
    torch.manual_seed(0)
    stripes = torch.randint(0, 2, (64, 1, 4)).expand(64, 5, 4).reshape(64, -1)
    network = make(kind, shape, blocks=1, features=8)
    optimiser = torch.optim.Adam(network.module.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        nats = torch.nn.functional.cross_entropy(network.logits(None, stripes).flatten(0, 1), stripes.flatten())
        nats.backward()
        optimiser.step()
    assert math.log(2) / 5 * 0.7 < nats.item() < math.log(2) / 5 * 1.25, "only the first of five rows is uncertain"


def test_what_cannot_be_is_refused_with_a_word():
    with pytest.raises(UserError, match="levels is 1: set it to 2"):
        ImageShape(height=2, width=2, levels=1)
    with pytest.raises(UserError, match="width is 0: set it to 1"):
        ImageShape(height=2, width=0)
    with pytest.raises(UserError, match="odd"):
        GatedPixelCNN(GREY, blocks=1, features=4, head=4, kernel=4)
    with pytest.raises(UserError, match="24 tokens are more than the 20"):
        make("plain", GREY).logits(None, torch.zeros(1, 24, dtype=torch.long))
