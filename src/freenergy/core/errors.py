"""The exception for bad input.

A ``UserError`` is one sentence: what is wrong, where, and how to fix it. The command line prints it without a traceback
and exits with status 2. Violated invariants of our own code stay assertions.
"""


class UserError(ValueError):
    """Bad input: one sentence that names the cause and the remedy."""


class DivergenceError(UserError):
    """Training diverged and cannot continue; an experiment records it and continues with its other rows."""
