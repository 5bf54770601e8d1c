"""/v1/completions: each prompt is one generation, and the texts become choices.

    log-probabilities are log P_LM(x_t | c, x_<t) of the base, raw: the energy weighs whole texts, not tokens

What the model knows of a text (its energy, its share of the weight) and of the choice (effective sample size,
log Ẑ, the distance from the law that was aimed at) stands in an extra field, ``freenergy``.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.sequences import Continuations
from freenergy.lm.sample_only import has_log_prob
from freenergy.lm.token_log_probs import token_log_probs
from freenergy.samplers.resampling import Resampling
from freenergy.text.texts import Text, Texts
from freenergy.web.dialect import CompletionRequest, Refusal, evidence, is_base_name
from freenergy.web.model_server import Added, Answers, Finished, GenerationRequest, ModelServer
from freenergy.web.settings import ServerSettings
from freenergy.web.spelling import Growing, Place, Spelling, log_probs, num_kept, places

_MOST_NUMBERS = 2_000_000  # log-probabilities in an answer
_PROMPTS_AT_ONCE = 16  # whose tokens are scored in one turn


@final
@dataclass(frozen=True, slots=True)
class Completion:
    """One request that has been checked, on its way to an answer."""

    server: ModelServer
    spelling: Spelling
    body: CompletionRequest
    requests: list[GenerationRequest]  # one a prompt; none where no token is to be written
    prompts: list[list[int]]
    seed: int
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls, server: ModelServer, settings: ServerSettings, spelling: Spelling, body: CompletionRequest
    ) -> "Completion":
        """Check a request, so far as that can be done without the model. Encodes: not for the event loop's thread."""
        body.check()
        is_base = is_base_name(body.model, settings)
        if (body.n or 1) > server.limits.texts:
            raise Refusal(f"n is {body.n}: this server takes 1 to {server.limits.texts}", param="n")
        given = body.prompts()
        most = min(settings.max_prompts, server.limits.queue)
        if len(given) > most:
            raise Refusal(f"{len(given)} prompts: this server takes {most} a request", param="prompt")
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        prompts = [server.encode(prompt) for prompt in given]
        requests = [] if body.max_tokens == 0 else _requests(server, body, is_base, given, seed)
        made = cls(server, spelling, body, requests, prompts, seed)
        made._check_numbers()
        return made

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        answers = self.server.write_all(self.requests)
        try:
            results = [await _texts(answer) for answer in answers]
        finally:
            _leave(answers)
        texts: list[Sequence[Text]] = [found.texts for found in results] or [[_EMPTY] * self._n for _ in self.prompts]
        told = await self._places([[text.tokens for text in row] for row in texts])
        return await asyncio.to_thread(self._answer, results, texts, told)  # up to millions of numbers

    def _answer(
        self, results: Sequence[Texts], texts: Sequence[Sequence[Text]], told: Sequence[Sequence[Sequence[Place]]]
    ) -> dict[str, Any]:
        choices, drawn = [], 0
        for i, row in enumerate(texts):
            for r, text in enumerate(row):
                growing = Growing(self.spelling.tokenizer, self.body.stops())
                shown = growing.add(text.tokens, is_last=True)
                kept = num_kept(self.spelling.offsets(text.tokens), growing)
                piece = self._piece(i, r, shown, text.tokens[:kept], told[i][r], is_first=True)
                drawn += kept
                choices.append(piece | self._end(text, growing, kept))
        return self._frame(choices) | {"usage": self._usage(drawn), "freenergy": self._summary(results)}

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer in pieces, each as soon as its text is certain; the last says how the texts came about."""
        if not self.requests:
            answer = await self.whole()
            extra, usage = answer.pop("freenergy"), answer.pop("usage")
            for choice in answer["choices"]:
                is_last = choice is answer["choices"][-1]
                yield self._frame([choice]) | ({"freenergy": extra} if is_last else {})
        else:
            results: list[Texts] = []
            sizes: list[int] = []
            answers = self.server.write_all(self.requests)
            try:
                for i, answer_i in enumerate(answers):
                    async for frame in self._prompt(i, answer_i, results, sizes):
                        yield frame
            finally:
                _leave(answers)
            usage = self._usage(sum(sizes))
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._frame([]) | {"usage": usage}

    async def _prompt(
        self, i: int, answers: Answers, results: list[Texts], sizes: list[int]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the pieces of one prompt's texts; its results and the sizes of its texts are added to the lists."""
        growing = [Growing(self.spelling.tokenizer, self.body.stops()) for _ in range(self._n)]
        own = [0] * self._n
        async for event in answers:
            if isinstance(event, Added) and growing[event.text].stopped_by is None:
                piece, kept = await self._next_piece(i, event, growing[event.text])
                own[event.text] += kept
                yield self._frame([piece])
            elif isinstance(event, Finished):
                results.append(event.texts)
                sizes += own
                for r, text in enumerate(event.texts.texts):
                    rest = {"index": i * self._n + r, "text": growing[r].add((), is_last=True), "logprobs": None}
                    is_last = i + 1 == len(self.prompts) and r + 1 == self._n
                    extra = {"freenergy": self._summary(results)} if is_last else {}
                    yield self._frame([rest | self._end(text, growing[r], own[r])]) | extra

    @property
    def _n(self) -> int:
        return self.body.n or 1

    def _check_numbers(self) -> None:
        k, wanted = self.body.logprobs, (self.requests[0].writing.max_tokens or 0) if self.requests else 0
        if k is None:
            return
        V = self.server.model.base.vocab_size
        if k > V:
            raise Refusal(f"logprobs is {k}: this model has {V} tokens", param="logprobs")
        longest, window = max(map(len, self.prompts)), self.server.model.base.max_length
        if window is not None and longest + wanted > window:
            words = f"logprobs of more than the {window} tokens that the model reads at once: ask for fewer tokens"
            raise Refusal(words, param="logprobs")
        wanted += longest if self.body.echo else 0
        if wanted * self._n * len(self.prompts) * (k + 1) > _MOST_NUMBERS:
            words = f"more than {_MOST_NUMBERS:,} log-probabilities: ask for fewer texts, tokens or logprobs"
            raise Refusal(words, param="logprobs")

    async def _next_piece(self, i: int, event: Added, growing: Growing) -> tuple[dict[str, Any], int]:
        """Return what is new of a text, and the number of its tokens."""
        before = list(growing.tokens)
        shown = growing.add(event.tokens, is_last=False)
        offsets = self.spelling.offsets(growing.tokens)
        kept = event.tokens[: max(0, num_kept(offsets, growing) - len(before))]
        told: list[Place] = []
        if self.body.logprobs is not None:
            whole = not before and self.body.echo
            prompt = self.prompts[i]
            work = partial(self._forced, [prompt if whole else [*prompt, *before]], [[event.tokens]], bool(whole))
            told = (await self.server.call(work, is_new=False))[0][0]
        piece = self._piece(i, event.text, shown, kept, told, is_first=not before, before=before)
        return piece | {"finish_reason": None}, len(kept)

    async def _places(self, texts: Sequence[Sequence[Sequence[int]]]) -> list[list[list[Place]]]:
        """Return log-probabilities of the tokens of each text of each prompt, and with echo of the prompts."""
        found: list[list[list[Place]]] = []
        if self.body.logprobs is None or not (self.body.echo or self.requests):
            return [[[] for _ in row] for row in texts]
        for i in range(0, len(texts), _PROMPTS_AT_ONCE):
            some = slice(i, i + _PROMPTS_AT_ONCE)
            work = partial(self._forced, self.prompts[some], texts[some], bool(self.body.echo))
            # a request that only scores stands in the row like any other; one that has written was let in before
            found += await self.server.call(work, is_new=not self.requests)
        return found

    def _forced(
        self, prompts: Sequence[list[int]], texts: Sequence[Sequence[Sequence[int]]], echo: bool, progress: Progress
    ) -> list[list[list[Place]]]:
        """Score the tokens of texts, with ``echo`` after those of their prompts; runs on the model thread."""
        heads = [prompt[:1] if echo else prompt for prompt in prompts]
        rows = [
            [[*(prompt[1:] if echo else ()), *text] for text in some]
            for prompt, some in zip(prompts, texts, strict=True)
        ]
        x = Continuations.from_lists(heads, rows)
        found = token_log_probs(self.server.model.base, x, self.body.logprobs or 0, progress=progress)
        first = [[Place(head[0], None, ())] if echo and head else [] for head in heads]
        return [[first[b] + places(tokens, found, b, n) for n, tokens in enumerate(row)] for b, row in enumerate(rows)]

    def _piece(
        self,
        i: int,
        r: int,
        shown: str,
        kept: Sequence[int],
        told: Sequence[Place],
        *,
        is_first: bool,
        before: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Return text r of prompt i, or the next piece of it."""
        echoed = self.prompts[i] if is_first and self.body.echo else []
        prefix = self._shown_prompt(i) if is_first and self.body.echo else ""
        piece: dict[str, Any] = {"index": i * self._n + r, "text": prefix + shown, "logprobs": None}
        if self.body.logprobs is not None:
            head = self._shown_prompt(i) if self.body.echo else ""
            offsets = [*self.spelling.offsets(echoed)] + [
                len(head) + place for place in self.spelling.offsets([*before, *kept])[len(before) :]
            ]
            ids = bool(self.body.return_tokens_as_token_ids)
            piece["logprobs"] = log_probs(self.spelling, told[: len(offsets)], offsets, as_ids=ids)
        if self.body.return_token_ids:
            piece["token_ids"] = list(kept)
            piece["prompt_token_ids"] = list(self.prompts[i]) if is_first else None
        return piece

    def _shown_prompt(self, i: int) -> str:
        given = self.body.prompts()[i]
        return given if isinstance(given, str) else self.spelling.tokenizer.decode(given)

    def _end(self, text: Text, growing: Growing, kept: int) -> dict[str, Any]:
        """Return why a text ended, and what the model knows of it."""
        is_ended = text.has_ended or growing.stopped_by is not None
        numbers = {key: value for key, value in text.to_json().items() if key not in ("text", "tokens", "has_ended")}
        if self.requests and not self.requests[0].model.has_energy:
            numbers |= {"energy": None, "log_score": None}
        if not has_log_prob(self.server.model.base):
            numbers |= {"log_base": None}
        extra = {} if text is _EMPTY else {"freenergy": numbers | {"tokens": kept}}
        return {"finish_reason": "stop" if is_ended else "length", "stop_reason": growing.stopped_by, **extra}

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.body.model}
        return head | {"choices": choices}

    def _usage(self, drawn: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def _summary(self, results: Sequence[Texts]) -> dict[str, Any]:
        """Return how the texts came about: the seed, the sampler, and for each prompt the evidence."""
        how: dict[str, Any] = {"seed": self.seed, "sampler": None, "law": None}
        if results:
            step, sampler = results[0].steps[0], self.requests[0].writing.sampler
            how |= {"sampler": step.method, "law": step.law}
            how |= {"candidates": sampler.candidates} if isinstance(sampler, Resampling) else {}
        return how | {"prompts": [evidence(found) for found in results]}


_EMPTY = Text(text="", tokens=(), log_base=0.0, energy=0.0, drawn=0)


def _requests(
    server: ModelServer, body: CompletionRequest, is_base: bool, prompts: Sequence[str | list[int]], seed: int
) -> list[GenerationRequest]:
    model = server.base if is_base else server.model
    try:
        sampler = body.sampler_of(model, server.candidates)
        num, stop = body.n or 1, body.stops()
        request = partial(
            server.request, model=model, sampler=sampler, num=num, max_tokens=body.max_tokens, seed=seed, stop=stop
        )
        return [request(prompt, number=number) for number, prompt in enumerate(prompts)]
    except UserError as error:
        raise Refusal(str(error)) from None


async def _texts(answers: Answers) -> Texts:
    found = None
    async for event in answers:
        found = event
    assert isinstance(found, Finished), "a request that is answered ends with its texts"
    return found.texts


def _leave(answers: Sequence[Answers]) -> None:
    """Free the places of requests that are not waited for any more."""
    for answer in answers:
        answer.cancel()
