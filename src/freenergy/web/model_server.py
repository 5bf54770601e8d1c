"""A residual model that answers many at a time: what may be requested, and the way to request it."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, final

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.core.truncation import Truncation
from freenergy.lm.stepping import check_fits, started
from freenergy.models.residual import no_energy
from freenergy.samplers.resampling import Plain, Resampling
from freenergy.samplers.sampled import Sampler
from freenergy.text.chunks import Drawn
from freenergy.text.model import ResidualModel
from freenergy.text.ranking import Ranking
from freenergy.text.write import Added, Writing, stream
from freenergy.web.entries import Call, Event, Finished, Steps
from freenergy.web.not_served import Busy, NotServed, Stopping, TooLong
from freenergy.web.settings import Limits
from freenergy.web.turns import Answers, Turns

__all__ = [
    "Added", "Answers", "Busy", "Drawn", "Event", "Finished", "GenerationRequest", "ModelServer", "NotServed",
    "Stopping", "TooLong",
]  # fmt: skip

T = TypeVar("T")
_LENGTH, _CANDIDATES = 40, 256  # where nothing says how many


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to write; ``ModelServer.request`` makes one and checks it."""

    model: ResidualModel
    prefix: str
    context: tuple[int, ...]  # the prefix in tokens
    space: SequenceSpace
    writing: Writing
    seed: int
    number: int = 0  # of the prefix among those that share the seed

    def steps(self) -> Steps:
        """Write, in steps; a text is the one that ``ResidualModel.write`` gives for the same seed and settings."""
        rng = stream(self.seed, self.number)
        texts = yield from self.model.generation(self.prefix, self.space, rng, self.writing, self.context)
        yield Finished(texts=texts)


