"""The fast recursions: right where they answer, and done again or refused where their range ends."""

import itertools
import math

import pytest
import torch

from chain_cases import MASKS, case, check_every_method
from freenergy import Rng, UserError
from freenergy.core import compiled as compiler
from freenergy.structured import Allowed, LinearChain, kernels, log_space, partition, plain
from freenergy.testing import enumerate_chain

WAYS = {"compiled": True, "plain": False}
SIZES = [(1, 1, 1), (3, 5, 2), (9, 7, 10), (11, 6, 16), (8, 9, 20), (6, 5, 50), (5, 4, 70), (2, 3, 131)]


@pytest.fixture(autouse=True, scope="module")
def compiled():
    if kernels.kernels() is None:
        pytest.skip("there is no C++ compiler")


def batch(B, T, K, *, seed=0, scale=1.0, dtype=torch.float64):
    rng = Rng(seed)
    made = [rng.child(i).normal(*shape) * scale for i, shape in enumerate(((B, T, K), (K, K), (K,), (K,)))]
    lengths = torch.from_numpy(rng.child("lengths")._generator.integers(1, T + 1, B))
    return [t.to(dtype).requires_grad_() for t in made], lengths


def all_numbers(given, lengths, *, compiled, allowed=None):
    """log Z and all its gradients, in one vector."""
    x, A, start, end = given
    chain = LinearChain(x, A, start=start, end=end, lengths=lengths, allowed=allowed, compiled=compiled)
    log_z = chain.log_partition()
    weights = torch.arange(1, len(log_z) + 1, dtype=log_z.dtype)  # a gradient of its own for every row
    return torch.cat([log_z, *(g.flatten() for g in torch.autograd.grad((weights * log_z).sum(), given))])


def reference(given, lengths, allowed=None):
    x, A, start, end = given
    chain = LinearChain(x, A, start=start, end=end, lengths=lengths, allowed=allowed)
    log_z = log_space.log_partition(chain._potentials)
    weights = torch.arange(1, len(log_z) + 1, dtype=log_z.dtype)
    return torch.cat(
        [log_z, *(g.flatten() for g in torch.autograd.grad((weights * log_z).sum(), given, materialize_grads=True))]
    )


@pytest.mark.parametrize("allowed", ["free", "pairs", "all"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_method_by_enumeration(mask, allowed):
    """As in tests/laws, compiled."""
    check_every_method(*case(mask, "shared", allowed), mask == "full")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("B", "T", "K"), SIZES)
def test_sums_and_gradients_equal_those_in_log_space(way, B, T, K):
    """More labels than a vector, or four of them, have; groups that are not full; lengths of their own."""
    given, lengths = batch(B, T, K)
    wanted = reference(given, lengths)
    torch.testing.assert_close(all_numbers(given, lengths, compiled=WAYS[way]), wanted, atol=1e-11, rtol=0)
    single, _ = batch(B, T, K, dtype=torch.float32)
    found = all_numbers(single, lengths, compiled=WAYS[way]).double()
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-5)


