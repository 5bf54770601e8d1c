"""The pages of a blind study.

    /#INVITATION → POST /enter → cookie → GET /rate → POST /rate → 303 when the votes are on disk → GET /rate → …

Nothing on a page shows which model wrote what: places are numbered, sides are shuffled, and every comparison is made
by the same template. A page's answers count once, for its own rater, and only with the page's token.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse

from freenergy.apps.study.assigning import End, RefusedError, answer, next_page
from freenergy.apps.study.store import Rater, Store
from freenergy.core.files import fingerprint
from freenergy.report import look, page_templates
from freenergy.web.security import secure

COOKIE: Final = "freenergy_study"
_PAGES = Path(__file__).with_name("study_pages")
_MAX_BYTES = 16_384  # per request: four answers and two tokens
_MOST_FIELDS = 16
_COOKIE_SECONDS = 90 * 24 * 3600
_WRONG, _WITHIN_SECONDS = 10, 60.0  # wrong invitations from one address, or of one secret, before it has to wait
_NAMES = 10_000  # addresses and invitations that are remembered
_FORM = "application/x-www-form-urlencoded"
_ENDS = {
    "finished": ("Thank you!", "There is nothing left for you to compare. Your answers are kept."),
    "waiting": (
        "Nothing to do at the moment",
        "Others are at work on the texts that are left. Come back in an hour: what they leave will be yours.",
    ),
    "not qualified": (
        "Thank you for your time",
        "The first questions asked you to find what a person wrote, which is hard. This study needs raters who find it "
        "more often, so it ends here for you. Thank you for having tried.",
    ),
}
_REFUSALS = {
    "unknown": (403, "These answers do not belong to a page of yours, and were not counted."),
    "expired": (409, "This page was open for too long and went to another rater. Its answers were not counted."),
    "changed": (409, "This page was answered before, and those answers count. The new ones were not counted."),
    "incomplete": (422, "One or more choices are missing, so nothing was counted yet."),
}


@final
class Attempts:
    """Counts wrong invitations by address and by invitation, within a time window."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def wait_seconds(self, *names: str) -> float:
        """Return how long whoever has one of these names has to wait; 0 if it may try."""
        since = time.monotonic() - _WITHIN_SECONDS
        recent = {known: [when for when in times if when >= since] for known, times in self._times.items()}
        self._times = {known: times for known, times in recent.items() if times}
        waits = [times[0] - since for name in names if len(times := self._times.get(name, [])) >= _WRONG]
        return max(waits, default=0.0)

    def add(self, *names: str) -> None:
        """Count a wrong invitation; the oldest names are forgotten where there are too many."""
        for name in names:
            self._times.setdefault(name, []).append(time.monotonic())
        while len(self._times) > _NAMES:
            del self._times[next(iter(self._times))]