@final
class ModelServer:
    """``start`` and ``close`` its thread; ask it inside an event loop."""

    def __init__(self, model: ResidualModel, limits: Limits | None = None) -> None:
        if model.tokenizer is None:
            raise UserError("this model has no tokenizer: pass one to ResidualModel before serving it")
        self.model, self.tokenizer, self.limits = model, model.tokenizer, limits or Limits()
        self.base = ResidualModel(model.base, no_energy, model.tokenizer) if model.has_energy else model
        self.turns, self.begun = Turns(self.limits, is_shared=model.base.draws_here), time.monotonic()
        self.start, self.close, self.counts = self.turns.start, self.turns.close, self.turns.counts

    @property
    def length(self) -> int:
        """Tokens of a text where the request does not say how many: as the energy was trained."""
        trained = None if self.model.space is None else self.model.space.length
        return self.model.text_length or trained or _LENGTH

    def write_all(self, requests: Sequence[GenerationRequest]) -> list[Answers]:
        """Join the queue with all requests and listen, or ``Busy`` where they do not all fit."""
        self.turns.check_room(len(requests))
        return [self.turns.ask(request.steps()) for request in requests]

    async def call(self, work: Callable[[Progress], T], *, is_new: bool = True) -> T:
        """Do something else on the model thread, in turns; what belongs to a request let in before is not new."""
        if is_new:
            self.turns.check_room(1)
        answers = self.turns.ask(_one_call(work))
        async for _ in answers:
            raise AssertionError("work has no events")
        result: T = answers.entry.result
        return result

    def encode(self, prefix: str | Sequence[int]) -> list[int]:
        """Return a prefix in tokens, which must be of the model's vocabulary and not too many."""
        tokens = self.tokenizer.encode(prefix) if isinstance(prefix, str) else list(prefix)
        V, most = self.model.base.vocab_size, self.limits.prompt_tokens
        if len(tokens) > most:
            raise UserError(f"the prompt has {len(tokens)} tokens: this server takes at most {most}")
        strange = next((token for token in tokens if not 0 <= token < V), None)
        if strange is not None:
            raise UserError(f"the prompt's token {strange} is not below {V}: encode with the tokenizer of this model")
        return tokens

    def check_draws(self, sampler: Sampler, num: int, length: int) -> None:
        """Refuse a request whose candidates would have too many tokens in all."""
        counts = [getattr(sampler, name, None) for name in ("candidates", "particles", "steps", "max_proposals")]
        candidates = max([count for count in counts if isinstance(count, int)], default=1)
        if (tokens := max(candidates, num) * length) > self.limits.draw_tokens:
            raise UserError(
                f"{max(candidates, num)} candidates of {length} tokens are {tokens} tokens: this server draws at most "
                f"{self.limits.draw_tokens} for a text, so ask for fewer candidates or tokens"
            )

    def score(self, prefix: str, candidates: Sequence[str], ends: bool, progress: Progress) -> Ranking:
        """Rank texts as continuations of a prefix, in parts; runs on the model thread."""
        limits = self.limits
        return self.model.score(
            prefix, candidates, ends=ends, max_tokens=limits.score_tokens, max_cells=limits.cells, progress=progress
        )

    def check_score(self, prefix: str, candidates: Sequence[str]) -> None:
        """Refuse a list that would take too long to encode: each candidate is encoded together with the prefix."""
        _check("the number of candidates", len(candidates), self.limits.candidates)
        self.encode(prefix)
        if (size := len(candidates) * len(prefix) + sum(map(len, candidates))) > self.limits.score_characters:
            raise UserError(
                f"{len(candidates)} candidates after a prefix of {len(prefix)} characters are {size} characters to be "
                f"encoded: this server takes at most {self.limits.score_characters}, so send fewer or a shorter prefix"
            )

    @property
    def candidates(self) -> int:
        """Candidates of resampling where the request does not say how many."""
        return min(_CANDIDATES, self.limits.candidates)

    def request(
        self,
        prefix: str | Sequence[int],
        *,
        model: ResidualModel | None = None,
        sampler: Sampler | None = None,
        num: int = 1,
        max_tokens: int | None = None,
        seed: int = 0,
        number: int = 0,
        stop: Sequence[str] = (),
    ) -> GenerationRequest:
        """Make a request within the limits; what is not given is as the model was trained."""
        tokens, limits, model = self.encode(prefix), self.limits, model or self.model
        sampler = sampler or (Resampling(candidates=self.candidates) if model.has_energy else Plain())
        most = self.length if max_tokens is None else max_tokens
        _check("n", num, limits.texts)
        _check("max_tokens", most, max(limits.tokens, self.length))
        check_limits(sampler, limits)
        self.check_draws(sampler, num, most)
        Rng(seed)  # says what is wrong with it
        space = model.space_of(None if model.space is not None else most)
        if most <= space.length:  # of a text of several chunks each reads what fits
            check_fits(started(Sequences.from_lists([tokens]), model.base.eos), space.length, model.base.max_length)
        writing = Writing(
            sampler=sampler, num=num, chunks=-(-most // space.length), max_context=model.max_context, max_tokens=most,
            stop=tuple(stop), is_shortened=model.text_length is not None,
        )  # fmt: skip
        text = prefix if isinstance(prefix, str) else self.tokenizer.decode(tokens)
        return GenerationRequest(
            model=model, prefix=text, context=tuple(tokens), space=space, writing=writing, seed=seed, number=number
        )


def _one_call(work: Callable[[Progress], T]) -> Generator[Call, T, T]:
    return (yield Call(work))


def check_limits(settings: Any, limits: Limits) -> None:
    """Refuse counts in a sampler's settings beyond the limit on candidates, or its own default where that is higher."""
    for field in fields(settings):
        value, default = getattr(settings, field.name), field.default
        if is_dataclass(value) and not isinstance(value, Truncation):
            check_limits(value, limits)
        elif isinstance(value, int) and not isinstance(value, bool) and value != default:
            _check(field.name, value, limits.rows if field.name == "batch_size" else limits.candidates)


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise UserError(f"{name} is {value}: this server takes 1 to {most}")
