"""Long text, chunk by chunk: what Deng et al. (2020) left as future work.

    x_k ~ P(· | c x_1 … x_{k−1}),      P the residual model of chunks of L tokens

Each chunk is sampled given what has been written, so the text follows a chain of normalised residual models. A chunk is
chosen for itself alone, though it may lead nowhere. Looking ahead by one chunk weighs candidate x_i also by what can
follow it:

    w'_i = w_i · Ẑ(c x_i),      Ẑ(c x_i) = (1/m) Σ_j w(y_j),      y_j ~ q(· | c x_i)

Ẑ is unbiased, so as the candidates grow the law is the marginal of the product of two chunks at every m ≥ 1; more
roll-outs only make the weights more even:

    P'(x) ∝ Σ_y P_LM(x y | c) · e^{−E(c, x) − E(c x, y)} = P_LM(x | c) · e^{−E(c, x)} · Z(c x)

The last chunk has nothing ahead, so two chunks with look-ahead are a draw from that product, normalised once. Nothing
follows a chunk that ends the text: its Ẑ is 1. So with look-ahead a constant added to E, which no other law here
depends on, moves the chance of ending: look ahead with an energy whose log Z is near 0, or in texts that do not end.

Chunk k draws from ``rng.child("chunk", k)``: a text can be resumed after any chunk, and ends with the same bits.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Target
from freenergy.core.scored import Scored
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.lm.stepping import started
from freenergy.models.residual import Residual
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sampled import SILENT, DrawRequest, Request, Sampled, Sampler, answered, check_call, sampling

T = TypeVar("T")


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
        """Return log Ẑ(c x_i) of each candidate; None without look-ahead."""
        found = self.sampled.candidates
        return None if found is None or found.log_ahead is None else found.log_ahead[0]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Some candidates of a chunk, drawn and weighed; ``start`` is the number of the first."""

    text: int = 0  # that the chunk is for; 0 where one choice among the candidates gives all texts
    chunk: int
    start: int
    candidates: Scored  # [1, k]


ChunkSteps = Generator[Request | Drawn | Chunk, Any, None]


