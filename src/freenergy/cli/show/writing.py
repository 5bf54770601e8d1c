"""Print what was written, ranked and looked up, for a person."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from freenergy.cli.show.tables import OUT, interval, show_table, tail
from freenergy.core.format import significant
from freenergy.text.next_table import COLUMNS, NextTable
from freenergy.text.texts import Texts, evidence_lines


@final
class Live:
    """Shows the chunks of long texts as they come.

    On a screen a line is held back until it is full: bars stand below it, and would wipe out a part of one.
    """

    def __init__(self, above: Callable[[], AbstractContextManager[Console]]) -> None:
        self._above, self._text, self._line = above, -1, Text()

    def chunk(self, prefix: str, r: int, words: str) -> None:
        """Show what was added to text r of a prefix."""
        if r != self._text:
            self.end()
            self._add(Text(tail(prefix), "dim"))
        self._text = r
        self._add(Text(words, "bold"))

    def end(self) -> None:
        """End the line of a text that is complete."""
        if self._text >= 0:
            with self._above() as console:
                console.print(self._line, soft_wrap=True)
        self._text, self._line = -1, Text()

    def _add(self, words: Text) -> None:
        with self._above() as console:
            if not console.is_terminal:
                console.print(words, end="", soft_wrap=True)
                return
            *full, self._line = (self._line + words).wrap(console, console.width)
            for line in full:
                console.print(line)


def show_texts(written: Texts, console: Console, *, is_shown: bool = False) -> None:
    """Show each text after the end of its prefix, and the evidence."""
    for text in written.texts:
        if not is_shown:
            words = f"[dim]{escape(tail(written.prefix))}[/dim][bold]{escape(text.text)}[/bold]"
            console.print(words, soft_wrap=not console.is_terminal)
        share = "" if text.share is None else f", {100 * text.share:.1f} % of the weight"
        drawn = "" if text.drawn == len(text.tokens) else f" (the numbers are of all {text.drawn} that were drawn)"
        console.print(f"[dim]  {len(text.tokens)} tokens{drawn}, {written.numbers(text)}{share}[/dim]")
    for line in evidence_lines(written.steps):
        console.print(f"[dim]{escape(line)}[/dim]")
    for note in written.all_notes():
        console.print(f"[bold]mind:[/bold] {escape(note)}")


def show_lists(found: dict[str, Any], max_lists: int = 5) -> None:
    """Show the best candidate of the first lists."""
    for row in (found["lists"] or [])[:max_lists]:
        OUT.print(f"[dim]{escape(tail(row['prefix'], 80))}[/dim][bold]{escape(row['best'])}[/bold]")
    if found["out"] is not None:
        OUT.print(f"the ranked lists are in {escape(found['out'])}")


def show_next(found: NextTable) -> None:
    """Show the table, likeliest token of the base first."""
    show_table(f"…{tail(found.prefix, 60)} ▸", COLUMNS, found.rows())
    if verdict := found.found.verdict():
        OUT.print(f"[bold]mind:[/bold] {escape(verdict)}")


def show_distilled(found: dict[str, Any], out: Path) -> None:
    """Show how close the distilled model has come to the residual model, and what it is worth."""
    rows = []
    for name, words in (("kl", "KL(residual model ‖ it), nats per text"), ("total_variation", "total variation")):
        for when, model in (("before", "base"), ("after", "distilled"), ("less", "less")):
            rows.append([words if when == "before" else "", model, *_measured(found[name][when])])
    candidates, perplexity = found["candidates"], found["perplexity"]
    for model, words in (("base", f"effective of {candidates['draws']} candidates"), ("distilled", "")):
        rows.append([words, model, *_measured(candidates[model]["ess"])])
    base, distilled = perplexity["base"], perplexity["distilled"]
    rows.append(["perplexity", "base", significant(base["perplexity"]["token"]), interval(base["interval"]["token"])])
    rows.append(["", "distilled", significant(distilled["perplexity"]), interval(distilled["interval"])])
    rows.append(["", "model, certified", *_measured(perplexity["joint_certified"])])
    show_table(f"Distilled in {found['training']['steps']} steps", ["what", "of", "value", "95 % interval"], rows)
    if found["verdict"]:
        OUT.print(f"[bold]mind:[/bold] {escape(found['verdict'])}")
    OUT.print(f'The model is in {escape(str(out))}: AutoModelForCausalLM and \\[base] kind = "pretrained" load it.')


def _measured(value: dict[str, Any]) -> list[str]:
    return [significant(value["value"]), interval(value["interval"])]