def listed(x, A, rules):
    """The scores of all K^T taggings of each row [B, K^T], added up in float64."""
    T, K = x.shape[1:]
    y = torch.tensor(list(itertools.product(range(K), repeat=T)))
    x = torch.where(rules.labels, x.double(), -math.inf)
    x[:, 0] = torch.where(rules.start, x[:, 0], -math.inf)
    A = torch.where(rules.pairs, A.double(), -math.inf)
    return x[:, torch.arange(T), y].sum(-1) + A[y[:, :-1], y[:, 1:]].sum(-1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_a_thousand_constrained_chains_are_exact_or_refused(way, dtype):
    """Half of all pairs forbidden, numbers up to ±1e4, often no path at all: every log Z against all 243 taggings."""
    closed, size = 0, 1e-12 if dtype == torch.float64 else 1e-6
    for seed in range(40):
        rng = Rng(seed)
        scale = 10.0 ** (4 * rng.child("scale").uniform(25, 1, 1))
        x = ((2 * rng.child("x").uniform(25, 5, 3) - 1) * scale).to(dtype)
        A = (rng.child("A").normal(3, 3) * 10.0 ** (seed % 5)).clamp(-1e4, 1e4).to(dtype)
        pairs, start = rng.child("pairs").uniform(3, 3) < 0.5, rng.child("start").uniform(3) < 0.6
        rules = Allowed(pairs=pairs, start=start, labels=rng.child("labels").uniform(25, 5, 3) < 0.9)
        chain, scores = LinearChain(x, A, allowed=rules, compiled=WAYS[way]), listed(x, A, rules)
        best, top, log_z = chain.argmax(), scores.max(1).values, chain.log_partition()
        torch.testing.assert_close(log_z.double(), scores.logsumexp(1), rtol=size, atol=4 * size)
        torch.testing.assert_close(best.log_score.double(), top, rtol=size, atol=4 * size)
        closed += int((top == -math.inf).sum())
        some = (top > -math.inf).nonzero().flatten()
        if len(some):
            rows = LinearChain(
                x[some], A, allowed=Allowed(pairs=pairs, start=start, labels=rules.labels[some]), compiled=WAYS[way]
            )
            log_p = (top - scores.logsumexp(1))[some].to(dtype)
            torch.testing.assert_close(rows.log_prob(best.labels[some]), log_p, rtol=size, atol=1e5 * size)
            probs = (scores[some] - scores[some].logsumexp(1, keepdim=True)).exp()
            y = torch.tensor(list(itertools.product(range(3), repeat=5)))
            wanted = torch.einsum("by,ytk->btk", probs, torch.nn.functional.one_hot(y, 3).double())
            torch.testing.assert_close(rows.marginals().double(), wanted, rtol=0, atol=1e4 * size)
    assert 100 < closed < 800


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_rows_that_are_done_again(way):
    """Soft masks of −1e4 leave the range of float32 and of float64; the gradients are those in log space."""
    given, lengths = batch(6, 5, 4, dtype=torch.float32)
    x, A, start, end = given
    x.data[::2, 1] *= 300
    A.data[0, 1] = A.data[2, 2] = start.data[3] = -1e4
    doubles = [t.detach().double().requires_grad_() for t in given]
    wanted = reference(doubles, lengths)
    found = all_numbers(given, lengths, compiled=WAYS[way])
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)
    chain = LinearChain(x, A, start=start, end=end, lengths=lengths, compiled=WAYS[way])
    sums = partition.recursion(chain._potentials, A).forward(*(t.detach() for t in given), lengths)
    assert (sums.status == plain.OUT_OF_RANGE).any()


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_ten_thousand_need_no_second_run_without_constraints(way):
    given, lengths = batch(6, 5, 4, scale=1e4, dtype=torch.float32)
    given[1].data /= 1e4
    x, A = given[:2]
    way = partition.recursion(LinearChain(x, A, compiled=WAYS[way])._potentials, A)
    sums = way.forward(*(t.detach() for t in given), lengths)
    assert (sums.status == plain.FINE).all()
    wanted = reference([t.detach().double().requires_grad_() for t in given], lengths)
    torch.testing.assert_close(sums.log_z, wanted[:6], rtol=1e-6, atol=0)


@pytest.mark.parametrize("way", WAYS)
def test_what_lies_beyond_a_row_is_not_read(way):
    given, lengths = batch(7, 6, 5)
    clean = all_numbers(given, lengths, compiled=WAYS[way])
    beyond = torch.arange(6) >= lengths.unsqueeze(1)
    for poison in (math.nan, math.inf, -math.inf):
        given[0].data[beyond] = poison
        torch.testing.assert_close(all_numbers(given, lengths, compiled=WAYS[way]), clean, atol=0, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_new_memory_need_not_be_clean(way, monkeypatch):
    """Every ``empty`` is full of NaN: nothing of it may come out."""
    given, lengths = batch(7, 6, 5)
    clean = all_numbers(given, lengths, compiled=WAYS[way])
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(made):
        return made.fill_(math.nan) if made.is_floating_point() else made.fill_(77)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(new_empty(*a, **k)))
    torch.testing.assert_close(all_numbers(given, lengths, compiled=WAYS[way]), clean, atol=0, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_of_any_order(way):
    (x, A, start, end), lengths = batch(2, 3, 2)
    rules = Allowed(pairs=torch.tensor([[True, True], [False, True]]))

    def log_z(x, A, start, end):
        chain = LinearChain(x, A, start=start, end=end, lengths=lengths, allowed=rules, compiled=WAYS[way])
        return chain.log_partition()

    assert torch.autograd.gradcheck(log_z, (x, A, start, end))
    assert torch.autograd.gradgradcheck(log_z, (x, A, start, end))
    loss = log_z(x, A, start, end).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], first, atol=0, rtol=0)  # a second backward pass


