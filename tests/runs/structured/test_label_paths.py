"""CTC, CTC-CRF and LF-MMI against the list of all paths; the printed tables; what must never be NaN."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import ctc_loss

from freenergy import Rng, UserError
from freenergy.lm.ngram import NgramLM
from freenergy.structured import LabelAutomaton, LabelGraph, LabelPaths, ctc_log_score, padded_labels
from freenergy.structured.ctc import label_lists
from freenergy.structured.graph_kernels import graph_kernels
from freenergy.testing import collapsed, enumerate_ctc, enumerate_hmm, law

INF = float("inf")
P3 = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.4, 0.1, 0.5]], dtype=torch.float64)


def numbers(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ngram(V, order, seed=0):
    stream = np.random.default_rng(seed).integers(0, V + 1, 40)
    return LabelAutomaton.from_ngram(NgramLM.fit(np.append(stream, 0), vocab_size=V + 1, eos=0, order=order))


def printed_lm():
    """Start {1: .6, 2: .4}, 1 → {1: .1, 2: .5, end: .4}, 2 → {1: .3, 2: .2, end: .5}; the empty string is forbidden."""
    with np.errstate(divide="ignore"):
        weight = np.log([[0.6, 0.4], [0.1, 0.5], [0.3, 0.2]])
        return LabelAutomaton(np.tile([1, 2], (3, 1)), weight, np.log([0.0, 0.4, 0.5]))


CASES = [
    (topology, V, T, order)
    for topology in ("ctc", "hmm1", "hmm2")
    for V, T, order in ((2, 4, 2), (2, 6, 3), (3, 5, 2), (3, 6, 3), (3, 3, 1))
    if topology == "ctc" or T < 6
]


def graph_of(topology, automaton):
    return LabelGraph.ctc(automaton) if topology == "ctc" else LabelGraph.hmm(automaton, int(topology[3:]))


def enumerated(topology, x, automaton):
    if topology == "ctc":
        return enumerate_ctc(x, automaton.log_score)
    return enumerate_hmm(x, int(topology[3:]), automaton.log_score)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("topology", "V", "T", "order"), CASES)
def test_sums_and_gradients_of_all_paths(topology, V, T, order, compiled):
    automaton = ngram(V, order)
    graph = graph_of(topology, automaton)
    x = numbers(2, T, graph.num_symbols, seed=T, scale=2).requires_grad_()
    lengths = torch.tensor([T, T - 1])
    log_z = LabelPaths(x, graph, lengths=lengths, compiled=compiled).log_partition()
    (grad,) = torch.autograd.grad(log_z.sum(), x)
    for b, length in enumerate(lengths.tolist()):
        paths = enumerated(topology, x[b, :length], automaton)
        expected = paths.log_partition()
        (by_paths,) = torch.autograd.grad(expected, x)
        assert abs((log_z[b] - expected).item()) < 1e-12
        assert (grad[b] - by_paths[b]).abs().max() < 1e-12
        own = LabelPaths(x[b : b + 1, :length], graph, compiled=compiled)
        expected_probs = paths.log_probs()
        y = padded_labels([list(each) for each in expected_probs]).unsqueeze(0)
        log_p = own.log_prob(y)[0]
        assert (log_p - torch.stack(list(expected_probs.values()))).abs().max() < 1e-11
        assert abs(log_p.exp().sum().item() - 1) < 1e-12


@pytest.mark.parametrize("compiled", [True, False])
def test_gradient_of_a_label_sequence(compiled):
    automaton = ngram(3, 3)
    x = numbers(1, 5, 4, seed=3).requires_grad_()
    own = LabelPaths(x, LabelGraph.ctc(automaton), compiled=compiled)
    paths = enumerate_ctc(x[0], automaton.log_score)
    for y, log_p in itertools.islice(paths.log_probs().items(), 0, None, 9):
        (grad,) = torch.autograd.grad(own.log_prob(padded_labels([y])).sum(), x)
        (expected,) = torch.autograd.grad(log_p, x, retain_graph=True)
        assert (grad - expected).abs().max() < 1e-12
    y = padded_labels([[1, 1]])
    assert torch.autograd.gradcheck(lambda v: LabelPaths(v, own.graph, compiled=compiled).log_prob(y), (x,))
    assert torch.autograd.gradgradcheck(lambda v: LabelPaths(v, own.graph, compiled=compiled).log_prob(y), (x,))


def test_printed_tables():
    ctc = LabelPaths(P3.log()[None], LabelGraph.ctc(LabelAutomaton.free(2)))
    table = {(): 0.04, (1,): 0.234, (1, 1): 0.006, (1, 2): 0.311, (1, 2, 1): 0.009, (2,): 0.255, (2, 1): 0.075}
    table |= {(2, 1, 2): 0.05, (2, 2): 0.02}
    for y, p in table.items():
        assert ctc.log_prob(padded_labels([list(y)])).exp().item() == pytest.approx(p, abs=1e-12)
    crf = LabelPaths(P3.log()[None], LabelGraph.ctc(printed_lm()))
    assert crf.log_partition().item() == pytest.approx(-1.831470, abs=1e-6)
    table = {(1,): 0.350610, (1, 1): 0.000899, (1, 2): 0.291238, (1, 2, 1): 0.002023, (2,): 0.318396}
    table |= {(2, 1): 0.022475, (2, 1, 2): 0.009365, (2, 2): 0.004994}
    for y, p in table.items():
        assert crf.log_prob(padded_labels([list(y)])).exp().item() == pytest.approx(p, abs=1e-6)
    assert crf.log_prob(padded_labels([[]])).item() == -INF


def test_labels_of_weight_one_give_ctc_and_a_proper_uniform_law_does_not():
    x = numbers(4, 12, 5, seed=1).log_softmax(-1)
    y = padded_labels([[1, 2, 2], [3], [4, 4, 4, 1], []])
    lengths = torch.tensor([12, 9, 12, 7])
    flat = torch.tensor([v for row in label_lists(y) for v in row])
    theirs = -ctc_loss(x.transpose(0, 1), flat, lengths, (y >= 0).sum(1), reduction="none")
    free = LabelPaths(x, LabelGraph.ctc(LabelAutomaton.free(4)), lengths=lengths)
    assert free.log_partition().abs().max() < 1e-12
    assert (free.log_prob(y) - theirs).abs().max() < 1e-12
    uniform = LabelAutomaton(np.zeros((1, 4), dtype=int), np.full((1, 4), -math.log(5)), np.full(1, -math.log(5)))
    difference = LabelPaths(x, LabelGraph.ctc(uniform), lengths=lengths).log_prob(y) - theirs
    assert difference.max() - difference.min() > 0.5


def test_the_gradient_of_unnormalised_potentials_is_true_where_that_of_torch_is_not():
    y = torch.tensor([[1, 2, 1]])
    x = numbers(1, 6, 3, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: ctc_log_score(v, y), (x,))
    (ours,) = torch.autograd.grad(ctc_log_score(x, y).sum(), x)
    theirs = -ctc_loss(x.transpose(0, 1), y, torch.tensor([6]), torch.tensor([3]), reduction="sum")
    (by_torch,) = torch.autograd.grad(theirs, x)
    assert (ours - by_torch).abs().max() > 0.1
    assert (ours - (by_torch + x.detach().exp())).abs().max() < 1e-12  # off by exp(x)


@pytest.mark.parametrize("compiled", [True, False])
def test_impossible_label_sequences(compiled):
    """T too short, repeats without room, forbidden by the automaton: −inf, gradient 0, and a sentence from the loss."""
    x = numbers(4, 3, 3, seed=5).requires_grad_()
    own = LabelPaths(x, LabelGraph.ctc(printed_lm()), lengths=torch.tensor([2, 3, 3, 3]), compiled=compiled)
    y = padded_labels([[1, 2, 1], [1, 1, 2], [], [1, 2]])
    log_p = own.log_prob(y)
    assert log_p[:3].tolist() == [-INF] * 3
    assert log_p[3] > -INF
    (grad,) = torch.autograd.grad(log_p[log_p > -INF].sum() + log_p[:3].clamp(min=-1e4).sum() * 0, x, retain_graph=True)
    assert not grad.isnan().any()
    (all_rows,) = torch.autograd.grad(log_p.sum(), x)
    assert not all_rows.isnan().any()
    assert (all_rows[:3] == 0).all()
    for row, words in ((0, "needs 3 frames or more and has 2"), (1, "needs 4 frames"), (2, "forbidden")):
        assert words in own.reasons(y)[row]
    with pytest.raises(UserError, match="label sequence 0 needs 3 frames"):
        own.loss(y)
    with pytest.raises(UserError, match="label 7 of sequence 0 is not in the alphabet"):
        own.log_prob(padded_labels([[7], [1], [1], [1]]))


def test_bad_numbers_and_shapes_are_refused():
    graph = LabelGraph.ctc(printed_lm())
    for bad in (math.nan, INF):
        x = numbers(2, 3, 3)
        x[1, 2, 0] = bad
        with pytest.raises(UserError, match="sequence 1 contain NaN"):
            LabelPaths(x, graph)
        assert LabelPaths(x, graph, lengths=torch.tensor([3, 2])).log_partition().isfinite().all()
    with pytest.raises(UserError, match="give \\[sequences, frames, 3\\]"):
        LabelPaths(numbers(2, 3, 4), graph)
    with pytest.raises(UserError, match="no path of sequence 0"):
        LabelPaths(numbers(1, 1, 4), LabelGraph.hmm(printed_lm(), 2)).log_prob(padded_labels([[1]]))
    with pytest.raises(UserError, match="allows no label sequence"):
        LabelGraph.ctc(LabelAutomaton(np.zeros((1, 2), dtype=int), np.zeros((1, 2)), np.full(1, -INF)))


def test_rows_without_frames():
    own = LabelPaths(numbers(2, 3, 3), LabelGraph.ctc(LabelAutomaton.free(2)), lengths=torch.tensor([0, 3]))
    assert own.log_prob(padded_labels([[], [1]]))[0] == 0
    assert own.log_prob(padded_labels([[1], [1]]))[0] == -INF


@pytest.mark.skipif(graph_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("scale", [1, 30, 300, 3000])
def test_any_range_of_potentials(scale):
    """Where the linear sums of the kernel run out of range, log space takes over: both ways agree at any scale."""
    lexicon = LabelAutomaton.from_lexicon([[1, 2], [2, 3, 1], [3, 3]], 3)
    x = numbers(20, 14, 4, seed=scale, scale=scale).requires_grad_()
    y = padded_labels([[1, 2, 3, 3, 2, 3, 1]] * 20)
    found = []
    for compiled in (True, False):
        own = LabelPaths(x, LabelGraph.ctc(lexicon), compiled=compiled)
        log_z, log_p = own.log_partition(), own.log_score(y)
        found.append((log_z, log_p, *torch.autograd.grad(log_z.sum() - log_p.sum(), x)))
    for a, b in zip(*found, strict=True):
        assert ((a - b).abs() / (1 + b.abs())).max() < 1e-10


@pytest.mark.skipif(graph_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("B", [1, 7, 8, 9, 16, 17, 40])
def test_lanes_do_not_mix_rows(B):
    """Every number of rows and every length gives the numbers of each row alone."""
    graph = LabelGraph.ctc(ngram(3, 3))
    x, lengths = numbers(B, 9, 4, seed=B), torch.arange(B) % 9 + 1
    together = LabelPaths(x, graph, lengths=lengths)
    marginals = together.marginals()
    for b in range(B):
        alone = LabelPaths(x[b : b + 1, : lengths[b]], graph)
        assert abs((alone.log_partition()[0] - together.log_partition()[b]).item()) < 1e-12
        assert (alone.marginals()[0] - marginals[b, : lengths[b]]).abs().max() < 1e-12
        assert (marginals[b, lengths[b] :] == 0).all()


def test_float32_and_batches_of_nothing():
    graph = LabelGraph.ctc(ngram(3, 2))
    x = numbers(3, 8, 4)
    exact, rough = (LabelPaths(each, graph).log_partition() for each in (x, x.float()))
    assert rough.dtype == torch.float32
    assert (exact - rough).abs().max() < 1e-5
    assert LabelPaths(x[:0], graph).log_prob(padded_labels([])).shape == (0,)


@pytest.mark.parametrize("topology", ["ctc", "hmm1"])
def test_best_path_alignment_entropy_and_kl(topology):
    automaton = ngram(2, 3)
    graph = graph_of(topology, automaton)
    x, other = (numbers(2, 5, graph.num_symbols, seed=seed) for seed in (7, 8))
    lengths = torch.tensor([5, 4])
    own, q = (LabelPaths(each, graph, lengths=lengths) for each in (x, other))
    best = own.best_path()
    for b, length in enumerate(lengths.tolist()):
        paths, theirs = (enumerated(topology, each[b, :length], automaton) for each in (x, other))
        top = paths.log_score.max()
        assert best.log_score[b].item() == pytest.approx(top.item(), abs=1e-12)
        i = int(paths.log_score.argmax())
        assert tuple(best.symbols[b, :length].tolist()) == paths.symbols[i]
        assert tuple(best.labels()[b]) == paths.labels[i]
        log_p, log_q = (each.log_score - each.log_partition() for each in (paths, theirs))
        assert own.entropy()[b].item() == pytest.approx(-(log_p.exp() * log_p).sum().item(), abs=1e-12)
        assert own.kl(q)[b].item() == pytest.approx((log_p.exp() * (log_p - log_q)).sum().item(), abs=1e-12)
        y = paths.labels[i // 2]
        aligned = LabelPaths(x[b : b + 1, :length], graph).align(padded_labels([y]))
        some = [n for n, each in enumerate(paths.labels) if each == y]
        assert aligned.log_score.item() == pytest.approx(paths.log_score[some].max().item(), abs=1e-12)
        assert aligned.labels() == [list(y)]


@pytest.mark.parametrize("topology", ["ctc", "hmm1"])
def test_the_law_of_draws_is_exact(topology):
    automaton = ngram(2, 2)
    graph = graph_of(topology, automaton)
    x = numbers(1, 3, graph.num_symbols, seed=4)
    own = LabelPaths(x, graph)
    found = law(lambda rng: own.sample(1, rng), lambda drawn: (tuple(drawn.symbols[0, 0].tolist()), *drawn.labels()[0]))
    paths = enumerated(topology, x[0], automaton)
    probs = (paths.log_score - paths.log_partition()).exp().tolist()
    expected = {}
    for path, y, p in zip(paths.symbols, paths.labels, probs, strict=True):  # repeats of an HMM: several durations
        expected[path, *y] = expected.get((path, *y), 0.0) + p
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(p, abs=1e-12) for key, p in expected.items())


def test_draws_do_not_depend_on_the_batch_and_carry_their_scores():
    automaton = ngram(3, 3)
    graph = LabelGraph.ctc(automaton)
    x = numbers(2, 6, 4, seed=9)
    drawn = LabelPaths(x, graph, lengths=torch.tensor([6, 4])).sample(5, Rng(7))
    alone = LabelPaths(x[1:], graph, lengths=torch.tensor([4])).sample(5, Rng(7).shift(contexts=1))
    assert torch.equal(alone.symbols, drawn.symbols[1:])
    for n in range(5):
        path = drawn.symbols[0, n].tolist()
        score = x[0].gather(1, torch.tensor(path).unsqueeze(1)).sum().item() + automaton.log_score(
            collapsed(tuple(path))
        )
        assert drawn.log_score[0, n].item() == pytest.approx(score, abs=1e-12)


def test_openfst_text_has_the_weight_of_every_path(tmp_path):
    """Read back, the file gives each of the C^T symbol sequences its labels and its weight."""
    automaton = ngram(2, 3)
    LabelGraph.ctc(automaton).write_openfst(tmp_path / "den.fst.txt")
    arcs, final = {}, {}
    for line in (tmp_path / "den.fst.txt").read_text().splitlines():
        fields = line.split()
        if len(fields) == 2:
            final[fields[0]] = float(fields[1])
        else:
            source, target, symbol, label, cost = fields
            assert (source, symbol) not in arcs  # deterministic
            arcs[source, symbol] = target, int(label), float(cost)
    for path in itertools.product(range(3), repeat=4):
        state, cost, labels = "0", 0.0, []
        for symbol in path:
            state, label, weight = arcs[state, str(symbol + 1)]
            cost += weight
            labels += [label] * (label > 0)
        assert tuple(labels) == collapsed(path)
        assert -(cost + final[state]) == pytest.approx(automaton.log_score(labels), abs=1e-12)


def test_lexicon_and_ngram_automata():
    lexicon = LabelAutomaton.from_lexicon([[1, 2], [1, 2, 2]], 3, separator=3)
    assert lexicon.log_score([1, 2, 3, 1, 2, 2]) == 0
    assert {lexicon.log_score(y) for y in ([], [1], [1, 2, 3], [1, 2, 1, 2])} == {-INF}
    with pytest.raises(UserError, match="begins another word"):
        LabelAutomaton.from_lexicon([[1, 2], [1, 2, 2]], 3)
    lm = NgramLM.fit(np.array([1, 2, 0, 1, 1, 2, 0, 2, 3, 0]), vocab_size=4, eos=0, order=3)
    automaton = LabelAutomaton.from_ngram(lm)
    total = np.exp(automaton.log_weight).sum(1) + np.exp(automaton.log_end)
    assert np.abs(total - 1).max() < 1e-12
    for y in itertools.product((1, 2, 3), repeat=4):
        from freenergy import Continuations

        expected = lm.log_prob(Continuations.from_lists([[]], [[[*y, 0]]])).item()
        assert automaton.log_score(y) == pytest.approx(expected, abs=1e-12)
