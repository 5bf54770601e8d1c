"""What a server says of P and of the proposal q.

    log P(x | c) = Σ_t log P(x_t | c, x_<t),        log q(x) = log P(x) / T − log Σ_{v kept} P(v)^{1/T}

A given text is scored in three ways, all exact. *Echo*: the server lists the log-probabilities of its prompt c x, many
prompts per request (vLLM). *Forced*: each token is drawn under a bias of its logit that leaves no choice, and its
log-probability by the raw logits is read, one request per token (llama.cpp). *Whole list*: those of the vocabulary.

The kept tokens are the k likeliest, or the nucleus, so a list that holds them all gives q exactly; anything else is
refused, such as temperature with a nucleus, which servers apply in different orders.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import httpx
import torch

from freenergy.core.errors import UserError
from freenergy.core.truncation import Truncation
from freenergy.lm.completions import Answer, Completions, CompletionStep, Refused

Pair = tuple[list[int], list[int]]  # a context and a continuation
ROUNDING = 1e-5  # of a server's sums in float32
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


def check_knowable(truncation: Truncation, *, vocab_size: int, most_log_probs: int) -> None:
    """Refuse a truncation whose probabilities no list of ``most_log_probs`` tokens can give."""
    tempered = truncation.temperature != 1
    if tempered and truncation.top_p not in (None, 1.0):
        raise UserError(
            f"temperature {truncation.temperature} with top_p {truncation.top_p} cannot be drawn from a server with "
            "exact probabilities, because servers apply them in different orders: leave one of them out"
        )
    if tempered and truncation.top_k is None and most_log_probs < vocab_size:
        raise UserError(
            f"temperature {truncation.temperature} alone needs the log-probabilities of all {vocab_size} tokens at "
            f"each step and the server gives {most_log_probs}: set top_k as well"
        )


def log_proposal(top: Mapping[int, float], drawn: float, truncation: Truncation, size: int, server: str) -> float:
    """Compute log q of a token with log-probability ``drawn``, from the ``size`` likeliest tokens."""
    ranked = sorted(top.values(), reverse=True)[:size]  # a server may add the drawn token to its list
    if len(ranked) < size:
        raise UserError(
            f"{size} log-probabilities per token were requested and the server at {server} gave {len(ranked)}: start "
            f"it so that it gives more (vLLM: --max-logprobs {size}), or lower top_k"
        )
    num = _num_kept(ranked, drawn, truncation, server)
    log_q = torch.tensor([drawn, *ranked[:num]], dtype=torch.float64) / truncation.temperature
    return float(log_q[0] - log_q[1:].logsumexp(0))


def tail(top: Mapping[int, float], size: int) -> float:
    """Return the probability outside the ``size`` likeliest tokens."""
    return 1 - math.fsum(math.exp(value) for value in sorted(top.values(), reverse=True)[:size])


def _num_kept(ranked: list[float], drawn: float, truncation: Truncation, server: str) -> int:
    """Return how many of the likeliest tokens the truncation keeps; the drawn one must be among them."""
    rank = sum(value > drawn + ROUNDING for value in ranked)
    num, top_p = len(ranked), truncation.top_p or 1.0
    if top_p < 1:
        p = torch.tensor(ranked, dtype=torch.float64).exp()
        share = p / p.sum() if truncation.top_k is not None else p  # the nucleus of the k likeliest, or of all
        before = share.cumsum(0) - share
        if truncation.top_k is None and float(share.sum()) < top_p:
            raise UserError(
                f"the {num} likeliest tokens hold {float(share.sum()):.3f} of the probability, less than top_p = "
                f"{top_p}: raise most_log_probs (and vLLM's --max-logprobs), lower top_p, or set top_k"
            )
        num = int((before < top_p).sum())
        if num <= rank < len(ranked) and float(before[rank]) < top_p + ROUNDING:
            num = rank + 1  # the server's sum fell on the other side of top_p by rounding
    if rank >= num:
        raise UserError(
            f"the server at {server} drew a token that {truncation} leaves out: it ignores top_k or top_p, or its "
            "log-probabilities are not of the raw logits (vLLM: --logprobs-mode raw_logprobs)"
        )
    return num
