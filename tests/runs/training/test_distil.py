"""Distilling: the policy gradient against exact sums, its bias, its baseline, and proposals that survive a kill."""

import itertools
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig

from freenergy import Continuations, HuggingFaceLM, Rng, Sequences, SequenceSpace, TabularLM, UserError
from freenergy.core.files import file_hash
from freenergy.core.progress import Silent
from freenergy.corpus import Windows
from freenergy.corpus.windows import places_of
from freenergy.lm.presets import build
from freenergy.models.residual import Residual
from freenergy.testing.enumerating import branches, law
from freenergy.text.model import ResidualModel
from freenergy.training.loop import fit
from freenergy.training.settings import Optimisation
from freenergy.training.tasks.distil import (
    Distilling,
    DistilTask,
    Proposals,
    distances,
    distil_loss,
    shares,
    train_policy,
)

SPACE = SequenceSpace(vocab_size=3, length=3, eos=0)
STRINGS = SPACE.enumerate()
S = len(STRINGS)
ALL = Continuations(Sequences.from_lists([[]]), STRINGS.tokens.unsqueeze(0), STRINGS.lengths.unsqueeze(0))
LOG_BASE = TabularLM.random(Rng(1), vocab_size=3, order=1).log_prob(ALL)[0]
LOG_Q = TabularLM.random(Rng(2), vocab_size=3, order=1).log_prob(ALL)[0]  # a proposal that is not the base
ENERGY = 1.5 * Rng(3).normal(S)
LOG_SCORE = LOG_BASE - ENERGY
LOG_Z = LOG_SCORE.logsumexp(0)
LOG_P = LOG_SCORE - LOG_Z
LOG_WEIGHT = LOG_SCORE - LOG_Q


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


def tuples(n):
    """Every n draws of the proposal, and the probability of each."""
    rows = torch.tensor(list(itertools.product(range(S), repeat=n)))
    return rows, LOG_Q[rows].sum(1).exp()


def expected_loss(log_pi, n, *, baseline=False, exact=False):
    """The exact mean of the loss over all draws: one context a row, each weighed by its probability."""
    rows, chance = tuples(n)
    more = {"log_proposal": LOG_Q[rows]} if baseline else {}
    if exact:
        more["log_partition"] = LOG_Z.expand(len(rows))
    each = torch.stack(
        [
            distil_loss(
                log_pi[row].unsqueeze(0), LOG_WEIGHT[row].unsqueeze(0), **{k: v[i : i + 1] for k, v in more.items()}
            )
            for i, row in enumerate(rows)
        ]
    )
    return (chance * each).sum()


def table_gradient(loss_of):
    """The gradient in the logits of a tabular policy."""
    logits = 0.5 * Rng(4).normal(9, 3)
    logits.requires_grad_(True)
    loss_of(TabularLM(logits, eos=0).log_prob(ALL)[0]).backward()
    return logits.grad


@pytest.mark.parametrize("n", [1, 2])
def test_with_the_true_partition_it_is_the_gradient_of_kl(n):
    exact = table_gradient(lambda log_pi: kl(LOG_P, log_pi))
    found = table_gradient(lambda log_pi: expected_loss(log_pi, n, exact=True))
    torch.testing.assert_close(found, exact, atol=1e-10, rtol=0)
    assert exact.abs().max() > 0.05
    wrong = table_gradient(lambda log_pi: expected_loss(log_pi, n))
    assert (wrong - exact).abs().max() > 1e-3, "self-normalised weights should be biased at small n"


@pytest.mark.parametrize("n", [1, 2])
def test_self_normalised_it_is_the_gradient_towards_what_resampling_writes(n):
    def resample(rng):
        drawn = rng.categorical(LOG_Q.expand(n, S))
        return int(drawn[int(rng.categorical(LOG_WEIGHT[drawn]))])

    written = law(resample, lambda x: x)
    p_n = torch.tensor([written[x] for x in range(S)], dtype=torch.float64)
    rows, chance = tuples(n)
    log_pi = LOG_BASE[rows].clone().requires_grad_(True)  # a gradient in log π(x), string by string
    (distil_loss(log_pi, LOG_WEIGHT[rows]) * len(rows)).backward()
    found = torch.zeros(S, dtype=torch.float64).index_add_(
        0, rows.flatten(), (chance.unsqueeze(1) * log_pi.grad).flatten()
    )
    torch.testing.assert_close(found, -p_n, atol=1e-12, rtol=0)
    assert (p_n - LOG_P.exp()).abs().max() > 0.01


