"""Streams a request to the playground: candidates as they arrive, what was chosen, and how reliable it is.

    drawn: part, context, candidates   …   added: text   …   written: text, steps, word, notes   or   error: message

A text is written in parts of as many tokens as the energy reads, each chosen among candidates of its own.
"""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.scored import Scored
from freenergy.lm.sample_only import has_log_prob
from freenergy.partition import log_partition
from freenergy.partition.estimate import LARGE_SHARE
from freenergy.samplers.requests import DrawRequest
from freenergy.samplers.sampled import Sampled
from freenergy.text.texts import Texts, diagnosis, evidence_lines, finite
from freenergy.web.entries import Steps
from freenergy.web.model_server import Added, Answers, Drawn, GenerationRequest, ModelServer, TooLong

_PART, _PARTS = 16, 16  # minimum candidates per event, maximum number of events
EVENNESS = ("healthy", "thin", "one candidate decides")  # from good to bad


def watched(server: ModelServer, request: GenerationRequest) -> Answers:
    """Request draws in parts small enough to show progress; the text is the same."""
    most = max(_PART, -(-getattr(request.writing.sampler, "candidates", request.writing.num) // _PARTS))
    server.turns.check_room(1)
    return server.turns.ask(in_parts(request.steps(), most))


def in_parts(steps: Steps, most: int) -> Steps:
    """Take the same steps, which request at most ``most`` candidates at once."""
    with closing(steps):
        try:
            step = next(steps)
            while True:
                small = replace(step, num=min(step.num, most)) if isinstance(step, DrawRequest) else step
                step = steps.send((yield small))
        except StopIteration:
            return


async def lines(server: ModelServer, answers: Answers) -> AsyncIterator[str]:
    """Yield the events of a request as JSON, one per line; an error is the last of them."""
    tokens: list[int] = []
    async with aclosing(answers):
        try:
            async for event in answers:
                if isinstance(event, Drawn):
                    yield _line(drawn(server, event))
                elif isinstance(event, Added):
                    tokens += event.tokens if server.model.has_energy or event.text == 0 else ()
                    yield _line({"event": "added", "text": server.tokenizer.decode(tokens)})
                else:
                    yield _line(written(event.texts))
        except (UserError, TooLong) as error:
            yield _line({"event": "error", "message": str(error)})


def _line(found: dict[str, Any]) -> str:
    return json.dumps(found, allow_nan=False) + "\n"


def drawn(server: ModelServer, event: Drawn) -> dict[str, Any]:
    """Return the event of new candidates; ``context`` is what they continue."""
    found = event.candidates
    columns = (found.log_base, found.energy, found.log_weight)
    rows = zip(found.x.lists()[0], *(column[0].tolist() for column in columns), strict=True)
    is_known = has_log_prob(server.model.base)
    candidates = [
        {
            "number": event.start + i,
            "text": server.tokenizer.decode(x),
            "tokens": x,
            "log_base": finite(log_base) if is_known else None,
            "energy": finite(energy),
            "log_weight": finite(log_weight),
        }
        for i, (x, log_base, energy, log_weight) in enumerate(rows)
    ]
    context = found.x.contexts.lists()[0]
    return {"event": "drawn", "part": event.chunk, "context": context, "candidates": candidates}


def written(texts: Texts) -> dict[str, Any]:
    """Return what was chosen, and how reliable it is: of several chunks the worst verdict."""
    steps = [_step(step) for step in texts.steps]
    words = [step["word"] for step in steps if step["word"] is not None]
    return {
        "event": "written",
        "text": texts[0].text,
        "steps": steps,
        "word": max(words, key=EVENNESS.index, default=None),
        "evidence": evidence_lines(texts.steps),
        "notes": texts.all_notes(),
    }


def _step(step: Sampled) -> dict[str, Any]:
    chosen = None if step.chosen is None else int(step.chosen[0])
    word = None if step.candidates is None else evenness(step.candidates)
    return {**diagnosis(step), "chosen": chosen, "word": word}


def evenness(candidates: Scored) -> str:
    """Return the verdict on the weights of one context's candidates, as a word."""
    if float(candidates.share.max()) > LARGE_SHARE:
        return EVENNESS[2]
    return EVENNESS[1] if log_partition(candidates.log_weight).verdicts()[0] else EVENNESS[0]
