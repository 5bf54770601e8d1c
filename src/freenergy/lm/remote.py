"""A language model behind an HTTP endpoint, with nothing but its log-probabilities.

    x_t ~ q(· | c, x_<t) on the server,   log_base = Σ_t log P(x_t | c, x_<t),   log_proposal = Σ_t log q(x_t | c, x_<t)

Any server that speaks ``/v1/completions`` with token ids as prompts and log-probabilities of the raw logits will do:
vLLM, llama.cpp's ``llama-server``. ``log_proposal`` is exact or refused; see ``remote_scoring``. Each candidate is a
request with a seed of its own, ``rng.child("remote", b, n, t).integer()`` cut to 31 bits, whatever the batch around it;
whether equal seeds give equal text is up to the server.

A server stops at EOS; where the space continues, so does the next request. ``ignore_eos`` is never sent: to vLLM it
means "continue after EOS", to llama.cpp "never draw EOS", which is another law.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, final

import httpx
import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.lm.completions import Answer, Completions, CompletionStep
from freenergy.lm.remote_scoring import ROUNDING, Scoring, check_knowable, log_proposal, tail
from freenergy.lm.stepping import check_fits, started

_ENOUGH = 10  # steps: that many lists in a row do not sum to one by chance

API_KEY = "FREENERGY_API_KEY"
Job = TypeVar("Job")
Result = TypeVar("Result")


class _Draw(NamedTuple):
    """One candidate; ``tail`` is the largest probability that any of its lists left out."""

    tokens: list[int]
    log_base: float
    log_proposal: float
    tail: float


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RemoteLM:
    """P_LM(x | c) of a model behind ``url``; ``vocab_size`` and ``eos`` are those of its tokenizer.

    ``most_log_probs`` is the longest list of likeliest tokens that the server gives (vLLM: ``--max-logprobs``, 20
    by default), ``stops`` are tokens other than EOS at which it stops (end-of-turn tokens), ``batch`` counts prompts
    in a scoring request and ``parallel`` requests at a time. The API key travels in a header and is never shown.
    """

    kind: ClassVar[str] = "remote"
    record_keys: ClassVar[tuple[str, ...]] = ("settings",)
    draws_here: ClassVar[bool] = False
    url: str
    model: str = ""
    vocab_size: int
    eos: int
    max_length: int | None = None
    api_key: str | None = None
    timeout_seconds: float = 60.0
    batch: int = 16
    parallel: int = 8
    most_log_probs: int = 20
    stops: tuple[int, ...] = ()
    attempts: int = 5
    server: Completions = field(init=False)
    scoring: Scoring = field(init=False)

    def __post_init__(self) -> None:
        shared = ("url", "model", "api_key", "timeout_seconds", "attempts")
        server = Completions(**{name: getattr(self, name) for name in shared})
        object.__setattr__(self, "server", server)
        object.__setattr__(self, "scoring", Scoring(server=server, vocab_size=self.vocab_size, eos=self.eos))
        if not 0 <= self.eos < self.vocab_size:
            raise UserError(f"EOS is {self.eos} in a vocabulary of {self.vocab_size}: give the tokenizer's own numbers")
        check_range(self, "batch", "parallel", "most_log_probs", "attempts", "timeout_seconds", above=0)

    def __repr__(self) -> str:
        return f"RemoteLM({self.server.shown!r}, model={self.model!r}, vocab_size={self.vocab_size}, eos={self.eos})"

    def write(self, folder: Path) -> dict[str, Any]:
        """Return the address and the limits of the server; the key is not in them."""
        names = ("url", "model", "max_length", "most_log_probs", "stops", "timeout_seconds")
        return {"settings": {name: getattr(self, name) for name in names}}

    @classmethod
    def read(cls, folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> "RemoteLM":
        """Reach the server again; the key comes from the environment."""
        settings = {**record["settings"], "stops": tuple(record["settings"]["stops"])}
        key = os.environ.get(API_KEY)
        return cls(vocab_size=tokenizer.vocab_size, eos=tokenizer.eos, api_key=key, **settings)

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P_LM(x | c)."""
        contexts = started(x.contexts, self.eos)
        check_fits(contexts, int(x.lengths.max()) if x.lengths.numel() else 0, self.max_length)
        pairs = [(c, y) for c, ys in zip(contexts.lists(), x.lists(), strict=True) for y in ys]
        self.scoring.check_ids(token for c, y in pairs for token in (*c, *y))
        with self.server.client() as client:
            way, first = self.scoring.find_way(client, pairs[:1]) if pairs else (self.scoring.echoed, [])
            size = 1 if way == self.scoring.forced else self.batch
            rest = self._each(partial(way, client), [pairs[i : i + size] for i in range(1, len(pairs), size)])
        sums = [value for chunk in (first, *rest) for value in chunk]
        return torch.tensor(sums, dtype=torch.float64, device=x.tokens.device).view(x.shape)

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """Compute log P_LM(v | c) of every token v; the server must return the log-probs of its whole vocabulary."""
        rows = started(contexts, self.eos).lists()
        self.scoring.check_ids(token for row in rows for token in row)
        with self.server.client() as client:
            lists = self._each(partial(self.scoring.whole_list, client), rows)
        return torch.tensor(lists, dtype=torch.float64, device=contexts.tokens.device).view(len(rows), self.vocab_size)

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draw ``num`` independent continuations of each context, in ``space``."""
        self._check_request(num, space, truncation)
        rows = started(contexts, self.eos)
        check_fits(rows, space.length, self.max_length)
        self.scoring.check_ids(token for row in rows.lists() for token in row)
        first_b, first_n = rng.origin
        jobs = [
            (row, rng.child("remote", first_b + b, first_n + n))
            for b, row in enumerate(rows.lists())
            for n in range(num)
        ]
        with self.server.client() as client:
            drawn = self._each(partial(self._draw, client, space, truncation), jobs)
        B, device = len(contexts), contexts.tokens.device
        self._check_raw(drawn, truncation)
        tokens = torch.zeros(B, num, space.length, dtype=torch.long, device=device)
        for i, draw in enumerate(drawn):
            tokens[i // num, i % num, : len(draw.tokens)] = torch.tensor(draw.tokens, device=device)
        lengths = torch.tensor([len(draw.tokens) for draw in drawn], device=device).view(B, num)
        both = torch.tensor([[d.log_base, d.log_proposal] for d in drawn], dtype=torch.float64, device=device)
        return Draws(Continuations(contexts, tokens, lengths), *both.view(B, num, 2).unbind(-1))

    def _draw(
        self, client: httpx.Client, space: SequenceSpace, truncation: Truncation, job: tuple[list[int], Rng]
    ) -> "_Draw":
        """Draw one candidate, in as many requests as the server needs."""
        context, rng = job
        size = 1 if truncation.is_identity else min(truncation.top_k or self.most_log_probs, self.vocab_size)
        kept = min(truncation.top_k or self.vocab_size, self.vocab_size)
        knobs = {"temperature": truncation.temperature, "top_p": truncation.top_p or 1.0, "top_k": kept}
        tokens: list[int] = []
        steps: list[CompletionStep] = []
        while len(tokens) < space.length and (not tokens or tokens[-1] != space.eos):
            left, seed = space.length - len(tokens), rng.child(len(tokens)).integer() % 2**31
            [answer] = self.server.ask(client, [context + tokens], max_tokens=left, seed=seed, logprobs=size, **knobs)
            for token, step in self._drawn_steps(answer, left):
                tokens.append(token)
                steps.append(step)
                if token == space.eos:
                    break
        base = [self.scoring.value(step, token) for step, token in zip(steps, tokens, strict=True)]
        if truncation.is_identity:
            return _Draw(tokens, math.fsum(base), math.fsum(base), tail=1.0)
        lists = list(zip(steps, base, strict=True))
        proposal = [log_proposal(step.top, log_p, truncation, size, self.server.shown) for step, log_p in lists]
        return _Draw(tokens, math.fsum(base), math.fsum(proposal), max(tail(step.top, size) for step in steps))

    def _drawn_steps(self, answer: Answer, left: int) -> list[tuple[int, CompletionStep]]:
        """Return the tokens of an answer that reports all it drew: as many as requested, or up to one that ends it."""
        if not answer.steps:
            raise self.scoring.no_log_probs()
        steps = [(step.token, step) for step in answer.steps if step.token is not None]
        if len(steps) < len(answer.steps):
            raise UserError(
                f"the server at {self.server.shown} spells tokens as text and gives no ids: use vLLM or llama-server"
            )
        self.scoring.check_ids(token for token, _ in steps)
        drawn = left if answer.finish_reason == "length" else answer.num_drawn
        if len(steps) > left or drawn not in (None, len(steps)):
            raise UserError(
                f"{drawn or left} tokens were drawn and the server at {self.server.shown} gave log-probabilities of "
                f"{len(steps)}: llama.cpp leaves out tokens that end inside a character (vLLM does not), and a full "
                "context window cuts a text short (set max_length)"
            )
        last = steps[-1][0]
        if len(steps) < left and last not in (self.eos, *self.stops, answer.stop_reason):
            raise UserError(
                f"the server at {self.server.shown} stopped after token {last}, which is not EOS ({self.eos}): name it "
                "in stops if the model ends there, or use a server that lists the ending token with its log-probability"
            )
        return steps

    def _check_request(self, num: int, space: SequenceSpace, truncation: Truncation) -> None:
        if num < 1:
            raise UserError(f"{num} continuations were asked for: ask for at least one")
        if space.vocab_size != self.vocab_size:
            raise UserError(
                f"the space has {space.vocab_size} tokens and the model at {self.server.shown} {self.vocab_size}: give "
                "both the same tokenizer"
            )
        check_knowable(truncation, vocab_size=self.vocab_size, most_log_probs=self.most_log_probs)

    def _check_raw(self, drawn: Sequence["_Draw"], truncation: Truncation) -> None:
        """Refuse lists that always sum to one: they are of the truncated law, which does not give log P_LM."""
        steps, size = sum(len(draw.tokens) for draw in drawn), truncation.top_k or self.most_log_probs
        if steps >= _ENOUGH and size < self.vocab_size and max(draw.tail for draw in drawn) < ROUNDING:
            raise UserError(
                f"the lists of the server at {self.server.shown} always sum to one, so its log-probabilities are not "
                "of the raw logits: start vLLM with --logprobs-mode raw_logprobs"
            )

    def _each(self, work: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        """Do the jobs several at a time; the first trouble ends them all."""
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(work, jobs))
