"""A residual model that answers many at a time: what may be asked, and the way to ask it."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar, final

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import ANCESTRAL, Truncation
from freenergy.core.scored import Law
from freenergy.core.sequences import Sequences
from freenergy.lm.stepping import check_fits, started
from freenergy.recipes.writing import has_energy
from freenergy.text.model import ResidualModel
from freenergy.web.jobs import Added, Drawn, Event, Finished, Question, Tell, answer
from freenergy.web.settings import Limits
from freenergy.web.turns import Answers, Busy, Counts, Steps, TooLong, Turns

__all__ = ["Added", "Answers", "Busy", "Drawn", "Engine", "Event", "Finished", "Question", "TooLong"]

T = TypeVar("T")
_LENGTH, _CANDIDATES = 40, 256  # where nothing says how many


@final
class Engine:
    """``start`` and ``close`` its thread; ask it inside an event loop."""

    def __init__(self, joint: ResidualModel, limits: Limits | None = None) -> None:
        if joint.tokenizer is None:
            raise UserError("this residual model has no tokenizer: pass one to ResidualModel before serving it")
        self.joint, self.tokenizer, self.limits = joint, joint.tokenizer, limits or Limits()
        self.turns, self.begun = Turns(joint, self.limits), time.monotonic()

    def start(self) -> None:
        """Begin to answer."""
        self.turns.start()

    def close(self) -> None:
        """End; who still waits is told."""
        self.turns.close()

    @property
    def counts(self) -> Counts:
        """What has been done so far."""
        return self.turns.counts

    @property
    def is_alive(self) -> bool:
        """Whether its thread is there to answer."""
        return self.turns.is_alive

    @property
    def queue(self) -> int:
        """Jobs that wait or are worked on."""
        return len(self.turns)

    @property
    def length(self) -> int:
        """Tokens of a text where nobody says how many: as the energy was trained."""
        return _LENGTH if self.joint.space is None else self.joint.space.length

    @property
    def has_energy(self) -> bool:
        """Whether the model is more than its base."""
        return has_energy(self.joint)

    def write(self, question: Question) -> Answers:
        """Stand in the row, and listen; ``Busy`` where it is full."""
        return self.write_all([question])[0]

    def write_all(self, questions: Sequence[Question]) -> list[Answers]:
        """Several questions, or none of them where they do not all fit."""
        self.turns.check_room(len(questions))
        return [self.turns.ask(partial(answer, self.joint, question)) for question in questions]

    async def call(self, work: Callable[[], T], *, is_new: bool = True) -> T:
        """Do something else on the model thread, in its turn; what belongs to a question let in before is not new."""

        def steps(tell: Tell) -> Steps:
            return (yield work)

        if is_new:
            self.turns.check_room(1)
        answers = self.turns.ask(steps)
        async for _ in answers:
            raise AssertionError("work has no events")
        result: T = answers.job.result
        return result

    def encode(self, prefix: str | Sequence[int]) -> list[int]:
        """A prefix in tokens, which must be of the model's vocabulary and not too many."""
        tokens = self.tokenizer.encode(prefix) if isinstance(prefix, str) else list(prefix)
        V, most = self.joint.base.vocab_size, self.limits.prompt_tokens
        if len(tokens) > most:
            raise UserError(f"the prompt has {len(tokens)} tokens: this server takes at most {most}")
        strange = next((token for token in tokens if not 0 <= token < V), None)
        if strange is not None:
            raise UserError(f"the prompt's token {strange} is not below {V}: encode with the tokenizer of this model")
        return tokens

    def question(
        self,
        prefix: str | Sequence[int],
        *,
        law: Literal["joint", "base"] = "joint",
        num: int = 1,
        candidates: int | None = None,
        max_tokens: int | None = None,
        truncation: Truncation = ANCESTRAL,
        target: Law = "restricted",
        seed: int = 0,
        number: int = 0,
        stop: Sequence[str] = (),
        is_weighed: bool = True,
    ) -> Question:
        """A question within the limits; what is not said is as the model was trained."""
        tokens, limits = self.encode(prefix), self.limits
        made = Question(
            prefix=prefix if isinstance(prefix, str) else self.tokenizer.decode(tokens),
            context=tuple(tokens),
            law=law if self.has_energy else "base",
            num=num,
            candidates=min(_CANDIDATES, limits.candidates) if candidates is None else candidates,
            max_tokens=self.length if max_tokens is None else max_tokens,
            truncation=truncation,
            target=target,
            seed=seed,
            number=number,
            stop=tuple(stop),
            is_weighed=is_weighed,
        )
        _check("n", made.num, limits.texts)
        _check("candidates", made.candidates, limits.candidates)
        _check("max_tokens", made.max_tokens, max(limits.tokens, self.length))
        Rng(seed)  # says what is wrong with it
        self._check_fits(made)
        return made

    def _check_fits(self, question: Question) -> None:
        """Refuse now what the base would refuse later; of a text of several chunks each reads what fits."""
        base, space = self.joint.base, self.joint.space
        reads = question.max_tokens if question.law == "base" or space is None else space.length
        if question.max_tokens <= reads:
            check_fits(started(Sequences.from_lists([question.context]), base.eos), reads, base.max_length)


def _check(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise UserError(f"{name} is {value}: this server takes 1 to {most}")
