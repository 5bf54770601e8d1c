"""Scores that are folded chunk by chunk give the numbers, the curve, the densities and the texts of all at once."""

import numpy as np
import pytest
import torch

from freenergy import Continuations, Rng, Sequences, Truncation
from freenergy.core.scored import Scored
from freenergy.evaluation.certified import WindowNumbers, residual_report
from freenergy.evaluation.examples import Chooser
from freenergy.evaluation.figure_numbers import curve_numbers, density_numbers
from freenergy.evaluation.perplexity import Counts

W, N = 11, 40
TOKENS = np.arange(1.0, W + 1)
COUNTS = Counts(TOKENS, TOKENS / 2, TOKENS * 3, np.arange(W) // 3)


def scores(is_own=True):
    energy, log_base = Rng(1).normal(W, N), -5 - Rng(2).normal(W, N).abs()
    energy[:, 3] = energy[:, 0]  # a tie, and a draw at zero
    energy[:, 5] = 0
    lengths = (1 + 9 * Rng(4).uniform(W, N)).floor().long()
    x = Continuations(Sequences.from_lists([[1]] * W), torch.zeros(W, N, 10).long(), lengths)
    if is_own:
        return Scored(x=x, log_base=log_base, log_proposal=log_base, energy=energy)
    log_q, hot = log_base + 0.3 * Rng(3).normal(W, N), Truncation(temperature=2.0)
    return Scored(x=x, log_base=log_base, log_proposal=log_q, energy=energy, law="model", truncation=hot)


def chunks(whole, size):
    return [whole[first : first + size] for first in range(0, W, size)]


@pytest.mark.parametrize("size", [1, 4, W])
@pytest.mark.parametrize("is_own", [True, False])
def test_the_report(size, is_own):
    whole = scores(is_own)
    folded = residual_report(WindowNumbers.cat([WindowNumbers.of(some) for some in chunks(whole, size)]), COUNTS)
    assert folded == residual_report(WindowNumbers.of(whole), COUNTS)
    won = (whole.energy[:, :1] < whole.energy[:, 1:]).double().mean() + 0.5 / (N - 1)
    assert folded.pair_accuracy == pytest.approx(won.item())
    above = (whole.energy[:, 1:] > 0).double().mean().item() + 0.5 / (N - 1)
    assert folded.nce_accuracy == pytest.approx(((whole.energy[:, 0] < 0).double().mean().item() + above) / 2)
    assert (folded.ceiling_percent is None) is not is_own


@pytest.mark.parametrize("size", [1, 4])
def test_the_curve(size):
    whole = scores()
    kept = torch.cat([curve_numbers(some) for some in chunks(whole, size)])
    assert torch.equal(kept, curve_numbers(whole))


@pytest.mark.parametrize("size", [1, 4])
def test_texts_and_densities(size):
    """Streams go on from chunk to chunk; a chooser that begins anew in every chunk is the mutant."""
    whole = scores()
    wanted = Chooser(3, Rng(7))(whole)
    choose, anew, parts, values = Chooser(3, Rng(7)), [], [], []
    for some in chunks(whole, size):
        parts.append(choose(some))
        anew.append(Chooser(3, Rng(7))(some))
        first = {name: columns[:, 0] for name, columns in parts[-1].items()}
        values.append(density_numbers(some, WindowNumbers.of(some).Z, first))
    for name, columns in wanted.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), columns)
        assert not torch.equal(torch.cat([part[name] for part in anew]), columns)
    assert all(len(set(row)) == 3 for row in wanted["base"].tolist())
    assert wanted["joint"].min() >= 1
    first = {name: columns[:, 0] for name, columns in wanted.items()}
    assert torch.equal(torch.cat(values), density_numbers(whole, WindowNumbers.of(whole).Z, first))


def test_nothing_that_is_kept_holds_on_to_the_candidates():
    found = WindowNumbers.of(scores())
    kept = [found.log_base, found.energy, found.draws_above, found.pairs_won, *found.log_p.values()]
    assert all(values.untyped_storage().nbytes() == 8 * W for values in kept)
    columns = Chooser(3, Rng(7))(scores())
    assert all(chosen.untyped_storage().nbytes() == 8 * W * 3 for chosen in columns.values())
