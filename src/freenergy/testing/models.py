"""The contracts of ``LanguageModel`` and ``Energy``: each check is one law, and its docstring is the equation."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Energy, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.sample_only import has_log_prob
from freenergy.testing.enumerating import Lists, assert_close, everything, law


def check_language_model(
    lm: LanguageModel, *, contexts: Lists, length: int = 2, tolerance: float = 1e-6, is_enumerable: bool = True
) -> None:
    """Check every law of ``LanguageModel`` on spaces of ``length`` tokens, small enough to enumerate.

    ``is_enumerable=False`` skips the exact law of the sampler, for models whose draws are made elsewhere.
    """
    check_shapes(lm, contexts)
    for space in _spaces(lm, length):
        check_sums_to_one(lm, contexts, space, tolerance)
        check_draws(lm, contexts, space, tolerance)
    check_chain_rule(lm, contexts, length, tolerance)
    check_batch_is_single(lm, contexts, length, tolerance)
    check_padding_is_inert(lm, contexts, length, tolerance)
    if is_enumerable:
        for space in _spaces(lm, length):
            check_sampler_law(lm, contexts[0], space, ANCESTRAL, tolerance)
            check_sampler_law(lm, contexts[0], space, Truncation(top_k=2, temperature=0.7), tolerance)
        check_replay(lm, contexts, length)


def check_sample_only(lm: LanguageModel, *, contexts: Lists, length: int = 3) -> None:
    """Check every law of a base that only draws: draws in the space, log_base = log_proposal = 0, the rest refused."""
    space, c = SequenceSpace(vocab_size=lm.vocab_size, length=length, eos=lm.eos), Sequences.from_lists(contexts)
    assert not has_log_prob(lm), "it does not say that it has no probabilities (is_sample_only)"
    draws = lm.sample(c, 4, space, Rng(11))
    assert draws.x.shape == (len(contexts), 4), f"asked for 4 draws of {len(contexts)} contexts, got {draws.x.shape}"
    _check_in_space(draws, space)
    for name in ("log_base", "log_proposal"):
        assert (getattr(draws, name) == 0).all(), f"{name} is not 0, the log-density relative to the base itself"
    for refused in (partial(lm.log_prob, draws.x), partial(lm.next_log_probs, c)):
        try:
            refused()
        except UserError:
            continue
        raise AssertionError("it gives a probability, and says that it has none")
    part = lm.sample(c[1:], 2, space, Rng(11).shift(contexts=1, candidates=2))
    assert torch.equal(part.x.tokens, draws.x.tokens[1:, 2:]), "a candidate's draw depends on its batch"


def check_shapes(lm: LanguageModel, contexts: Lists) -> None:
    """log_prob: [B, N], next_log_probs: [B, V]; EOS is a token; an empty continuation has probability one."""
    assert 0 <= lm.eos < lm.vocab_size, f"eos {lm.eos} is not one of {lm.vocab_size} tokens"
    B = len(contexts)
    found = tuple(lm.next_log_probs(Sequences.from_lists(contexts)).shape)
    assert found == (B, lm.vocab_size), f"next_log_probs has shape {found}, not {(B, lm.vocab_size)}"
    x = Continuations.from_lists(contexts, [[[0], []]] * B)
    log_p = lm.log_prob(x)
    assert tuple(log_p.shape) == (B, 2), f"log_prob has shape {tuple(log_p.shape)}, not {(B, 2)}"
    assert (log_p[:, 1] == 0).all(), f"an empty continuation has log-probability {log_p[:, 1].tolist()}, not 0"


def check_sums_to_one(lm: LanguageModel, contexts: Lists, space: SequenceSpace, tolerance: float) -> None:
    """Σ_{x in space} P_LM(x | c) = 1."""
    total = lm.log_prob(everything(contexts, space)).exp().sum(-1)
    assert_close(total, torch.ones_like(total), tolerance, f"probabilities over {space} sum to one")


def check_chain_rule(lm: LanguageModel, contexts: Lists, length: int, tolerance: float) -> None:
    """log P_LM(x | c) = Σ_t log P_LM(x_t | c, x_<t), each from next_log_probs; an empty context reads as EOS."""
    starts = [list(context) or [lm.eos] for context in contexts]
    x = [[(7 * b + 3 * t + 1) % lm.vocab_size for t in range(length)] for b in range(len(starts))]
    total = torch.zeros(len(starts), dtype=torch.float64)
    for t in range(length):
        read = Sequences.from_lists([start + tokens[:t] for start, tokens in zip(starts, x, strict=True)])
        token = torch.tensor([tokens[t] for tokens in x]).unsqueeze(1)
        total += lm.next_log_probs(read).cpu().gather(1, token).squeeze(1)
    whole = lm.log_prob(Continuations.from_lists(contexts, [[tokens] for tokens in x]))[:, 0].cpu()
    assert_close(whole, total, tolerance * length, "log_prob is the sum of next_log_probs")


def check_batch_is_single(lm: LanguageModel, contexts: Lists, length: int, tolerance: float) -> None:
    """log P(x_bn | c_b) does not depend on what else is in the batch."""
    x = _some(lm, contexts, length)
    together = lm.log_prob(x)
    for b in range(x.shape[0]):
        for n in range(x.shape[1]):
            alone = lm.log_prob(x[b : b + 1].candidates(slice(n, n + 1)))
            assert_close(alone[0, 0], together[b, n], tolerance, f"batch = single at context {b}, candidate {n}")


def check_padding_is_inert(lm: LanguageModel, contexts: Lists, length: int, tolerance: float) -> None:
    """Tokens after the end of a string change nothing."""
    x = _some(lm, contexts, length)
    padded = _padded(x, lm.vocab_size - 1)
    assert_close(lm.log_prob(padded), lm.log_prob(x), tolerance, "padding is inert in log_prob")
    wide, narrow = (lm.next_log_probs(each.contexts) for each in (padded, x))
    assert_close(wide, narrow, tolerance, "padding is inert in next_log_probs")


def check_draws(lm: LanguageModel, contexts: Lists, space: SequenceSpace, tolerance: float) -> None:
    """Draws lie in the space; log_base = log P_LM(x | c); log_proposal = Σ_t log q_t(x_t), q the truncated P_LM."""
    for truncation in (ANCESTRAL, Truncation(top_k=2)):
        draws = lm.sample(Sequences.from_lists(contexts), 3, space, Rng(11), truncation)
        assert draws.x.shape == (len(contexts), 3), (
            f"asked for 3 draws of {len(contexts)} contexts, got {draws.x.shape}"
        )
        _check_in_space(draws, space)
        assert_close(draws.log_base, lm.log_prob(draws.x), tolerance * space.length, "log_base of draws is log_prob")
        q = _log_proposal(lm, draws, truncation)
        assert_close(draws.log_proposal.cpu(), q, 2 * tolerance * space.length, f"log_proposal under {truncation}")


def check_sampler_law(
    lm: LanguageModel, context: Sequence[int], space: SequenceSpace, truncation: Truncation, tolerance: float
) -> None:
    """Pr[sample = x] = Π_t q_t(x_t), exactly: every random branch of the sampler is walked."""
    contexts = Sequences.from_lists([context])
    found = law(lambda rng: lm.sample(contexts, 1, space, rng, truncation), lambda draws: tuple(draws.x.lists()[0][0]))
    x = everything([context], space)
    blank = torch.zeros(x.shape)
    truth = _log_proposal(lm, Draws(x, blank, blank), truncation)[0].exp()
    strings = [tuple(string) for string in x.lists()[0]]
    assert set(found) <= set(strings), f"the sampler draws {sorted(set(found) - set(strings))[:3]}, outside {space}"
    sampled = torch.tensor([found.get(string, 0.0) for string in strings], dtype=torch.float64)
    assert_close(sampled, truth, tolerance, f"the sampler's law under {truncation}")


def check_replay(lm: LanguageModel, contexts: Lists, length: int) -> None:
    """The same seed gives the same bits, and a draw does not depend on how many are drawn with it."""
    space, c = SequenceSpace(vocab_size=lm.vocab_size, length=length), Sequences.from_lists(contexts)
    first, again = (lm.sample(c, 4, space, Rng(5)) for _ in range(2))
    assert torch.equal(first.x.tokens, again.x.tokens), "the same seed gave other tokens"
    assert torch.equal(first.log_base, again.log_base), "the same seed gave other log-probabilities"
    part = lm.sample(c[1:], 2, space, Rng(5).shift(contexts=1, candidates=2))
    assert torch.equal(part.x.tokens, first.x.tokens[1:, 2:]), "a candidate's draw depends on its batch"


def _check_in_space(draws: Draws, space: SequenceSpace) -> None:
    for x in (x for row in draws.x.lists() for x in row):
        ends = space.eos is not None and x[-1] == space.eos
        assert ends or len(x) == space.length, f"the draw {x} is not in {space}"
        assert space.eos is None or space.eos not in x[:-1], f"the draw {x} continues after EOS"


def _spaces(lm: LanguageModel, length: int) -> list[SequenceSpace]:
    return [SequenceSpace(vocab_size=lm.vocab_size, length=length, eos=eos) for eos in (None, lm.eos)]


def _some(lm: LanguageModel, contexts: Lists, length: int) -> Continuations:
    """Continuations of different lengths, for every context."""
    rows = [
        [[(b + n + t + 1) % lm.vocab_size for t in range(n % length + 1)] for n in range(3)]
        for b in range(len(contexts))
    ]
    return Continuations.from_lists(contexts, rows)


def _log_proposal(lm: LanguageModel, draws: Draws, truncation: Truncation) -> Tensor:
    """Σ_t log q_t(x_t), step by step from next_log_probs; slow, for reference."""
    B, N = draws.x.shape
    total = torch.zeros(B, N, dtype=torch.float64)
    starts = [context or [lm.eos] for context in draws.x.contexts.lists()]
    rows = [(b, n, x) for b, xs in enumerate(draws.x.lists()) for n, x in enumerate(xs)]
    for t in range(max(len(x) for _, _, x in rows)):
        live = [(b, n, x) for b, n, x in rows if t < len(x)]
        log_q = truncation(lm.next_log_probs(Sequences.from_lists([starts[b] + x[:t] for b, _, x in live]))).cpu()
        for i, (b, n, x) in enumerate(live):
            total[b, n] += log_q[i, x[t]].item()
    return total


def check_energy(energy: Energy, x: Continuations, *, tolerance: float = 1e-5) -> None:
    """Check every law of ``Energy``: [B, N], finite, the same each time, batch = single, padding inert."""
    first = energy(x).detach()
    assert tuple(first.shape) == x.shape, f"the energy has shape {tuple(first.shape)}, not {x.shape}"
    assert first.isfinite().all(), f"the energy is not finite at {(~first.isfinite()).nonzero().tolist()[:3]}"
    assert torch.equal(energy(x).detach(), first), "the energy of the same continuations changed between two calls"
    for b in range(x.shape[0]):
        alone = energy(x[b : b + 1]).detach()
        assert_close(alone[0], first[b], tolerance, f"batch = single at context {b}")
    turned = energy(x.candidates(torch.arange(x.shape[1]).flip(0))).detach()
    assert_close(turned.flip(1), first, tolerance, "the order of candidates does not matter")
    assert_close(energy(_padded(x, 0)).detach(), first, tolerance, "padding is inert")


def _padded(x: Continuations, token: int) -> Continuations:
    """The same strings with ``token`` after their ends, in three more columns too."""

    def padded(tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.nn.functional.pad(tokens.masked_fill(~mask, token), pad=(0, 3), value=token)

    contexts = Sequences(padded(x.contexts.tokens, x.contexts.mask), x.contexts.lengths)
    return Continuations(contexts, padded(x.tokens, x.mask), x.lengths)
