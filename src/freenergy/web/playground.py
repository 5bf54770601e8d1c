"""The playground: one page that asks this server, and the few answers that only it needs.

    GET  /                     the page; its scripts and styles come from a fixed table of names
    GET  /playground/about     name, defaults, limits, prefixes to try
    POST /playground/write     candidates as they are drawn, then what was chosen: one JSON object per line
                               drawn: part, context, candidates … added: text … written: text, steps, word, notes
    POST /playground/next      the next token under base and residual model (Table 3 of Deng et al. 2020)
    POST /playground/rising    what each token adds to the energy

The page and its scripts are open to all who reach the server, since they hold nothing; the rest asks for the token. A
text is written in parts of as many tokens as the energy reads, each chosen among candidates of its own.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from freenergy.core.errors import UserError
from freenergy.core.files import read_json
from freenergy.core.scored import Law, Scored
from freenergy.corpus.tokenize_pair import join
from freenergy.energies.prefix_energies import rising
from freenergy.lm.sample_only import has_log_prob
from freenergy.partition import log_partition
from freenergy.partition.estimate import LARGE_SHARE
from freenergy.recipes.stages.evaluation import SUMMARY
from freenergy.report import look
from freenergy.samplers.registry import about_samplers, choose_sampler
from freenergy.samplers.sampled import DrawRequest, Sampled
from freenergy.text.texts import Texts, diagnosis, evidence_lines, finite
from freenergy.web.dialect import Body, Setting, TokenId
from freenergy.web.entries import Steps
from freenergy.web.model_server import Added, Answers, Drawn, GenerationRequest, ModelServer, NotServed
from freenergy.web.security import json_only, unless_gone
from freenergy.web.settings import ServerSettings

_HERE = Path(__file__).with_name("playground")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_EXAMPLES = (
    "The river",
    "The song received positive reviews from critics , who praised",
    "In the winter of that year",
    "She opened the door and",
)
_MOST_EXAMPLES = 8
_CANDIDATES = 64
_PART, _PARTS = 16, 16  # minimum candidates per event, maximum number of events
EVENNESS = ("healthy", "thin", "one candidate decides")  # from good to bad
_MOST_ROWS, _MOST_COMPLETIONS = 10, 256  # of the next-token table, which is drawn in one go
_LONGEST = 512  # tokens of a text to be coloured: every beginning of it is read
_LARGEST = 2**53 - 1  # the largest whole number that a browser can hold

Seed = Annotated[int, Field(ge=0, le=_LARGEST)]


class WriteRequest(Body):
    """What to write; ``length`` is as the energy was trained unless given."""

    prefix: str = ""
    sampler: str | None = Field(None, max_length=100)
    settings: dict[str, Setting] = Field(default_factory=dict)
    candidates: int | None = Field(None, ge=1)
    length: int | None = Field(None, ge=1)
    top_k: int | None = Field(None, ge=0, description="0 keeps every token.")
    temperature: float | None = Field(None, gt=0, le=100)
    seed: Seed = 0
    law: Law | None = None


class NextRequest(Body):
    """Where to look for the next token."""

    prefix: str = ""
    top_k: int = Field(5, ge=1, le=_MOST_ROWS)
    completions: int = Field(64, ge=2, le=_MOST_COMPLETIONS)
    seed: Seed = 0


class RisingRequest(Body):
    """A continuation: text after a prefix, or tokens after the tokens of a context."""

    prefix: str = ""
    text: str | None = None
    context: list[TokenId] = Field(default_factory=list)
    tokens: list[TokenId] | None = None


def router(server: ModelServer, settings: ServerSettings) -> APIRouter:
    """Return the routes of the playground."""
    found = APIRouter(tags=["playground"])
    files = {path.name: path.read_bytes() for path in sorted(_HERE.iterdir()) if path.suffix in _KINDS}
    files["look.css"] = look().encode()
    for name, content in files.items():
        where = "/" if name == "index.html" else f"/playground/{name}"
        found.get(where, include_in_schema=False)(_file(content, _KINDS[Path(name).suffix]))
    found.include_router(_questions(server, settings))
    return found


def _file(content: bytes, kind: str) -> Callable[[], Response]:
    def file() -> Response:
        return Response(content, media_type=kind)

    return file


def _questions(server: ModelServer, settings: ServerSettings) -> APIRouter:
    """Return the routes that ask the model."""
    found = APIRouter(prefix="/playground", dependencies=[Depends(settings.authorise)])
    is_json = [Depends(json_only)]

    @found.get("/about")
    async def about() -> dict[str, Any]:
        """Return what the page needs to know before anything is asked."""
        return about_model(server, settings)

    @found.post("/write", dependencies=is_json)
    async def write(body: WriteRequest) -> StreamingResponse:
        """Stream lines of JSON: ``drawn`` as candidates come, ``added`` as text does, ``written`` at the end."""
        asked = await asyncio.to_thread(request_of, server, body)
        return StreamingResponse(lines(server, watched(server, asked)), media_type="application/x-ndjson")

    @found.post("/next", dependencies=is_json)
    async def next_token(body: NextRequest, request: Request) -> dict[str, Any]:
        """Return the table of the next token."""
        await asyncio.to_thread(server.request, body.prefix)  # refuses what cannot be asked
        length = server.length if server.model.space is None else None
        work = partial(server.model.next, body.prefix, top_k=body.top_k, completions=body.completions, seed=body.seed)
        found = server.call(lambda progress: work(length=length, progress=progress))
        return (await unless_gone(request, found)).to_json()

    @found.post("/rising", dependencies=is_json)
    async def rises(body: RisingRequest, request: Request) -> dict[str, Any]:
        """Return the energy of every beginning of a text."""
        context, tokens = await asyncio.to_thread(tokens_of, server, body)
        work = partial(rising, server.model.energy, server.tokenizer, context, tokens, server.limits.least_rows)
        return {"pieces": [piece.to_json() for piece in await unless_gone(request, server.call(work))]}

    return found


def request_of(server: ModelServer, body: WriteRequest) -> GenerationRequest:
    """Request one text; where there is no energy to choose by, as many texts as candidates."""
    model, settings = server.model, body.settings
    short: dict[str, Any] = {"law": body.law, "top_k": body.top_k, "temperature": body.temperature}
    if model.has_energy:
        is_default = body.sampler in (None, "resampling") and "candidates" not in settings
        short["candidates"] = body.candidates or (_CANDIDATES if is_default else None)
    given = {key: value or None for key, value in short.items()}
    sampler = choose_sampler(model.has_energy, body.sampler, settings, given)
    num = 1 if model.has_energy else body.candidates or _CANDIDATES
    return server.request(body.prefix, sampler=sampler, num=num, max_tokens=body.length, seed=body.seed)


def about_model(server: ModelServer, settings: ServerSettings) -> dict[str, Any]:
    """Return name, defaults, limits, samplers and examples."""
    limits, space = server.limits, server.model.space
    candidates = limits.candidates if server.model.has_energy else limits.texts
    return {
        "name": settings.name,
        "has_energy": server.model.has_energy,
        "samplers": about_samplers(server.model.has_energy),
        "trained_length": None if space is None else space.length,
        "examples": examples_of(settings.folder),
        "defaults": {
            "candidates": min(_CANDIDATES, candidates),
            "length": server.length,
            "top_k": 0,
            "temperature": 1,
            "seed": 0,
            "law": "restricted",
            "next_rows": 5,
            "completions": 64,
        },
        "limits": {
            "candidates": candidates,
            "length": max(limits.tokens, server.length),
            "top_k": server.model.base.vocab_size,
            "seed": _LARGEST,
            "next_rows": _MOST_ROWS,
            "completions": _MOST_COMPLETIONS,
        },
    }


def examples_of(folder: Path | None) -> list[str]:
    """Return held-out prefixes that the run was measured on, where there are some; else a few of ours."""
    path = None if folder is None else folder / "evaluation" / SUMMARY
    found = read_json(path) if path is not None and path.is_file() else {}
    shown = [*(found.get("examples") or []), *(found.get("samples") or [])]
    prefixes = dict.fromkeys(str(one["prefix"]) for one in shown if one.get("prefix"))
    return list(prefixes)[:_MOST_EXAMPLES] or list(_EXAMPLES)


def tokens_of(server: ModelServer, body: RisingRequest) -> tuple[list[int], list[int]]:
    """Return a context and a continuation that can be coloured."""
    if (body.text is None) == (body.tokens is None):
        raise UserError("give the continuation as text or as tokens, one of the two")
    if body.text is not None:
        server.encode(body.prefix)  # refuses what is too long
        joined = join(server.tokenizer, body.prefix, [body.text])
        context, tokens = joined.context, joined.texts[0].tokens
    else:
        context, tokens = server.encode(body.context), server.encode(body.tokens or [])
    if len(tokens) > _LONGEST:
        raise UserError(f"the continuation has {len(tokens)} tokens: give at most {_LONGEST} to be coloured")
    return context, tokens


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
        except (UserError, NotServed) as error:
            yield _line({"event": "error", "message": str(error)})


def _line(found: dict[str, Any]) -> str:
    return json.dumps(found, allow_nan=False) + "\n"


def drawn(server: ModelServer, event: Drawn) -> dict[str, Any]:
    """Return the event of new candidates; ``context`` is what they continue."""
    found = event.candidates
    names = ("log_base", "energy", "log_weight")
    rows = zip(found.x.lists()[0], *(getattr(found, name)[0].tolist() for name in names), strict=True)
    unknown = {} if has_log_prob(server.model.base) else {"log_base": None}
    candidates = [
        {"number": event.start + i, "text": server.tokenizer.decode(x), "tokens": x}
        | {name: finite(value) for name, value in zip(names, numbers, strict=True)}
        | unknown
        for i, (x, *numbers) in enumerate(rows)
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
