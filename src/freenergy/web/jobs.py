"""A question to the model, as steps between which it can wait.

    a job is a generator: it yields what it needs (candidates of a context), and is sent what was drawn

So the jobs of many clients share calls of the model: whoever holds them draws for several at once (``engine``), and a
job does not know. The streams of random numbers are those of ``samplers.writing`` and ``samplers.chunks``: a text is
the one that ``ResidualModel.sample`` gives for the same seed and settings, whatever else is in the batch.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch

from freenergy.core.rng import Rng, Streams
from freenergy.core.roles import Target, Truncation
from freenergy.core.scored import Law, Scored
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.corpus import Tokenizer
from freenergy.models.residual import Residual
from freenergy.samplers.plain import all_of
from freenergy.samplers.resampling import Resampling
from freenergy.text.chunks import Chunk, LongText
from freenergy.text.model import ResidualModel
from freenergy.text.texts import Text, Texts
from freenergy.text.write import Writing, of_chunks, of_sampled, stream


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to write; ``Engine.question`` makes one and checks it."""

    prefix: str
    context: tuple[int, ...]  # the prefix in tokens
    law: Literal["joint", "base"]
    num: int  # texts
    candidates: int  # of each choice; the base draws its texts and no candidates
    max_tokens: int  # of a text
    truncation: Truncation
    target: Law
    seed: int
    number: int = 0  # of the prefix among those that share the seed
    stop: tuple[str, ...] = ()  # a text that holds one of these needs no further chunk
    is_weighed: bool = True  # False: texts of the base are not shown to the energy


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Some candidates of a chunk, drawn and weighed; ``start`` is the number of the first."""

    text: int  # which the chunk is for; 0 where one choice among the candidates gives all texts
    chunk: int
    start: int
    candidates: Scored  # [1, k]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Tokens that were added to a text."""

    text: int
    tokens: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All texts, and how they came about."""

    texts: Texts


Event = Drawn | Added | Finished
Tell = Callable[[Event], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Up to ``num`` candidates of a context, from number ``first`` on."""

    context: tuple[int, ...]
    first: int
    num: int
    rng: Rng
    space: SequenceSpace
    truncation: Truncation
    target: Law
    is_weighed: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """Needs of the same kind can be drawn in one call."""
        return self.space, self.truncation, self.target, self.is_weighed


Drawing = Generator[Need, Scored, Scored]


def draw(joint: ResidualModel, needs: Sequence[Need], count: int) -> list[Scored]:
    """``count`` candidates for each of some needs of one kind, in one call of the models."""
    one = needs[0]
    streams = [need.rng.shift(candidates=need.first) for need in needs]
    model = joint.residual if one.is_weighed else Residual(joint.base)
    found = model.propose(
        Sequences.from_lists([need.context for need in needs]),
        count,
        one.space,
        streams[0] if len(needs) == 1 else Streams(streams),
        truncation=one.truncation,
        law=one.target,
        batch_size=count * len(needs),
    )
    if not one.is_weighed:
        found = replace(found, energy=torch.full_like(found.energy, torch.nan))
    return [found.of_context(b) for b in range(len(needs))]


def can_share(joint: ResidualModel) -> bool:
    """Whether contexts with streams of their own can be drawn together: a model behind HTTP has seeds, not streams."""
    return joint.base.draws_here


def answer(joint: ResidualModel, question: Question, tell: Tell) -> Generator[Need, Scored, None]:
    """Write the texts of a question, and tell what happens on the way."""
    assert joint.tokenizer is not None, "the engine has looked"
    if question.law == "base":
        texts = yield from _plain(joint, joint.tokenizer, question, tell)
    elif question.max_tokens <= _space(joint, question).length:
        texts = yield from _chosen(joint, joint.tokenizer, question, tell)
    else:
        texts = yield from _chunked(joint, joint.tokenizer, question, tell)
    tell(Finished(texts=texts))


def _plain(
    joint: ResidualModel, tokenizer: Tokenizer, question: Question, tell: Tell
) -> Generator[Need, Scored, Texts]:
    """Draws of the base, as ``samplers.Plain`` makes them; each ends where its document does."""
    space = SequenceSpace(vocab_size=joint.base.vocab_size, length=question.max_tokens, eos=joint.base.eos)
    rng = stream(question.seed, question.number)

    def told(event: Event) -> None:
        tell(event)
        if isinstance(event, Drawn):
            for i, x in enumerate(event.candidates.x.lists()[0]):
                tell(Added(text=event.start + i, tokens=tuple(x)))

    need = _need(question, question.context, question.num, space, rng.child("draw"))
    found = yield from _drawn(need, told, text=0, chunk=0)
    sampled = all_of(found)
    return Texts(
        prefix=question.prefix, texts=of_sampled(sampled, tokenizer), steps=(sampled,), tokenizer=tokenizer, notes=()
    )


