"""From a prefix to texts: encode, sample once or chunk by chunk, decode."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import final

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Target
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.corpus import Tokenizer
from freenergy.models.residual import Residual
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sampled import SILENT, Sampled, Sampler
from freenergy.text.chunks import Chunk, write
from freenergy.text.texts import Text, Texts

OnChunk = Callable[[str, int, str], None]  # the prefix, number of the text, what was added to it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How texts are written. Several texts of several chunks are written one after the other, each by itself."""

    sampler: Sampler = field(default_factory=Resampling)
    num: int = 1  # texts of each prefix
    chunks: int = 1
    look_ahead: int = 0  # roll-outs of the next chunk that each candidate is judged by; 0 looks at the chunk alone
    max_context: int | None = None  # tokens of what stands before that a chunk reads; None is as many as fit

    def __post_init__(self) -> None:
        for name, lowest in (("num", 1), ("chunks", 1), ("look_ahead", 0)):
            if (value := getattr(self, name)) < lowest:
                raise UserError(f"{name} is {value}: set it to {lowest} or more")


def stream(seed: int, number: int = 0) -> Rng:
    """The random numbers of a prefix: the first of many has those of one alone."""
    return Rng(seed).child("prefix", number)


def write_texts(
    model: Residual,
    tokenizer: Tokenizer,
    prefix: str,
    space: SequenceSpace,
    rng: Rng,
    writing: Writing,
    *,
    progress: Progress = SILENT,
    on_chunk: OnChunk | None = None,
) -> Texts:
    """Texts that continue one prefix; ``on_chunk`` is told the words of each chunk as soon as they are there."""
    target = Target(model, Sequences.from_lists([tokenizer.encode(prefix)]), space)
    if writing.chunks == 1 and not writing.look_ahead:
        sampled = writing.sampler(target, writing.num, rng, progress)
        return Texts(prefix=prefix, texts=of_sampled(sampled, tokenizer), steps=(sampled,), tokenizer=tokenizer)
    texts, steps = [], []
    for r in range(writing.num):
        chunks: list[Chunk] = []
        shown = ""
        for chunk in _long(target, rng.child("text", r), writing, tokenizer.eos, progress):
            chunks.append(chunk)
            text = of_chunks(chunks, tokenizer)
            if on_chunk is not None:
                on_chunk(prefix, r, text.text[len(shown) :])
            shown = text.text
        texts.append(text)
        steps += [chunk.sampled for chunk in chunks]
    return Texts(prefix=prefix, texts=tuple(texts), steps=tuple(steps), tokenizer=tokenizer)


def _long(target: Target[Residual], rng: Rng, writing: Writing, eos: int, progress: Progress) -> Iterator[Chunk]:
    return write(
        target,
        rng,
        chunks=writing.chunks,
        sampler=writing.sampler,
        look_ahead=writing.look_ahead,
        max_context=writing.max_context,
        eos=eos,
        progress=progress,
    )


def of_sampled(sampled: Sampled, tokenizer: Tokenizer) -> tuple[Text, ...]:
    """The results of one call of a sampler."""
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
        for x in [_until(drawn, tokenizer.eos)]
    )


def _until(tokens: list[int], eos: int) -> list[int]:
    """Up to the end of the document, where it ends: what follows belongs to another."""
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def of_chunks(chunks: list[Chunk], tokenizer: Tokenizer) -> Text:
    """One text from its chunks."""
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return Text(
        text=tokenizer.decode(tokens),
        tokens=tokens,
        log_base=sum(float(chunk.sampled.log_base) for chunk in chunks),
        energy=sum(float(chunk.sampled.energy) for chunk in chunks),
        drawn=sum(int(chunk.sampled.x.lengths[0, 0]) for chunk in chunks),
        has_ended=tokenizer.eos in tokens,
    )
