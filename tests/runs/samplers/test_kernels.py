"""Every kernel of tokens as a transition matrix: P K = P to 1e-12, detailed balance where promised, and mutants."""

import math
import re
from dataclasses import dataclass

import pytest
import torch

from freenergy import Draws, Rng, UserError
from freenergy.core.roles import Target
from freenergy.core.sequences import Continuations
from freenergy.models.residual import Residual
from freenergy.samplers.kernels.class_site import ClassSite
from freenergy.samplers.kernels.combined import Cycle, KernelMixture, TextMixture
from freenergy.samplers.kernels.gibbs import Gibbs
from freenergy.samplers.kernels.independence import Independence
from freenergy.samplers.kernels.locally_balanced import AllSites, DiscreteLangevin, LocallyBalanced, OneMove
from freenergy.samplers.kernels.metropolis_hastings import MetropolisHastings, MetropolisHastingsInfo, Proposed
from freenergy.samplers.kernels.proposals import MaskedSite, Site, Suffix
from freenergy.samplers.kernels.single_site import SingleSite
from freenergy.testing import World, check_kernel
from freenergy.testing.targets import transition_matrix

FIXED = {"tokens": 3, "length": 2, "eos": None}
FEW = {"tokens": 2, "length": 2, "eos": None}  # for kernels with many branches
ENDS = {"tokens": 3, "length": 2, "eos": 0}
MANY = ("cycle", "mixture", "mixture of three", "gibbs blocks", "gibbs sweep", "suffix", "discrete langevin")


class Guess:
    """A masked language model: any law that does not look at the token itself."""

    def __init__(self, vocab_size):
        self.table = Rng(8).normal(vocab_size, vocab_size)

    def fill_log_probs(self, x, site):
        around = x.tokens[0].masked_fill(~x.mask[0], 0).sum(1) - x.tokens[0].gather(1, site.unsqueeze(1)).squeeze(1)
        return self.table[around % len(self.table)].log_softmax(1)


def site(by, temperature=1.0):
    return MetropolisHastings(proposal=Site(by=by, temperature=temperature))


