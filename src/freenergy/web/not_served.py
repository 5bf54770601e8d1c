"""Why a request that is right is not answered: the queue is full, its time is up, or the server is being stopped."""

from typing import ClassVar


class NotServed(Exception):  # noqa: N818
    """The server does not answer this request now; it has a status and a sentence."""

    status = 503


class Busy(NotServed):
    """The queue is full."""

    status = 429

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__(f"the queue is full: try again in {retry_after_seconds} s")
        self.headers = {"Retry-After": str(retry_after_seconds)}


class TooLong(NotServed):
    """The request timed out."""

    status = 408

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request timed out after {seconds:g} seconds: ask for less, or try again later")


class Stopping(NotServed):
    """The server is being stopped."""

    headers: ClassVar = {"Retry-After": "5"}

    def __init__(self) -> None:
        super().__init__("the server is being stopped: try again in a few seconds")
