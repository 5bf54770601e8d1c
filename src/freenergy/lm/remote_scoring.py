"""How a server scores a text that it is given.

    log P(x | c) = Σ_t log P(x_t | c, x_<t)

Three ways, all exact. *Echo*: the server lists the log-probabilities of its prompt c x, many prompts a request (vLLM).
*Forced*: each token is drawn under a bias of its logit that leaves no choice, and its log-probability by the raw logits
is read, one request per token (llama.cpp, which refuses echo). *Whole list*: the log-probabilities of the vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import httpx

from freenergy.core.errors import UserError
from freenergy.lm.completions import Answer, Completions, CompletionStep, Refused
from freenergy.lm.remote_proposal import ROUNDING

Pair = tuple[list[int], list[int]]  # a context and a continuation
_FORCE = 100.0  # the largest bias of a logit that the protocol allows


class _NoEchoError(Exception):
    """The server answered without the prompt's log-probabilities."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Log-probabilities of given tokens, by whichever way the server knows."""

    server: Completions
    vocab_size: int
    eos: int

    def find_way(
        self, client: httpx.Client, pairs: Sequence[Pair]
    ) -> tuple[Callable[[httpx.Client, Sequence[Pair]], list[float]], list[float]]:
        """Score the first pairs, and find out on them how this server does it."""
        for max_tokens in (0, 1):  # 0 is what is meant; some servers want to draw at least one token
            way = partial(self.echoed, max_tokens=max_tokens)
            try:
                return way, way(client, pairs)
            except Refused as error:
                if "echo" in error.reason.lower():
                    break
                if max_tokens == 1 or error.status not in (400, 422, 500):
                    raise
            except _NoEchoError:
                continue
        return self.forced, self.forced(client, pairs)

    def echoed(self, client: httpx.Client, pairs: Sequence[Pair], max_tokens: int = 0) -> list[float]:
        """Sum over the continuations, from the log-probabilities of the prompts."""
        prompts = [c + x for c, x in pairs]
        knobs = {"echo": True, "max_tokens": max_tokens, "logprobs": 1, "prompt_logprobs": 1, "top_k": self.vocab_size}
        answers = self.server.ask(client, prompts, **knobs)
        return [
            math.fsum(self.value(step, token) for step, token in self._with_tokens(answer, c + x)[len(c) :])
            for answer, (c, x) in zip(answers, pairs, strict=True)
        ]

    def forced(self, client: httpx.Client, pairs: Sequence[Pair]) -> list[float]:
        """Sum over the continuations, token by token."""
        return [math.fsum(self._forced_token(client, c + x[:t], x[t]) for t in range(len(x))) for c, x in pairs]

    def whole_list(self, client: httpx.Client, prompt: list[int]) -> list[float]:
        """Compute log P(v | prompt) for every token v."""
        V = self.vocab_size
        found: dict[int, float] = {}
        for extra in ({}, {"logit_bias": {str(self.eos): _FORCE}}):  # the second: see _forced_token
            try:
                [answer] = self.server.ask(client, [prompt], max_tokens=1, logprobs=V, top_k=V, **extra)
            except Refused as error:
                raise self._short_list(f"refused ({error.reason})") from error
            if answer.steps:
                found = dict(answer.steps[0].top)
                break
        self.check_ids(found)
        if len(found) < V:
            raise self._short_list(f"gave {len(found)}")
        return [found[token] for token in range(V)]

    def value(self, step: CompletionStep, token: int) -> float:
        """Return a step's log-probability of its token, which must be one."""
        value = step.log_prob if step.log_prob is not None else step.top.get(token)
        if value is None:
            raise self.no_log_probs()
        if not math.isfinite(value) or value > ROUNDING:
            raise UserError(
                f"the server at {self.server.shown} gave {value} as the log-probability of token {token}: it must be "
                "finite and not above 0, so check its sampling settings and log-probability mode"
            )
        return value

    def check_ids(self, tokens: Iterable[int]) -> None:
        """Refuse a token that the vocabulary does not have."""
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"token {token} is not in the vocabulary of {self.vocab_size} of the model at {self.server.shown}: "
                    "give the vocab_size and the token ids of the tokenizer that it was trained with"
                )

    def no_log_probs(self) -> UserError:
        """Say that an answer had no log-probabilities."""
        return UserError(
            f"the server at {self.server.shown} gave no log-probabilities: use one that does (vLLM, llama-server), and "
            "look whether they are switched off"
        )

    def _with_tokens(self, answer: Answer, prompt: list[int]) -> list[tuple[CompletionStep, int]]:
        """Pair the steps with the tokens that were sent, which must be the same tokens."""
        if len(answer.steps) < len(prompt):
            raise _NoEchoError
        pairs = list(zip(answer.steps, prompt, strict=False))
        for place, (step, token) in enumerate(pairs):
            if step.token not in (None, token):
                raise UserError(
                    f"the server at {self.server.shown} read token {step.token} where {token} was sent, place {place}: "
                    "it adds or changes tokens, so start it with the tokenizer that made the ids"
                )
        return pairs

    def _forced_token(self, client: httpx.Client, prompt: list[int], token: int) -> float:
        bias = {str(token): _FORCE}
        [answer] = self.server.ask(client, [prompt], max_tokens=1, logprobs=2, top_k=1, logit_bias=bias)
        if not answer.steps:  # llama.cpp keeps quiet about a token that ends inside a character
            return self.whole_list(client, prompt)[token]
        step = answer.steps[0]
        others = [value for other, value in step.top.items() if other != token]
        if step.token != token or not others or max(others) < -_FORCE / 2:
            raise UserError(
                f"the server at {self.server.shown} neither scores prompts (echo) nor gives the raw log-probability of "
                "a token that logit_bias forces: serve the model with vLLM, or with a recent llama-server"
            )
        return self.value(step, token)

    def _short_list(self, what: str) -> UserError:
        return UserError(
            f"the log-probabilities of all {self.vocab_size} tokens were asked for and the server at "
            f"{self.server.shown} {what}: start vLLM with --max-logprobs {self.vocab_size}"
        )