def test_best_paths_equal_those_of_all_taggings():
    for seed, (K, T) in enumerate(itertools.product((2, 3, 4), (1, 3, 5))):
        (x, A, start, end), lengths = batch(5, T, K, seed=seed, dtype=torch.float32)
        best = LinearChain(x, A, start=start, end=end, lengths=lengths).argmax()
        for b in range(5):
            mask = [t < int(lengths[b]) for t in range(T)]
            doubles = [t.detach().double() for t in (x[b], A, start, end)]
            one = enumerate_chain(doubles[0], doubles[1], start=doubles[2], end=doubles[3], mask=mask).best(1)
            assert best.labels[b].tolist() == one.labels[0].tolist()
            assert float(best.log_score[b]) == pytest.approx(float(one.log_score[0]), abs=1e-5)


def test_half_precision_is_summed_in_float32():
    """Peers add up in bfloat16 and are 80 nats off; the only error left is that of the input's rounding."""
    (x, A, start, end), _ = batch(4, 128, 9, scale=10.0)
    rounded = [t.detach().bfloat16() for t in (x, A, start, end)]
    found = LinearChain(rounded[0], rounded[1], start=rounded[2], end=rounded[3])
    exact = LinearChain(*(t.double() for t in rounded[:2]), start=rounded[2].double(), end=rounded[3].double())
    assert found.log_partition().dtype == torch.float32
    torch.testing.assert_close(found.log_partition().double(), exact.log_partition(), rtol=1e-6, atol=0)


def test_the_number_of_threads_changes_nothing():
    given, lengths = batch(64, 20, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = all_numbers(given, lengths, compiled=True)
        torch.set_num_threads(3)
        assert torch.equal(all_numbers(given, lengths, compiled=True), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("way", WAYS)
def test_nan_and_infinity_are_refused_wherever_they_are(way, bad):
    for place, name in enumerate(("emissions", "transitions", "start", "end")):
        (x, A, start, end), _ = batch(3, 4, 20)
        (x, A, start, end)[place].data.view(-1)[7] = bad
        chain = LinearChain(x, A, start=start, end=end, compiled=WAYS[way])
        for method in (chain.log_partition, chain.argmax, chain.marginals):
            with pytest.raises(UserError, match=f"{name} contain NaN or"):
                method()


def test_without_a_compiler_plain_torch_does_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert kernels.kernels.__wrapped__() is None
    (x, A, _, _), _ = batch(2, 3, 4)
    chain, fast = LinearChain(x, A), LinearChain(x, A).log_partition()
    monkeypatch.setattr(kernels, "kernels", lambda: None)
    assert type(partition.recursion(chain._potentials, A)) is plain.PlainChains
    torch.testing.assert_close(chain.log_partition(), fast, atol=1e-12, rtol=0)


def test_a_kernel_with_wrong_numbers_is_not_used(monkeypatch):
    forward = kernels.CompiledChains.forward

    def wrong(self, *given):
        sums = forward(self, *given)
        return sums._replace(log_z=sums.log_z + 1e-3)

    good = kernels.kernels()
    assert kernels._agrees(good, torch.float32)
    monkeypatch.setattr(kernels.CompiledChains, "forward", wrong)
    assert not kernels._agrees(good, torch.float32)


def test_a_source_is_compiled_once(monkeypatch, tmp_path):
    calls, run = [], compiler.subprocess.run
    monkeypatch.setattr(compiler.subprocess, "run", lambda command, **k: calls.append(command[1]) or run(command, **k))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int seven() { return 7; }')
    for _ in range(2):
        assert compiler.compiled_library(tmp_path, "small", [source]).seven() == 7
    assert calls == ["--version", compiler.FLAGS[0], "--version"]
    source.write_text("this is not C++")
    assert compiler.compiled_library(tmp_path, "small", [source]) is None


def test_one_gradient_holds_no_graph_and_little_memory():
    """What is kept for the backward pass: the input and two tensors of its size, rounded up to whole vectors."""
    (x, A, _, _), _ = batch(4, 30, 48, dtype=torch.float32)
    log_z = LinearChain(x, A).log_partition()
    kept = [*log_z.grad_fn.saved_tensors, *log_z.grad_fn.sums.kept]
    assert sum(t.numel() for t in kept if t is not None) <= 3 * x.numel() + A.numel()
