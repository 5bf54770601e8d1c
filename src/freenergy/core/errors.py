"""The one exception that speaks to users.

A ``UserError`` is one sentence: what is wrong, where, and what to do. The command line prints it without a traceback
and ends with status 2. Broken invariants of our own stay assertions.
"""


class UserError(ValueError):
    """Bad input: one sentence that names the cause and the remedy."""


class DivergenceError(UserError):
    """A training that cannot go on: an experiment writes it down and goes on with its other rows."""
