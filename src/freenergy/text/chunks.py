"""Long text, chunk by chunk: what Deng et al. (2020) left as future work.

    x_k ~ P(· | c x_1 … x_{k−1}),      P the joint model of chunks of L tokens

Each chunk is sampled given what has been written, so the text follows a chain of normalised joint models. A chunk is
chosen for itself alone, though it may lead nowhere. Looking ahead by one chunk weighs candidate x_i also by what can
follow it:

    w'_i = w_i · Ẑ(c x_i),      Ẑ(c x_i) = (1/m) Σ_j w(y_j),      y_j ~ q(· | c x_i)

Ẑ is unbiased, so as the candidates grow the law is the marginal of the product of two chunks at every m ≥ 1; more
roll-outs only make the weights more even:

    P'(x) ∝ Σ_y P_LM(x y | c) · e^{−E(c, x) − E(c x, y)} = P_LM(x | c) · e^{−E(c, x)} · Z(c x)

The last chunk has nothing ahead, so two chunks with look-ahead are a draw from that product, normalised once. Nothing
follows a chunk that ends the text: its Ẑ is 1. So with look-ahead a constant added to E, which no other law here
depends on, moves the chance of ending: look ahead with an energy whose log Z is near 0, or in texts that do not end.

Chunk k draws from ``rng.child("chunk", k)``: a text can be taken up after any chunk and goes on as it would have.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Energy, LanguageModel
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.lm.stepping import started
from freenergy.models.draw_with_energy import Split
from freenergy.samplers.candidates import Candidates, log_weight
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sampled import SILENT, Sampled, Sampler, check_one, tokens_in


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk that has been written."""

    index: int  # 0 is the first
    tokens: tuple[int, ...]  # kept: up to EOS, or to the length that was asked for
    sampled: Sampled
    read: int  # tokens of context that it was sampled after
    dropped: int  # tokens before those, which it was not
    has_ended: bool  # EOS was written

    @property
    def log_ahead(self) -> Float[Tensor, " N"] | None:
        """log Ẑ(c x_i) of each candidate; None without look-ahead."""
        found = self.sampled.candidates
        return None if found is None or found.log_ahead is None else found.log_ahead[0]


def write(
    base: LanguageModel,
    energy: Energy,
    context: Sequences,
    space: SequenceSpace,
    rng: Rng,
    *,
    chunks: int,
    sampler: Sampler,
    eos: int | None,
    look_ahead: int = 0,
    max_context: int | None = None,
    max_tokens: int | None = None,
    written: Sequence[int] = (),
    progress: Progress = SILENT,
) -> Iterator[Chunk]:
    """A text of at most ``chunks`` chunks, each given as soon as it is there.

    Of the sampler's results the first counts. The text stops after ``eos`` (None: it never does, unless the space says
    so), or at ``max_tokens``. A chunk reads at most ``max_context`` tokens of what stands before it, and no more than
    the base and the energy can. ``look_ahead`` rollouts of the next chunk weigh each candidate (resampling only).
    ``written`` are whole chunks of a text to go on with: the same call then gives the chunks that were missing.
    """
    check_one(context)
    if chunks < 1 or look_ahead < 0 or (max_tokens is not None and max_tokens < 1):
        raise UserError(
            f"chunks is {chunks}, look_ahead {look_ahead}, max_tokens {max_tokens}: set them to at least 1, 0 and 1"
        )
    if look_ahead and (chunks == 1 or not isinstance(sampler, Resampling)):
        raise UserError("looking ahead weighs candidates by their next chunk: take resampling and 2 chunks or more")
    if len(written) % space.length:
        raise UserError(
            f"{len(written)} tokens are not whole chunks of {space.length}: give what was written up to the last chunk"
        )
    text = LongText(base, energy, context, space, max_context, eos, max_tokens, list(written))
    return _chunks(text, rng, chunks, sampler, look_ahead, progress)


def _chunks(
    text: "LongText", rng: Rng, chunks: int, sampler: Sampler, look_ahead: int, progress: Progress
) -> Iterator[Chunk]:
    first = len(text.written) // text.space.length
    with progress.track("writing", chunks - first, "chunks") as advance:
        for k in range(first, chunks):
            if text.is_done():
                return
            is_last = k + 1 == chunks or text.is_done(after=text.space.length)
            ahead = 0 if is_last else look_ahead
            chunk = text.add(k, _one(text, rng.child("chunk", k), sampler, ahead, progress))
            advance(1)
            yield chunk


def _one(text: "LongText", rng: Rng, sampler: Sampler, look_ahead: int, progress: Progress) -> Sampled:
    """Sample a chunk."""
    context = Sequences.from_lists([text.before()[0]])
    if look_ahead and isinstance(sampler, Resampling):
        return _looking_ahead(text, context, rng, sampler, look_ahead, progress)
    return sampler(text.base, text.energy, context, text.space, rng, progress)