@pytest.mark.parametrize("baseline", [True, False])
def test_where_it_ends(baseline):
    """With the baseline at P itself, already with two draws; without it elsewhere."""
    rows, chance = tuples(2)
    theta = torch.zeros(S, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [theta], max_iter=2000, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        log_pi = theta.log_softmax(0)[rows]
        log_u, ratio = LOG_WEIGHT[rows].log_softmax(1), log_pi - LOG_Q[rows]
        # what the loss is, row by row: the means below are those of ``distil_loss`` (checked at the end)
        each = ratio.logsumexp(1) - (log_u.exp() * ratio).sum(1) if baseline else -(log_u.exp() * log_pi).sum(1)
        loss = (chance * each).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    log_pi = theta.detach().log_softmax(0)
    torch.testing.assert_close(closure(), expected_loss(log_pi, 2, baseline=baseline), atol=1e-12, rtol=0)
    assert kl(LOG_P, log_pi) < 1e-9 if baseline else kl(LOG_P, log_pi) > 0.05


def test_the_baseline_has_mean_zero_where_the_draws_are_the_policys_own():
    def baseline_alone(log_pi):
        return expected_loss(log_pi, 2, baseline=True) - expected_loss(log_pi, 2)

    theta = LOG_Q.clone().requires_grad_(True)  # π = q
    baseline_alone(theta.log_softmax(0)).backward()
    torch.testing.assert_close(theta.grad, torch.zeros(S, dtype=torch.float64), atol=1e-12, rtol=0)


def test_at_the_target_every_single_gradient_is_zero_with_the_baseline():
    rows = torch.arange(S).view(3, 5)
    for log_proposal, is_zero in ((LOG_Q[rows], True), (None, False)):
        log_pi = LOG_P[rows].clone().requires_grad_(True)
        distil_loss(log_pi, LOG_WEIGHT[rows], log_proposal=log_proposal).backward()
        assert bool(log_pi.grad.abs().max() < 1e-15) == is_zero


@pytest.mark.parametrize("options", [{}, {"log_proposal": LOG_Q[:6].view(2, 3)}, {"log_partition": LOG_Z.expand(2)}])
def test_gradients_are_those_of_finite_differences(options):
    log_pi, log_weight = LOG_BASE[:6].view(2, 3).clone().requires_grad_(True), LOG_WEIGHT[:6].view(2, 3)
    assert torch.autograd.gradcheck(lambda x: distil_loss(x, log_weight, **options), (log_pi,), atol=1e-8)


def test_weights_of_zero_and_far_apart():
    log_weight = torch.tensor([[-math.inf, -math.inf], [-2000.0, -math.inf], [2000.0, 2000.0]], dtype=torch.float64)
    assert shares(log_weight).tolist() == [[0, 0], [1, 0], [0.5, 0.5]]
    log_pi = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    for log_proposal in (None, torch.zeros(3, 2, dtype=torch.float64)):
        (gradient,) = torch.autograd.grad(distil_loss(log_pi, log_weight, log_proposal=log_proposal), log_pi)
        assert gradient.isfinite().all()
        assert gradient[0].abs().max() == 0, "a context without any weight must count for nothing"
    moved = distil_loss(LOG_Q.view(3, 5), LOG_WEIGHT.view(3, 5) + 1000, log_proposal=LOG_Q.view(3, 5))
    plain = distil_loss(LOG_Q.view(3, 5), LOG_WEIGHT.view(3, 5), log_proposal=LOG_Q.view(3, 5))
    torch.testing.assert_close(moved, plain)


def test_distances_are_exact_where_every_string_is_drawn_once():
    uniform = torch.full((1, S), -math.log(S), dtype=torch.float64)
    found = distances(LOG_Q.unsqueeze(0), LOG_SCORE.unsqueeze(0), uniform)
    torch.testing.assert_close(found.kl[0], kl(LOG_P, LOG_Q), atol=1e-12, rtol=0)
    torch.testing.assert_close(
        found.total_variation[0], (LOG_P.exp() - LOG_Q.exp()).abs().sum() / 2, atol=1e-12, rtol=0
    )
    same = distances(LOG_P.unsqueeze(0), LOG_SCORE.unsqueeze(0), uniform)
    assert max(same.kl[0].abs(), same.total_variation[0]) < 1e-12
    forbidden = LOG_SCORE.clone()
    forbidden[:7] = -math.inf
    log_p = forbidden - forbidden.logsumexp(0)
    exact = (log_p.exp() * torch.where(log_p > -math.inf, log_p - LOG_Q, 0.0)).sum()
    torch.testing.assert_close(distances(LOG_Q.unsqueeze(0), forbidden.unsqueeze(0), uniform).kl[0], exact)


def test_own_draws_show_log_n_minus_the_entropy_of_their_shares():
    drawn = Rng(5).categorical(LOG_Q.expand(4, 8, S))
    found = distances(LOG_Q[drawn], LOG_SCORE[drawn], LOG_Q[drawn])
    u = shares(LOG_WEIGHT[drawn])
    torch.testing.assert_close(found.kl, math.log(8) + torch.xlogy(u, u).sum(1))
    assert (found.kl <= math.log(8)).all()


V, L = 3, 2
TINY = SequenceSpace(vocab_size=V, length=L)
FEW = TINY.enumerate()


def network_lm(seed=0, dtype=torch.float64):
    config = GPTNeoXConfig(
        vocab_size=V, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, attention_dropout=0.1, hidden_dropout=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return HuggingFaceLM(build(config, Rng(seed)).to(dtype), eos=0)


def tiny_energy(x):
    """Token 0 is unlikely, and token 2 after token 1."""
    return 2.0 * (x.tokens == 0).sum(-1).double() + ((x.tokens[:, :, 0] == 1) & (x.tokens[:, :, 1] == 2)).double()


def tiny_windows(count=8):
    stream = np.arange(count * (1 + L), dtype=np.uint16) % V
    starts = np.arange(count) * (1 + L)
    places = places_of(starts, L, np.arange(count))
    return Windows(stream, places, 1, L)


def every(contexts):
    """All strings after each of these contexts."""
    B = len(contexts)
    return Continuations(contexts, FEW.tokens.expand(B, -1, -1), FEW.lengths.expand(B, -1))


def exact_kl(joint, lm):
    """KL(P ‖ model), mean over contexts."""
    x = every(Sequences.from_lists([[0], [1], [2]]))
    with torch.no_grad():
        log_p = joint.log_score(x).log_softmax(1)
        return (log_p.exp() * (log_p - lm.log_prob(x).double())).sum(1).mean().item()


def make_task(folder, dtype=torch.float64, **changes):
    steps = {"steps": 30, "batch_size": 4, "learning_rate": 0.03, "warmup": 3, "weight_decay": 0.0}
    steps |= {"validate_every": 5, "checkpoint_seconds": 0.0}
    steps |= {key: changes.pop(key) for key in list(changes) if hasattr(Optimisation(), key)}
    settings = Distilling(**{"draws": 8, "validation_draws": 64} | changes, optimisation=Optimisation(**steps))
    base = network_lm(dtype=dtype)
    joint = ResidualModel(base, tiny_energy)
    contexts = Sequences.from_lists([[0], [1], [2]] * 4)
    held_out = Residual(base, tiny_energy).weigh(base.sample(contexts, 64, TINY, Rng(8)), law="model")
    return DistilTask(joint.residual, tiny_windows(), held_out, TINY, settings, folder / "proposals", Rng(6))


def test_a_step_by_enumerating_its_draws(tmp_path):
    """The mean over all that two draws of one context can be, through the task, against the sum over pairs."""
    task = make_task(tmp_path, batch_size=1, draws=2, warmup=0)
    weights = [weight for weight in task.module.parameters() if weight.dim() > 1]

    def flat(value):
        return torch.cat([part.flatten() for part in torch.autograd.grad(value, weights)])

    found = sum(probability * flat(loss.value) for probability, loss in branches(lambda rng: task.loss(1, 0, rng)))
    x = every(task.windows.continuations(task._rows(1, 0)).contexts)
    log_pi, log_q = task.policy.log_prob(x)[0], task.model.base.log_prob(x)[0]
    pairs = torch.tensor(list(itertools.product(range(len(FEW)), repeat=2)))
    u, log_ratio = -tiny_energy(x)[0][pairs], (log_pi - log_q)[pairs]
    each = log_ratio.logsumexp(1) - (u.softmax(1) * log_ratio).sum(1)
    exact = flat((log_q[pairs].sum(1).exp() * each).sum())
    torch.testing.assert_close(found, exact, atol=1e-10, rtol=0)
    assert exact.abs().max() > 1e-3


@pytest.mark.parametrize("baseline", [True, False])
def test_the_policy_comes_near_to_the_joint_model(tmp_path, baseline):
    task = make_task(tmp_path, baseline=baseline, steps=20)
    before = exact_kl(task.model, task.model.base)
    policy, chosen = train_policy(task, tmp_path / "training", Silent())
    assert before > 0.4
    assert exact_kl(task.model, policy) < 0.3 * before
    assert chosen.step > 5
    assert chosen.kl == pytest.approx(exact_kl(task.model, policy), abs=0.1)
    assert task.proposals.first.kl == pytest.approx(before, abs=0.1)


def test_draws_come_from_the_last_policy_that_was_nearer(tmp_path):
    task = make_task(tmp_path, **SHORT)
    seen = {}
    lm = task.proposals.lm

    def watched(proposal):
        seen.setdefault(task._step, proposal.step)
        return lm(proposal)

    task.proposals.lm = watched
    records = list(fit(task, task.settings.optimisation, tmp_path / "training", task.rng))
    nearer = [record.step for record in records if record.validation_metrics.get("is_proposal")]
    assert len(nearer) >= 2
    assert seen == {s: max([0, *(step for step in nearer if step < s)]) for s in range(1, 13)}
    kept = sorted(int(path.stem) for path in (tmp_path / "proposals").glob("*.safetensors"))
    assert kept == nearer[-2:], "older proposals are not needed any more"


def test_a_policy_that_is_not_nearer_leaves_the_proposal(tmp_path):
    task = make_task(tmp_path, learning_rate=5.0, warmup=0, steps=5, clip=0.0)
    with torch.no_grad():
        before = exact_kl(task.model, task.model.base)
    policy, chosen = train_policy(task, tmp_path / "training", Silent())
    assert chosen.step == 0
    assert policy is task.model.base
    assert exact_kl(task.model, policy) == before


def bits(folder):
    return {path.name: file_hash(path) for path in (folder / "proposals").iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that nothing has interrupted; new proposals come at steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    _, chosen = train_policy(make_task(folder, **SHORT), folder, Silent())
    assert chosen.step == 12
    return bits(folder)


SHORT = {"steps": 12, "validate_every": 4, "learning_rate": 0.005, "dtype": torch.float32}


@pytest.mark.parametrize("stop", [3, 9])
def test_a_stopped_training_ends_with_the_same_bits(tmp_path, whole, stop):
    task = make_task(tmp_path, **SHORT)
    for _ in zip(range(stop), fit(task, task.settings.optimisation, tmp_path, task.rng), strict=False):
        pass
    train_policy(make_task(tmp_path, **SHORT), tmp_path, Silent())
    assert bits(tmp_path) == whole


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_kill_after_a_new_proposal_and_before_the_checkpoint(tmp_path, whole, monkeypatch, looks_ahead):
    """The proposal of step 8 is there, the checkpoint is of a step before: the steps up to 8 must not draw from it."""
    task = make_task(tmp_path, **SHORT)
    for record in fit(task, task.settings.optimisation, tmp_path, task.rng):
        if record.step == 6:
            shutil.copy(tmp_path / "checkpoint.safetensors", tmp_path / "earlier")
        if record.step == 8:
            break
    shutil.copy(tmp_path / "earlier", tmp_path / "checkpoint.safetensors")
    if looks_ahead:  # a proposal that is not told by the number of the step
        last = Proposals.last
        monkeypatch.setattr(Proposals, "last", lambda self, before=None: last(self))
    train_policy(make_task(tmp_path, **SHORT), tmp_path, Silent())
    assert (bits(tmp_path) == whole) is not looks_ahead


def test_micro_batches_are_the_same_contexts(tmp_path):
    one, two = make_task(tmp_path / "a"), make_task(tmp_path / "b", accumulate=2)
    for step in (1, 2, 3):
        parts = torch.cat([two._rows(step, 0), two._rows(step, 1)])
        assert torch.equal(parts, one._rows(step, 0))
    epoch = torch.cat([one._rows(1, 0), one._rows(2, 0)])
    assert sorted(epoch.tolist()) == list(range(8))
    assert not torch.equal(one._rows(3, 0), one._rows(1, 0))


def test_what_is_scored_is_what_writes(tmp_path):
    """The base was trained with dropout; a policy in training mode must not be drawn or scored with it."""
    task = make_task(tmp_path)
    task.module.train()
    x = every(Sequences.from_lists([[1]]))
    assert torch.equal(task.policy.log_prob(x), task.policy.log_prob(x))
    torch.testing.assert_close(task.policy.log_prob(x).detach(), task.model.base.log_prob(x))


@pytest.mark.parametrize("name", ["draws", "validation_windows", "validation_draws", "measured_draws"])
def test_bad_settings_are_one_sentence(name):
    with pytest.raises(UserError, match=f"{name} is 0: set it to"):
        Distilling(**{name: 0})


def test_what_cannot_be_distilled(tmp_path):
    task = make_task(tmp_path)
    tabular = ResidualModel(TabularLM.random(Rng(0), vocab_size=V, order=1), tiny_energy)
    rest = (task.windows, task.held_out, TINY)
    with pytest.raises(UserError, match="a TabularLM has none"):
        DistilTask(tabular.residual, *rest, task.settings, tmp_path, Rng(0))
    many = replace(task.settings, optimisation=Optimisation(batch_size=9))
    with pytest.raises(UserError, match="8 training windows but a step takes 9"):
        DistilTask(task.model, *rest, many, tmp_path, Rng(0))
