"""Certificates by length are laws that sum to at most one; estimates of Z_l are unbiased. All by enumeration."""

from itertools import product

import numpy as np
import pytest

from freenergy import UserError
from freenergy.models.length_law import LengthLaw
from freenergy.partition.lengths import LengthSums, pool_partition

# six sentences of one, two and three words; the last entry stands for draws that were cut
LENGTHS = np.array([1, 1, 2, 2, 3])
Q = np.array([0.2, 0.15, 0.25, 0.1, 0.2, 0.1])
U = np.array([0.3, -1.0, 0.7, 0.2, -0.4])
LAW = LengthLaw(np.array([0.5, 0.2, 0.3]))


def pools(n):
    """Every pool of n draws with its probability and its whole sentences."""
    for drawn in product(range(6), repeat=n):
        yield np.prod(Q[list(drawn)]), np.array([i for i in drawn if i < 5], dtype=np.int64)


@pytest.mark.parametrize("law", [None, LAW])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_certified_law_sums_to_what_it_should(law, n):
    """Σ_x q(x) E[e^gain]: 1 less the pools without a sentence, or Σ_l π_l P(some draw has length l)."""
    total = 0.0
    for p, drawn in pools(n - 1):
        sums = LengthSums.of(U[drawn], LENGTHS[drawn], n - 1, 3) if n > 1 else None
        if sums is None:  # without draws only x itself is there
            gain = np.zeros(5) if law is None else law.log_prob(LENGTHS)
        else:
            gain = sums.certified(U, LENGTHS, law)
        total += p * (Q[:5] * np.exp(gain)).sum()
    of_length = np.array([Q[:5][length == LENGTHS].sum() for length in (1, 2, 3)])
    some = 1 - (1 - of_length) ** n
    assert total == pytest.approx(1 - Q[5] ** n if law is None else LAW.probs @ some, abs=1e-12)


def test_a_mutant_that_forgets_the_datum_is_no_law():
    """Without w(x) in the sum the numbers add up to more than one: the test above would reject it."""
    total = 0.0
    for p, drawn in pools(2):
        sums = LengthSums.of(U[drawn], LENGTHS[drawn], 2, 3)
        z = np.logaddexp.reduce(sums.log_sum) - np.log(2)
        total += p * (Q[:5] * np.exp(U - z)).sum() if np.isfinite(z) else 0.0
    assert total > 1.02


def test_estimates_of_every_length_are_unbiased():
    found = np.zeros(3)
    for p, drawn in pools(3):
        found += p * np.exp(LengthSums.of(U[drawn], LENGTHS[drawn], 3, 3).per_length().values)
    by_hand = [(Q[:5] * np.exp(U))[length == LENGTHS].sum() for length in (1, 2, 3)]
    assert found == pytest.approx(by_hand, abs=1e-12)


def test_one_constant_agrees_with_the_estimator_of_contexts():
    drawn = np.array([0, 2, 2, 4, 1])
    single = LengthSums.of(U[drawn], LENGTHS[drawn], 6, 3).single()
    other = pool_partition(U[drawn], 6)
    assert single.value == pytest.approx(other.lower.item(), abs=1e-12)
    assert single.ess == pytest.approx(other.ess.item(), abs=1e-9)


def test_bad_pools_are_refused():
    with pytest.raises(UserError, match="count every draw"):
        LengthSums.of(U, LENGTHS, 4, 3)
    with pytest.raises(UserError, match="more than 2"):
        LengthSums.of(U, LENGTHS, 5, 2)