def _looking_ahead(
    text: "LongText", context: Sequences, rng: Rng, sampler: Resampling, look_ahead: int, progress: Progress
) -> Sampled:
    """Resampling with the weights w'; the candidates are those that it has without."""
    with progress.track("drawing", sampler.candidates, "candidates") as advance:
        found = sampler.draw(text.base, text.energy, context, text.space, rng.child("draw"), advance)
    log_ahead, tokens = torch.zeros(found.energy.shape[1], dtype=torch.float64), 0
    strings, going, each = found.x.lists()[0], text.going(found), max(1, sampler.batch_size // look_ahead)
    with progress.track("looking ahead", len(going), "candidates") as advance:
        for i in range(0, len(going), each):
            some, stream = going[i : i + each], rng.child("ahead").shift(contexts=i)
            log_ahead[some], drawn = _ahead(text, [strings[n] for n in some], look_ahead, sampler, stream)
            tokens += drawn
            advance(len(some))
    sampled = sampler.choose(replace(found, log_ahead=log_ahead.unsqueeze(0)), rng.child("choose"))
    return replace(sampled, base_tokens=sampled.base_tokens + tokens)


def _ahead(
    text: "LongText", strings: Sequence[list[int]], look_ahead: int, sampler: Resampling, rng: Rng
) -> tuple[Float[Tensor, " some"], int]:
    """log Ẑ(c x_i) of some candidates, all their roll-outs in one call; and how many tokens were drawn."""
    contexts = Sequences.from_lists([text.before(string)[0] for string in strings])
    split = Split.of(text.energy, text.base)
    draws, known = split.draw(text.base, contexts, look_ahead, text.space, rng, sampler.truncation)
    E = known + split.rest(draws.x, rows=sampler.batch_size, allow_inf=True)
    log_w = log_weight(draws.log_base.double().cpu(), draws.log_proposal.double().cpu(), E, sampler.target)
    return log_w.logsumexp(1) - math.log(look_ahead), tokens_in(draws.x)


@final
class LongText:
    """What has been written, what of it a chunk may read, and where it ends."""

    def __init__(
        self,
        base: LanguageModel,
        energy: Energy,
        context: Sequences,
        space: SequenceSpace,
        max_context: int | None,
        eos: int | None,
        max_tokens: int | None,
        written: list[int],
    ) -> None:
        self.base, self.energy, self.space, self.written = base, energy, space, written
        self.stops = {token for token in (eos, space.eos) if token is not None}
        self.max_tokens, self.max_context, self._has_told = max_tokens, max_context, False
        self.reach = reach(base, energy, space, max_context)
        # an empty context is the start of a document, also for the chunks after the first
        self.given, self.begun = context.lists()[0], started(context, base.eos).lists()[0]

    def before(self, candidate: Sequence[int] = ()) -> tuple[list[int], int]:
        """What is read before the next chunk, or before the one after a candidate; and how much is dropped.

        A prefix that does not fit is the model's to refuse, as in a text of one chunk; only ``max_context`` cuts it.
        """
        added = [*self.written, *candidate]
        tokens, most = ([*self.begun, *added], self.reach) if added else (self.given, self.max_context)
        dropped = 0 if most is None else max(0, len(tokens) - most)
        return tokens[dropped:], dropped

    def add(self, k: int, sampled: Sampled) -> Chunk:
        """Chunk k, cut where the text ends; that it does not read all that stands before it is said once."""
        before, dropped = self.before()
        if dropped and not self._has_told:
            self._has_told = True
            note = f"from chunk {k + 1} on only the last {len(before)} tokens of what stands before it are read"
            sampled = replace(sampled, notes=(*sampled.notes, note))
        tokens = tuple(self.kept(sampled.x.lists()[0][0]))
        self.written += tokens
        has_ended = self.ends(tokens)
        return Chunk(index=k, tokens=tokens, sampled=sampled, read=len(before), dropped=dropped, has_ended=has_ended)

    def kept(self, tokens: list[int]) -> list[int]:
        """A chunk up to where the text ends."""
        end = next((t + 1 for t, token in enumerate(tokens) if token in self.stops), len(tokens))
        return tokens[: end if self.max_tokens is None else min(end, self.max_tokens - len(self.written))]

    def ends(self, tokens: Sequence[int]) -> bool:
        """Does the text end there?"""
        return not self.stops.isdisjoint(tokens)

    def is_done(self, after: int = 0) -> bool:
        """Nothing more is to be written, now or ``after`` so many tokens more."""
        is_full = self.max_tokens is not None and len(self.written) + after >= self.max_tokens
        return is_full or self.ends(self.written)

    def going(self, found: Candidates) -> list[int]:
        """The candidates that something may follow, and that may be chosen."""
        weights = found.log_weight[0].tolist()
        strings = zip(found.x.lists()[0], weights, strict=True)
        return [n for n, (x, log_w) in enumerate(strings) if log_w > -math.inf and not self.ends(x)]


def reach(base: LanguageModel, energy: Energy, space: SequenceSpace, max_context: int | None = None) -> int | None:
    """How many tokens before a chunk can be read by both models, and may be; None where there is no limit."""
    if max_context is not None and max_context < 1:
        raise UserError(f"max_context is {max_context} tokens: set it to 1 or more, or leave it out")
    longest = [base.max_length, *_lengths_of_trunks(energy)]
    limits = [limit - space.length for limit in longest if limit is not None] + (
        [] if max_context is None else [max_context]
    )
    if limits and min(limits) < 1:
        raise UserError(
            f"a chunk of {space.length} tokens leaves no room for what stands before it: ask for shorter chunks"
        )
    return min(limits, default=None)


def _lengths_of_trunks(energy: Energy) -> list[int | None]:
    """How many tokens the networks inside an energy can read."""
    if not isinstance(energy, nn.Module):
        return []
    from freenergy.energies.trunk import Trunk  # here, since it loads transformers

    return [module.max_length for module in energy.modules() if isinstance(module, Trunk)]