KERNELS = {
    "uniform": (site("uniform"), True),
    "causal": (site("causal", 1.4), True),
    "cloze": (site("cloze"), True),
    "masked": (MetropolisHastings(proposal=MaskedSite(filler=Guess(3))), True),
    "suffix": (MetropolisHastings(proposal=Suffix()), True),
    "classes": (ClassSite(classes=torch.tensor([0, 1, 1])), True),
    "gibbs": (Gibbs(), True),
    "gibbs metropolised": (Gibbs(metropolised=True), True),
    "gibbs blocks": (Gibbs(block=2), True),
    "gibbs sweep": (Gibbs(scan="systematic"), False),
    "locally balanced": (LocallyBalanced(), True),
    "discrete langevin": (DiscreteLangevin(step_size=0.7), True),
    "mixture": (TextMixture(whole=0.4), True),
    "mixture of three": (
        KernelMixture(kernels=(Gibbs(), Independence(), site("uniform")), weights=(1.0, 2.0, 1.0)),
        True,
    ),
    "cycle": (Cycle(kernels=(Gibbs(), site("uniform"))), False),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_target_is_invariant(name):
    kernel, is_reversible = KERNELS[name]
    check_kernel(kernel, World(**(FEW if name in MANY else FIXED)).target(), is_reversible=is_reversible)


@pytest.mark.parametrize("name", ["uniform", "masked", "suffix", "classes", "gibbs metropolised", "locally balanced"])
def test_the_target_is_invariant_where_texts_end_early(name):
    check_kernel(KERNELS[name][0], World(**ENDS).target())


def test_a_sweep_is_the_product_of_its_sites_and_not_reversible():
    world = World(**FIXED)
    P, target = world.law(), world.target()
    K = transition_matrix(Gibbs(scan="systematic"), target)
    flow = P.unsqueeze(1) * K
    assert (flow - flow.T).abs().max() > 1e-3
    first, second = conditional(world, 0), conditional(world, 1)
    torch.testing.assert_close(K, first @ second, rtol=0, atol=1e-12)
    torch.testing.assert_close(transition_matrix(Gibbs(), target), (first + second) / 2, rtol=0, atol=1e-12)


def conditional(world, place):
    """The matrix of one exact draw of x_place given the rest, from P alone."""
    P, n = world.law(), len(world.names)
    B = torch.zeros(n, n, dtype=torch.float64)
    for i, x in enumerate(world.names):
        alike = [j for j, y in enumerate(world.names) if all(y[t] == x[t] for t in range(len(x)) if t != place)]
        B[i, alike] = P[alike] / P[alike].sum()
    return B


def test_metropolised_gibbs_leaves_more_often():
    """Peskun's order: every probability to stay is smaller."""
    world = World(**FIXED)
    plain, other = (transition_matrix(Gibbs(metropolised=own), world.target()) for own in (False, True))
    assert (other.diagonal() < plain.diagonal()).all()


def test_eigenvalues_of_the_independence_sampler():
    """p = (.5, .3, .15, .05), q = (.1, .2, .3, .4): 1, 0.8, 0.566667, 0.3; the second is 1 − 1/w_max."""
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    world = World(tokens=4, length=1, eos=None)
    target = Target(Residual(Fixed(world.base, q), lambda x: (q.log() - p.log())[x.tokens[:, :, 0]]), world.context,
                    world.space)  # fmt: skip
    values = torch.linalg.eigvals(transition_matrix(Independence(), target)).real.sort(descending=True).values
    torch.testing.assert_close(values, torch.tensor([1, 0.8, 0.566667, 0.3]).double(), rtol=0, atol=1e-6)


class Fixed:
    """A base of one token with given probabilities."""

    def __init__(self, lm, q):
        self.q, self.vocab_size, self.eos, self.max_length, self.draws_here = q, len(q), lm.eos, None, True

    def log_prob(self, x):
        return self.q.log()[x.tokens[:, :, 0]]

    def next_log_probs(self, contexts):
        return self.q.log().expand(len(contexts), -1)

    def sample(self, contexts, num, space, rng, truncation=None):
        tokens = rng.rows(len(contexts), num, 1).categorical(self.q.log().expand(len(contexts), num, -1))
        x = Continuations(contexts, tokens.unsqueeze(-1), torch.ones_like(tokens))
        return Draws(x, self.log_prob(x), self.log_prob(x))


class Wrong:
    """A proposal with one term of its ratio changed."""

    def __init__(self, proposal, how):
        self.proposal, self.how = proposal, how

    def propose(self, target, x, rng):
        found = self.proposal.propose(target, x, rng)
        return Proposed(found.x, self.how(found.log_ratio), found.base_tokens)


@pytest.mark.parametrize(
    "how", [torch.zeros_like, torch.neg, lambda r: 2 * r], ids=["forgotten", "inverted", "doubled"]
)
@pytest.mark.parametrize(
    "proposal",
    [Site(by="causal"), Site(by="cloze"), Suffix(), OneMove(gradient=False), AllSites(step_size=0.7, gradient=False)],
    ids=["causal", "cloze", "suffix", "one move", "all sites"],
)
def test_mutants_of_the_ratio_are_refused(proposal, how):
    with pytest.raises(AssertionError, match="the target is invariant"):
        check_kernel(MetropolisHastings(proposal=Wrong(proposal, how)), World(**FEW).target(), tolerance=1e-3)


@dataclass
class Unadjusted:
    """Takes every proposal: unadjusted discrete Langevin."""

    kernel: MetropolisHastings

    def init(self, target, x):
        return self.kernel.init(target, x)

    def step(self, target, state, rng):
        found = self.kernel.proposal.propose(target, state.x, rng.child("draw"))
        taken = torch.ones(state.x.shape[1], dtype=torch.bool)
        return self.kernel.init(target, found.x), MetropolisHastingsInfo(taken, taken.double(), 0)


def test_unadjusted_discrete_langevin_has_another_law():
    """Its stationary law is found by iterating its matrix: more than 0.02 away in total variation."""
    world = World(**FIXED)
    K = transition_matrix(Unadjusted(DiscreteLangevin(step_size=0.7).kernel), world.target())
    law = torch.linalg.matrix_power(K, 200)[0]
    assert (law - world.law()).abs().sum() / 2 > 0.02


class Pairs:
    """A model with a slope: quadratic in one-hot tokens, so that the slope is known in closed form."""

    def __init__(self, V=3, L=2):
        self.h, self.J = Rng(1).normal(L, V), Rng(2).normal(V, V)

    def log_score(self, x):
        one = torch.nn.functional.one_hot(x.tokens, 3).double() if isinstance(x, Continuations) else x.values.double()
        return (one * self.h).sum((-1, -2)) + torch.einsum("bnv,vw,bnw->bn", one[:, :, 0], self.J, one[:, :, 1])


class WithSlope(Pairs):
    def slope(self, x):
        one = torch.nn.functional.one_hot(x.tokens[0], 3).double()
        pairs = torch.stack([one[:, 1] @ self.J.T, one[:, 0] @ self.J], dim=1)
        return self.h + pairs


@pytest.mark.parametrize("model", [Pairs(), WithSlope()], ids=["Soft", "slope"])
def test_gradients_of_a_quadratic_score_are_exact_differences(model):
    """Then Gibbs with gradients is the locally balanced kernel, entry by entry."""
    world = World(**FIXED)
    target = Target(model, world.context, world.space, world.base)
    exact, guessed = (transition_matrix(LocallyBalanced(gradient=own), target) for own in (False, True))
    torch.testing.assert_close(exact, guessed, rtol=0, atol=1e-6 if type(model) is Pairs else 1e-12)
    check_kernel(DiscreteLangevin(gradient=True), target)


def test_a_gradient_of_an_energy_that_reads_soft_tokens():
    world = World(**FIXED)
    weights = Rng(5).normal(2, 3)

    def energy(x):
        one = torch.nn.functional.one_hot(x.tokens, 3).double() if isinstance(x, Continuations) else x.values.double()
        return (one * weights).sum((-1, -2)).square() / 2

    check_kernel(LocallyBalanced(gradient=True), world.target(energy))


def test_class_moves_read_only_two_classes():
    """|c| + |c'| energies per step and chain, where Gibbs reads V."""
    world = World(tokens=6, length=1, eos=None)
    kernel, target = ClassSite(classes=torch.tensor([0, 0, 0, 1, 1, 1])), world.target()
    state = kernel.init(target, world.x.candidates(torch.tensor([0])))
    before = world.reads
    for t in range(20):
        state, _ = kernel.step(target, state, Rng(0).child(t))
    assert world.reads - before == 20 * (3 + 3)


def test_zero_mass_is_left_and_never_entered():
    world = World(**FEW)
    world.energies[1] = math.inf
    for name in ("gibbs", "gibbs metropolised", "cloze", "discrete langevin", "locally balanced"):
        check_kernel(KERNELS[name][0], world.target())


def test_bad_settings_are_refused():
    world = World(**FIXED)
    for make, sentence in (
        (lambda: Gibbs(block=0), "block is 0: set it to 1 or more"),
        (lambda: Gibbs(block=2, metropolised=True), "metropolised draws are of single sites"),
        (lambda: Gibbs(block=12).init(world.target(), world.x), "lower block"),
        (lambda: DiscreteLangevin(step_size=0.0), "step_size is 0.0: set it above 0"),
        (lambda: SingleSite(temperature=0.0), "temperature is 0.0: set it above 0"),
        (lambda: KernelMixture(kernels=()), "of no kernels"),
        (lambda: KernelMixture(kernels=(Gibbs(),), weights=(1.0, 2.0)), "give one each"),
        (lambda: TextMixture(whole=1.0), "whole is 1.0: set it above 0 and below 1"),
        (lambda: ClassSite(classes=torch.tensor([0])).init(world.target(), world.x), "1 tokens have a class"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            make()
    kernel = LocallyBalanced(gradient=True)
    state = kernel.init(world.target(), world.x)
    with pytest.raises(UserError, match="has no gradient with respect to tokens"):
        kernel.step(world.target(), state, Rng(0))
