"""From a prefix to texts: encode, sample once or chunk by chunk, decode.

``generate`` is the one way to write: a generator that yields requests to the models and events, is sent the answers,
and returns the texts. ``ResidualModel.write`` answers the requests at once; the server answers those of many clients
together.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, final

from freenergy.core.checks import check_range
from freenergy.core.rng import Rng
from freenergy.core.roles import Target
from freenergy.corpus import Tokenizer
from freenergy.models.residual import Residual
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sampled import Request, Sampled, Sampler, sampling
from freenergy.text.chunks import Chunk, Drawn, check_look_ahead, watched, writing_steps
from freenergy.text.texts import Text, Texts

OnChunk = Callable[[str, int, str], None]  # the prefix, number of the text, what was added to it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How texts are written. Several texts of several chunks are written one after the other, each by itself."""

    sampler: Sampler = field(default_factory=Resampling)
    num: int = 1  # texts of each prefix
    chunks: int = 1
    look_ahead: int = 0  # rollouts of the next chunk that each candidate is judged by; 0 looks at the chunk alone
    max_context: int | None = None  # tokens of what stands before that a chunk reads; None is as many as fit
    max_tokens: int | None = None  # of a text, which is cut there
    is_shortened: bool = False  # the last chunk is drawn as short as max_tokens leaves it, and not cut
    stop: tuple[str, ...] = ()  # a text that contains one of these needs no further chunk

    def __post_init__(self) -> None:
        check_range(self, "num", "chunks", "max_tokens", at_least=1)
        check_look_ahead(self.look_ahead, self.chunks, self.sampler)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Tokens that were added to a text, and the characters that it has grown by."""

    text: int
    tokens: tuple[int, ...]
    words: str


@final
@dataclass(frozen=True, slots=True)
class TextPlan:
    """How long a text is, and in how many chunks it is written."""

    length: int | None  # tokens of a chunk; None: as trained
    chunks: int = 1
    max_tokens: int | None = None
    is_shortened: bool = False


Event = Drawn | Added
Generation = Generator[Request | Event, Any, Texts]


def stream(seed: int, number: int = 0) -> Rng:
    """Return the random numbers of a prefix: the first of many has those of one alone."""
    return Rng(seed).child("prefix", number)


def generate(target: Target[Residual], tokenizer: Tokenizer, prefix: str, rng: Rng, writing: Writing) -> Generation:
    """Write texts that continue a prefix, whose tokens are the context of the target."""
    if writing.chunks == 1:
        sampled = yield from watched(sampling(writing.sampler, target, writing.num, rng), 0)
        texts = [_cut(text, writing.max_tokens, tokenizer) for text in of_sampled(sampled, tokenizer)]
        for r, text in enumerate(texts):
            yield Added(text=r, tokens=text.tokens, words=text.text)
        return Texts(prefix=prefix, texts=tuple(texts), steps=(sampled,), tokenizer=tokenizer)
    texts, steps = [], list[Sampled]()
    for r in range(writing.num):
        chunks = yield from _one_text(target, tokenizer, rng.child("text", r), writing, r)
        texts.append(of_chunks(chunks, tokenizer))
        steps += [chunk.sampled for chunk in chunks]
    return Texts(prefix=prefix, texts=tuple(texts), steps=tuple(steps), tokenizer=tokenizer)


def _one_text(
    target: Target[Residual], tokenizer: Tokenizer, rng: Rng, writing: Writing, r: int
) -> Generator[Request | Event, Any, list[Chunk]]:
    steps = writing_steps(
        target, rng, chunks=writing.chunks, sampler=writing.sampler, eos=tokenizer.eos, look_ahead=writing.look_ahead,
        max_context=writing.max_context, max_tokens=writing.max_tokens, is_shortened=writing.is_shortened,
    )  # fmt: skip
    chunks, shown, answer = list[Chunk](), "", None
    while not any(word in shown for word in writing.stop):
        try:
            step = steps.send(answer)
        except StopIteration:
            break
        if isinstance(step, Chunk):
            chunks.append(step)
            whole = of_chunks(chunks, tokenizer).text
            answer = yield Added(text=r, tokens=step.tokens, words=whole[len(shown) :])
            shown = whole
        else:
            answer = yield replace(step, text=r) if isinstance(step, Drawn) else step
    return chunks


def of_sampled(sampled: Sampled, tokenizer: Tokenizer) -> tuple[Text, ...]:
    """Return the results of one call of a sampler as texts."""
    shares: list[float | None] = [None] * sampled.energy.shape[1]
    if sampled.candidates is not None and sampled.chosen is not None:
        merged = sampled.candidates.merged()[0].softmax(0)
        shares = merged[sampled.chosen].tolist()
    strings = sampled.x.lists()[0]
    rows = zip(strings, sampled.log_base[0].tolist(), sampled.energy[0].tolist(), shares, strict=True)
    return tuple(
        Text(
            text=tokenizer.decode(x),
            tokens=tuple(x),
            log_base=log_base,
            energy=E,
            drawn=len(drawn),
            share=share,
            has_ended=tokenizer.eos in x,
        )
        for drawn, log_base, E, share in rows
        # what follows the end of the document belongs to another
        for x in [drawn[: drawn.index(tokenizer.eos) + 1] if tokenizer.eos in drawn else drawn]
    )


def _cut(text: Text, max_tokens: int | None, tokenizer: Tokenizer) -> Text:
    """Return the first tokens of a text; its numbers stay those of the whole."""
    if max_tokens is None or len(text.tokens) <= max_tokens:
        return text
    tokens = text.tokens[:max_tokens]
    return replace(text, text=tokenizer.decode(tokens), tokens=tokens, has_ended=False)


def of_chunks(chunks: list[Chunk], tokenizer: Tokenizer) -> Text:
    """Return one text from its chunks."""
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return Text(
        text=tokenizer.decode(tokens),
        tokens=tokens,
        log_base=sum(float(chunk.sampled.log_base) for chunk in chunks),
        energy=sum(float(chunk.sampled.energy) for chunk in chunks),
        drawn=sum(int(chunk.sampled.x.lengths[0, 0]) for chunk in chunks),
        has_ended=tokenizer.eos in tokens,
    )
