"""Formats numbers for tables and pages: a few digits, an interval, a dash for a missing value."""

import math
from collections.abc import Sequence
from typing import Any

DASH = "–"


def is_number(value: Any) -> bool:
    """Whether the value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, unit: str = "") -> str:
    """Format with three or four digits; a missing value is a dash.

    >>> number(23.4567), number(12345.6), number(-0.31), number(0.000321), number(255), number(None)
    ('23.46', '12,346', '−0.310', '0.00032', '255', '–')
    """
    if not is_number(value):
        return DASH
    size = abs(value)
    if isinstance(value, int) or size >= 1000:
        text = f"{value:,.0f}"
    elif size >= 1:
        text = f"{value:.2f}" if size < 100 else f"{value:.1f}"
    else:
        text = f"{value:.3f}" if size >= 0.01 or not value else f"{value:.2g}"
    return text.replace("-", "−") + unit


def significant(value: float | int | None) -> str:
    """Format with four significant digits; a missing value is a dash.

    >>> significant(123.456), significant(-0.01234), significant(None)
    ('123.5', '−0.01234', '–')
    """
    return DASH if value is None else f"{value:.4g}".replace("-", "−")


def interval(ends: Sequence[Any] | None) -> str:
    """Format both ends; a missing one gives a dash.

    >>> interval([12.7, 13.0]), interval([None, None])
    ('12.70 to 13.00', '–')
    """
    if not ends or not all(map(is_number, ends)):
        return DASH
    return f"{number(ends[0])} to {number(ends[1])}"


def percent(value: Any) -> str:
    """Format a share as a percentage with one decimal.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * value:.1f} %" if is_number(value) else DASH


def minutes(seconds: Any) -> str:
    """Format seconds as minutes.

    >>> minutes(90.0), minutes(1.0), minutes(6000.0)
    ('1.5', '0.02', '100')
    """
    if not is_number(seconds):
        return DASH
    found = seconds / 60
    return f"{found:.0f}" if found >= 10 else f"{found:.1f}" if found >= 1 else f"{found:.2f}"


def gain(value: Any) -> str:
    """Format a reduction of perplexity in percent; a negative one is an increase.

    >>> gain(12.94), gain(-3.0), gain(None)
    ('12.9 %', '−3.0 %', '–')
    """
    return f"{value:.1f} %".replace("-", "−") if is_number(value) else DASH


def gain_interval(ends: Sequence[Any] | None) -> str:
    """Format both ends of a gain; a missing one gives a dash.

    >>> gain_interval([-1.0, 13.04])
    '−1.0 to 13.0 %'
    """
    if not ends or not all(map(is_number, ends)):
        return DASH
    return f"{ends[0]:.1f} to {ends[1]:.1f} %".replace("-", "−")


def learning_sentence(curve: dict[str, Any]) -> str:
    """Return a learning curve in words: the gains by windows, and what the next doubling may add."""
    gains = ", ".join(f"{number(row['gain'])} with {row['windows']:,} windows" for row in curve["rows"])
    words = f"certified gain in nats per sequence: {gains}"
    if curve.get("next_doubling") is None:
        return f"{words}; too few windows, or too noisy, to extrapolate"
    last = f"the last doubling added {number(curve['last_doubling'])} ± {number(curve['last_doubling_error'])}"
    return f"{words}; {last}, the next one is expected to add {number(curve['next_doubling'])}"