@final
class _Site:
    """Handles the requests of raters, with templates that escape everything."""

    def __init__(self, store: Store) -> None:
        self._store, self._templates, self._attempts = store, page_templates(_PAGES), Attempts()
        self._files = {
            "study.css": (look() + (_PAGES / "study.css").read_text(encoding="utf-8"), "text/css"),
            "study.js": ((_PAGES / "study.js").read_text(encoding="utf-8"), "text/javascript"),
        }

    async def start(self, request: Request) -> Response:
        return self._enter(is_known=await self._rater(request) is not None)

    async def enter(self, request: Request) -> Response:
        """Turn an invitation into a session."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise HTTPException(403)  # another site's page would enter its visitors under an invitation of its choice
        token = (await _form(request)).get("token", "").strip()
        session = await run_in_threadpool(self._store.enter, token) if token else None
        if session is None:  # a right invitation is never kept out: all raters may have the address of one proxy
            return self._wrong(request, token)
        response, is_https = RedirectResponse("/rate", status_code=303), request.url.scheme == "https"
        response.set_cookie(
            COOKIE, session, max_age=_COOKIE_SECONDS, httponly=True, samesite="strict", secure=is_https, path="/"
        )
        return response

    def _wrong(self, request: Request, token: str) -> Response:
        """Refuse a wrong invitation, and after some of them the address and the invitation for a minute."""
        address = request.client.host if request.client is not None else ""
        names = (f"address {address}", f"invitation {fingerprint(token)}")
        if wait := self._attempts.wait_seconds(*names):
            found = self._enter(message="Too many wrong invitations: wait a minute, then try again.", status=429)
            found.headers["Retry-After"] = str(int(wait) + 1)
            return found
        self._attempts.add(*names)
        return self._enter(message="This invitation is not known. Open the link that you were sent.", status=403)

    async def show(self, request: Request) -> Response:
        rater = await self._rater(request)
        if rater is None:
            return self._enter(message="Please open the link that you were sent.", status=401)
        found = await run_in_threadpool(next_page, self._store, rater)
        if isinstance(found, End):
            heading, message = _ENDS[found.why]
            done = f" You have answered {found.pages} page{'s' * (found.pages != 1)} of pairs." if found.pages else ""
            return self._notice(200, heading, message + done)
        is_first = found.kind == "qualification"
        most = "" if is_first or found.number == found.of else "at most "
        heading, part = f"Page {found.number} of {most}{found.of}", "First questions" if is_first else "The study"
        return self._page("rate", 200, page=found, heading=heading, part=part)

    async def take(self, request: Request) -> Response:
        """Count a page's answers; the redirect acknowledges them."""
        rater = await self._rater(request)
        if rater is None:
            words = "Nothing was counted. Please open the link that you were sent."
            return self._enter(message=words, status=401)
        form = await _form(request)
        try:
            await run_in_threadpool(answer, self._store, rater, form.get("page", ""), _sides(form))
        except RefusedError as refused:
            status, message = _REFUSALS[refused.why]
            return self._notice(status, "Not counted", message, ("/rate", "Go on"))
        return RedirectResponse("/rate", status_code=303)

    async def file(self, name: str) -> Response:
        """Return style or script, by name from a fixed list."""
        if name not in self._files:
            raise HTTPException(404)
        text, kind = self._files[name]
        return Response(text, media_type=kind)

    async def failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = "There is no such page." if error.status_code == 404 else "This request cannot be answered."
        found = self._notice(error.status_code, "Sorry", words, ("/", "To the beginning"))
        found.headers.update(error.headers or {})
        return found

    def _enter(self, *, message: str = "", is_known: bool = False, status: int = 200) -> HTMLResponse:
        return self._page("enter", status, message=message, is_known=is_known)

    def _notice(self, status: int, heading: str, message: str, link: tuple[str, str] | None = None) -> HTMLResponse:
        return self._page("notice", status, heading=heading, message=message, link=link)

    def _page(self, name: str, status: int, **values: Any) -> HTMLResponse:
        return HTMLResponse(self._templates.get_template(f"{name}.html.j2").render(**values), status_code=status)

    async def _rater(self, request: Request) -> Rater | None:
        session = request.cookies.get(COOKIE, "")
        return await run_in_threadpool(self._store.rater_of, session) if session else None


def create_study_app(store: Store, *, hosts: Sequence[str] | None) -> FastAPI:
    """Return the study as a web application; ``hosts`` are the accepted Host headers, None accepts any."""
    app = FastAPI(title=f"the study {store.study.name}", docs_url=None, redoc_url=None, openapi_url=None)
    site = _Site(store)
    app.add_api_route("/", site.start, methods=["GET"])
    app.add_api_route("/enter", site.enter, methods=["POST"])
    app.add_api_route("/rate", site.show, methods=["GET"])
    app.add_api_route("/rate", site.take, methods=["POST"])
    app.add_api_route("/{name}", site.file, methods=["GET"])
    app.add_exception_handler(HTTPException, site.failed)
    secure(app, max_bytes=_MAX_BYTES, hosts=hosts)
    return app


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form; a repeated name makes the form invalid."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise HTTPException(415)
    try:
        pairs = parse_qsl((await request.body()).decode("ascii"), max_num_fields=_MOST_FIELDS, errors="strict")
    except ValueError:
        raise HTTPException(400) from None
    if len(dict(pairs)) != len(pairs):
        raise HTTPException(400)
    return dict(pairs)


def _sides(form: dict[str, str]) -> dict[int, int]:
    """Return the chosen side at each place; fields that are not numbers are ignored, so their place is missing."""
    found = {}
    for name, value in form.items():
        place = re.fullmatch(r"place-([0-9]{1,2})", name)
        if place is not None and value in ("1", "2"):
            found[int(place[1])] = int(value)
    return found
