"""The exception for bad input.

A ``UserError`` is one sentence: what is wrong, where, and how to fix it. The command line prints it without a traceback
and exits with status 2. Violated invariants of our own code stay assertions.
"""


class UserError(ValueError):
    """Bad input: one sentence that names the cause and the remedy."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not blank, or the name of its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")


class DivergenceError(UserError):
    """Training diverged and cannot continue; an experiment records it and continues with its other rows."""