def _chosen(
    joint: ResidualModel, tokenizer: Tokenizer, question: Question, tell: Tell
) -> Generator[Need, Scored, Texts]:
    """All texts by one choice; a text of fewer tokens than the energy reads is the beginning of one of as many."""
    space, rng, sampler = _space(joint, question), stream(question.seed, question.number), _sampler(question)
    need = _need(question, question.context, question.candidates, space, rng.child("draw"))
    found = yield from _drawn(need, tell, text=0, chunk=0)
    sampled = sampler.choose(found, question.num, rng.child("choose"))
    texts = tuple(_cut(text, question.max_tokens, tokenizer) for text in of_sampled(sampled, tokenizer))
    for r, text in enumerate(texts):
        tell(Added(text=r, tokens=text.tokens))
    notes = joint.unlike_training(question.prefix, space, Writing(sampler=sampler, max_context=joint.max_context))
    return Texts(prefix=question.prefix, texts=texts, steps=(sampled,), tokenizer=tokenizer, notes=tuple(notes))


def _chunked(
    joint: ResidualModel, tokenizer: Tokenizer, question: Question, tell: Tell
) -> Generator[Need, Scored, Texts]:
    """Text after text, each chunk by chunk."""
    texts, steps = [], []
    for r in range(question.num):
        chunks = yield from _one_text(joint, tokenizer, question, r, tell)
        texts.append(of_chunks(chunks, tokenizer))
        steps += [chunk.sampled for chunk in chunks]
    return Texts(prefix=question.prefix, texts=tuple(texts), steps=tuple(steps), tokenizer=tokenizer)


def _one_text(
    joint: ResidualModel, tokenizer: Tokenizer, question: Question, r: int, tell: Tell
) -> Generator[Need, Scored, list[Chunk]]:
    space, sampler = _space(joint, question), _sampler(question)
    rng = stream(question.seed, question.number).child("text", r)
    given = Sequences.from_lists([question.context])
    target = Target(joint.residual, given, space)
    text = LongText(target, joint.max_context, tokenizer.eos, question.max_tokens, [])
    chunks: list[Chunk] = []
    while not text.is_done() and not any(stop in tokenizer.decode(text.written) for stop in question.stop):
        k, own = len(chunks), rng.child("chunk", len(chunks))
        need = _need(question, text.before()[0], question.candidates, space, own.child("draw"))
        found = yield from _drawn(need, tell, text=r, chunk=k)
        chunks.append(text.add(k, sampler.choose(found, 1, own.child("choose"))))
        tell(Added(text=r, tokens=chunks[k].tokens))
    return chunks


def _drawn(need: Need, tell: Tell, *, text: int, chunk: int) -> Drawing:
    """All that is needed, in the parts in which it comes."""
    parts: list[Scored] = []
    first = 0
    while first < need.num:
        part = yield replace(need, first=first, num=need.num - first)
        tell(Drawn(text=text, chunk=chunk, start=first, candidates=part))
        parts.append(part)
        first += part.energy.shape[1]
    return Scored.cat(parts, dim=1)


def _need(question: Question, context: Sequence[int], num: int, space: SequenceSpace, rng: Rng) -> Need:
    how: dict[str, Any] = {"truncation": question.truncation, "target": question.target}
    return Need(context=tuple(context), first=0, num=num, rng=rng, space=space, is_weighed=question.is_weighed, **how)


def _sampler(question: Question) -> Resampling:
    return Resampling(candidates=question.candidates, truncation=question.truncation, law=question.target)


def _space(joint: ResidualModel, question: Question) -> SequenceSpace:
    """As the energy was trained; where nothing says how, of the length that was asked for."""
    return joint.space_of(None if joint.space is not None else question.max_tokens)


def _cut(text: Text, max_tokens: int, tokenizer: Tokenizer) -> Text:
    """The beginning of a text; its numbers stay those of the whole."""
    if len(text.tokens) <= max_tokens:
        return text
    tokens = text.tokens[:max_tokens]
    return replace(text, text=tokenizer.decode(tokens), tokens=tokens, has_ended=False)
