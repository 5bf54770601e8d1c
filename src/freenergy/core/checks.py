"""Range checks of settings, with one wording for all of them.

    check_range(self, "steps", "batch_size", at_least=1)
    check_range(self, "dropout", at_least=0, below=1)

A setting that is ``None`` is left out and passes; NaN and infinity never do.
"""

import math
from typing import Any

from freenergy.core.errors import UserError

Number = float | int | None


def check_range(
    settings: Any,
    *names: str,
    at_least: Number = None,
    above: Number = None,
    at_most: Number = None,
    below: Number = None,
    section: str = "",
    hint: str = "",
) -> None:
    """Raise a ``UserError`` for the first of these attributes that is outside of the range.

    ``section`` is written before the name, as in "corpus."; ``hint`` after the remedy.

    >>> from types import SimpleNamespace
    >>> check_range(SimpleNamespace(dropout=0.1, rank=None), "dropout", "rank", at_least=0, below=1)
    >>> check_range(SimpleNamespace(steps=0), "steps", at_least=1)
    Traceback (most recent call last):
    freenergy.core.errors.UserError: steps is 0: set it to 1 or more
    """
    low, is_low_open = (above, True) if above is not None else (at_least, False)
    high, is_high_open = (below, True) if below is not None else (at_most, False)
    for name in names:
        value = getattr(settings, name)
        if value is None:
            continue
        is_above = low is None or (value > low if is_low_open else value >= low)
        is_below = high is None or (value < high if is_high_open else value <= high)
        if not (is_above and is_below and -math.inf < value < math.inf):
            raise UserError(f"{section}{name} is {value}: set it {_words(at_least, above, at_most, below)}{hint}")


def _words(at_least: Number, above: Number, at_most: Number, below: Number) -> str:
    upper = f"below {below}" if below is not None else "" if at_most is None else f"at most {at_most}"
    if above is not None:
        return f"above {above} and {upper}" if upper else f"above {above}"
    if at_least is not None:
        return f"to at least {at_least} and {upper}" if upper else f"to {at_least} or more"
    return f"to {upper}" if upper else "to a finite number"
