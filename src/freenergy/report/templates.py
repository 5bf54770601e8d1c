"""Jinja templates of the pages; every value is escaped unless it is marked as safe."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def templates() -> Environment:
    """Return the environment of this folder, with the filter ``tight``."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["tight"] = _tight
    return found


def _tight(text: str) -> str:
    """Forbid a line break between a number and its %."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")