def write(
    target: Target[Residual],
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
    """Write a text of at most ``chunks`` chunks, each given as soon as it is there.

    The text continues the one context of the target, in chunks of its space. It stops after ``eos`` (None: it never
    does, unless the space says so), or at ``max_tokens``. A chunk reads at most ``max_context`` tokens of what stands
    before it, and no more than the base and the energy can. ``look_ahead`` rollouts of the next chunk weigh each
    candidate (resampling only).
    ``written`` are whole chunks of a text to resume: the same call then gives the chunks that were missing.
    """
    steps = writing_steps(
        target, rng, chunks=chunks, sampler=sampler, eos=eos, look_ahead=look_ahead, max_context=max_context,
        max_tokens=max_tokens, written=written,
    )  # fmt: skip
    return _driven(steps, chunks - len(written) // target.space.length, progress)


def _driven(steps: ChunkSteps, total: int, progress: Progress) -> Iterator[Chunk]:
    with progress.track("writing", total, "chunks") as advance:
        for event in answered(steps, progress):
            if isinstance(event, Chunk):
                advance(1)
                yield event


def writing_steps(
    target: Target[Residual],
    rng: Rng,
    *,
    chunks: int,
    sampler: Sampler,
    eos: int | None,
    look_ahead: int,
    max_context: int | None,
    max_tokens: int | None,
    written: Sequence[int] = (),
    is_shortened: bool = False,
) -> ChunkSteps:
    """Write the same text in steps: requests to the models, draws as they come, and each chunk."""
    check_call(target, 1)
    if chunks < 1 or (max_tokens is not None and max_tokens < 1):
        raise UserError(f"chunks is {chunks} and max_tokens {max_tokens}: set them to 1 or more")
    check_look_ahead(look_ahead, chunks, sampler)
    if len(written) % target.space.length:
        raise UserError(
            f"{len(written)} tokens are not whole chunks of {target.space.length}: give the text up to the last chunk"
        )
    text = LongText(target, max_context, eos, max_tokens, list(written), is_shortened)
    return _chunks(text, rng, chunks, sampler, look_ahead)


def check_look_ahead(look_ahead: int, chunks: int, sampler: Sampler) -> None:
    """Refuse to look ahead where there is no next chunk, or no candidates to choose among."""
    if look_ahead < 0:
        raise UserError(f"look_ahead is {look_ahead}: set it to 0 or more")
    if look_ahead and (chunks == 1 or not isinstance(sampler, Resampling)):
        raise UserError("looking ahead weighs candidates by their next chunk: take resampling and 2 chunks or more")


def _chunks(text: "LongText", rng: Rng, chunks: int, sampler: Sampler, look_ahead: int) -> ChunkSteps:
    for k in range(len(text.written) // text.space.length, chunks):
        if text.is_done():
            return
        is_last = k + 1 == chunks or text.is_done(after=text.space.length)
        own = rng.child("chunk", k)
        if look_ahead and not is_last and isinstance(sampler, Resampling):
            sampled = yield from _looking_ahead(text, k, own, sampler, look_ahead)
        else:
            sampled = yield from watched(sampling(sampler, text.next_target(), 1, own), k)
        yield text.add(k, sampled)


def _looking_ahead(
    text: "LongText", k: int, rng: Rng, sampler: Resampling, look_ahead: int
) -> Generator[Request | Drawn, Any, Sampled]:
    """Resample with the weights w'; the candidates are those that it has without."""
    found = yield from watched(sampler.draws(text.next_target(), rng.child("draw")), k)
    log_ahead, tokens = torch.zeros(found.num, dtype=torch.float64), 0
    strings, going, each = found.x.lists()[0], text.going(found), max(1, sampler.batch_size // look_ahead)
    target = text.target.within(text.next_space(after=text.space.length))
    for i in range(0, len(going), each):
        some = going[i : i + each]
        contexts = Sequences.from_lists([text.before(strings[n])[0] for n in some])
        rollouts: Scored = yield DrawRequest(
            target=target.after(contexts), num=look_ahead, rng=rng.child("ahead").shift(contexts=i),
            truncation=sampler.truncation, law=sampler.law, batch_size=look_ahead * len(some), label="looking ahead",
        )  # fmt: skip
        log_ahead[some] = rollouts.log_weight.logsumexp(1) - math.log(look_ahead)
        tokens += rollouts.tokens_drawn
    sampled = sampler.choose(replace(found, log_ahead=log_ahead.unsqueeze(0)), 1, rng.child("choose"))
    return replace(sampled, base_tokens=sampled.base_tokens + tokens)


def watched(steps: Generator[Request, Any, T], chunk: int) -> Generator[Request | Drawn, Any, T]:
    """Take the same steps; draws are also events, as they come."""
    answer = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return cast(T, end.value)
        answer = yield request
        if isinstance(request, DrawRequest):
            yield Drawn(chunk=chunk, start=request.first, candidates=answer)


@final
class LongText:
    """What has been written, what of it a chunk may read, and where it ends."""

    def __init__(
        self,
        target: Target[Residual],
        max_context: int | None,
        eos: int | None,
        max_tokens: int | None,
        written: list[int],
        is_shortened: bool = False,  # the last chunk is drawn as short as max_tokens leaves it, and not cut
    ) -> None:
        self.is_shortened = is_shortened
        self.target, self.space, self.written = target, target.space, written
        self.stops = {token for token in (eos, target.space.eos) if token is not None}
        self.max_tokens, self.max_context, self._has_noted = max_tokens, max_context, False
        self.reach = reach(target, max_context)
        # an empty context is the start of a document, also for the chunks after the first
        self.given = target.contexts.lists()[0]
        self.begun = started(target.contexts, target.model.base.eos).lists()[0]

    def before(self, candidate: Sequence[int] = ()) -> tuple[list[int], int]:
        """What is read before the next chunk, or before the one after a candidate; and how much is dropped.

        A prefix that does not fit is the model's to refuse, as in a text of one chunk; only ``max_context`` cuts it.
        """
        added = [*self.written, *candidate]
        tokens, most = ([*self.begun, *added], self.reach) if added else (self.given, self.max_context)
        dropped = 0 if most is None else max(0, len(tokens) - most)
        return tokens[dropped:], dropped

    def next_target(self) -> Target[Residual]:
        """Return what the next chunk is sampled from."""
        return self.target.after(Sequences.from_lists([self.before()[0]])).within(self.next_space())

    def next_space(self, after: int = 0) -> SequenceSpace:
        """Return the space of the chunk that comes next, or ``after`` N more tokens."""
        if not self.is_shortened or self.max_tokens is None:
            return self.space
        return replace(self.space, length=min(self.space.length, self.max_tokens - len(self.written) - after))

    def add(self, k: int, sampled: Sampled) -> Chunk:
        """Return chunk k, cut where the text ends; a note says once that it does not read all that stands before it."""
        before, dropped = self.before()
        if dropped and not self._has_noted:
            self._has_noted = True
            note = f"from chunk {k + 1} on only the last {len(before)} tokens of what stands before it are read"
            sampled = replace(sampled, notes=(*sampled.notes, note))
        tokens = tuple(self.kept(sampled.x.lists()[0][0]))
        self.written += tokens
        has_ended = self.ends(tokens)
        return Chunk(index=k, tokens=tokens, sampled=sampled, read=len(before), dropped=dropped, has_ended=has_ended)

    def kept(self, tokens: list[int]) -> list[int]:
        """Return a chunk up to where the text ends."""
        end = next((t + 1 for t, token in enumerate(tokens) if token in self.stops), len(tokens))
        return tokens[: end if self.max_tokens is None else min(end, self.max_tokens - len(self.written))]

    def ends(self, tokens: Sequence[int]) -> bool:
        """Return whether the text ends there."""
        return not self.stops.isdisjoint(tokens)

    def is_done(self, after: int = 0) -> bool:
        """Return whether nothing more is to be written, now or ``after`` N more tokens."""
        is_full = self.max_tokens is not None and len(self.written) + after >= self.max_tokens
        return is_full or self.ends(self.written)

    def going(self, found: Scored) -> list[int]:
        """Return the candidates that something may follow, and that may be chosen."""
        weights = found.log_weight[0].tolist()
        strings = zip(found.x.lists()[0], weights, strict=True)
        return [n for n, (x, log_w) in enumerate(strings) if log_w > -math.inf and not self.ends(x)]


def reach(target: Target[Residual], max_context: int | None = None) -> int | None:
    """Return how many tokens before a chunk both models can read, and may; None where there is no limit."""
    if max_context is not None and max_context < 1:
        raise UserError(f"max_context is {max_context} tokens: set it to 1 or more, or leave it out")
    limits = [limit for limit in (target.model.max_context(target.space), max_context) if limit is not None]
    if limits and min(limits) < 1:
        raise UserError(
            f"a chunk of {target.space.length} tokens leaves no room for what stands before it: ask for shorter chunks"
        )
    return min(limits, default=None)
