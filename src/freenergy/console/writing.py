"""What was written, ranked and looked up, for a person."""

from pathlib import Path
from typing import Any, final

from rich.markup import escape

from freenergy.console.tables import OUT, cell, interval, show_table, tail
from freenergy.samplers.next_table import COLUMNS, NextTable
from freenergy.samplers.texts import Texts, told


@final
class Live:
    """Shows the chunks of long texts as they come."""

    def __init__(self) -> None:
        self.is_shown = False
        self._text = -1

    def chunk(self, r: int, words: str) -> None:
        """What was added to text r."""
        if r != self._text:
            OUT.print(f"\n[dim]text {r + 1}[/dim]" if r else "")
        OUT.print(f"[bold]{escape(words)}[/bold]", end="")
        self.is_shown, self._text = True, r


def show_texts(written: Texts, *, is_shown: bool = False) -> None:
    """Each text after the end of its prefix, and the evidence."""
    OUT.print() if is_shown else None
    for text in written.texts:
        if not is_shown:
            OUT.print(f"[dim]{escape(tail(written.prefix))}[/dim][bold]{escape(text.text)}[/bold]")
        share = "" if text.share is None else f", {100 * text.share:.1f} % of the weight"
        OUT.print(f"[dim]  {len(text.tokens)} tokens, log P_LM {text.log_base:.2f}, E {text.energy:.2f}{share}[/dim]")
    for line in told(written.steps):
        OUT.print(f"[dim]{escape(line)}[/dim]")
    for note in written.all_notes():
        OUT.print(f"[bold]mind:[/bold] {escape(note)}")


def show_lists(found: dict[str, Any], most: int = 5) -> None:
    """The best candidate of the first lists."""
    for row in (found["lists"] or [])[:most]:
        OUT.print(f"[dim]{escape(tail(row['prefix'], 80))}[/dim][bold]{escape(row['best'])}[/bold]")
    if found["out"] is not None:
        OUT.print(f"the ranked lists are in {escape(found['out'])}")


def show_next(found: NextTable) -> None:
    """The table, likeliest token of the base first."""
    show_table(f"…{tail(found.prefix, 60)} ▸", COLUMNS, found.rows())
    if verdict := found.found.verdict():
        OUT.print(f"[bold]mind:[/bold] {escape(verdict)}")


def show_distilled(found: dict[str, Any], out: Path) -> None:
    """How near the distilled model has come to the joint model, and what it is worth."""

    def measured(value: dict[str, Any]) -> list[str]:
        return [cell(value["value"]), interval(value["interval"])]

    rows = []
    for name, words in (
        ("kl", "KL(joint ‖ model), nats a text"),
        ("total_variation", "total variation from the joint"),
    ):
        for when, model in (("before", "base"), ("after", "distilled"), ("less", "less")):
            rows.append([words if when == "before" else "", model, *measured(found[name][when])])
    for model in ("base", "distilled"):
        draws = found["draws"][model]
        rows.append(
            [f"effective of {draws['draws']} candidates" if model == "base" else "", model, *measured(draws["ess"])]
        )
    base, distilled = found["perplexity"]["base"], found["perplexity"]["distilled"]
    rows.append(["perplexity", "base", *_perplexity(base)])
    rows.append(["", "distilled", cell(distilled["perplexity"]), interval(distilled["interval"])])
    rows.append(["", "joint, certified", *measured(found["perplexity"]["joint_certified"])])
    show_table(f"Distilled in {found['training']['steps']} steps", ["what", "of", "value", "95 % interval"], rows)
    if found["verdict"]:
        OUT.print(f"[bold]mind:[/bold] {escape(found['verdict'])}")
    OUT.print(f'The model is in {escape(str(out))}: AutoModelForCausalLM and \\[base] kind = "pretrained" load it.')


def _perplexity(report: dict[str, Any]) -> list[str]:
    return [cell(report["perplexity"]["token"]), interval(report["interval"]["token"])]
