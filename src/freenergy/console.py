"""What a person sees: progress bars with time left on stderr, tables and texts on stdout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from freenergy.pipeline import StageResult
from freenergy.progress import Advance

_OUT = Console(highlight=False)


@final
class Bars:
    """Progress bars on stderr; in a pipe or a log only the words remain."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> "Bars":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    @contextmanager
    def track(self, label: str, total: float | int | None = None, unit: str = "") -> Iterator[Advance]:
        """A bar for one piece of work."""
        task = self._bars.add_task(label, total=total, unit=unit, note="")

        def advance(amount: float | int, note: str = "") -> None:
            self._bars.update(task, advance=amount)
            if note:
                self._bars.update(task, note=note)

        try:
            yield advance
        finally:
            self._bars.remove_task(task)

    def say(self, message: str) -> None:
        """One line above the bars."""
        self._bars.console.print(escape(message))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    _OUT.print(table)


def show_samples(prefix: str, rows: Sequence[dict[str, Any]]) -> None:
    """Continuations, each after the end of its prefix."""
    for row in rows:
        _OUT.print(f"[dim]{escape(_tail(prefix))}[/dim][bold]{escape(row['text'])}[/bold]")
        _OUT.print(f"[dim]  log P = {row['log_base']:.2f}, {row['tokens']} tokens[/dim]")


def show_stage(result: StageResult) -> None:
    """What came of a stage."""
    state = "kept from before" if result.was_cached else f"{result.seconds:.0f} s"
    _OUT.print(f"[bold]{result.name}[/bold] ({state})")
    match result.name:
        case "corpus":
            _show_corpus(result.summary)
        case "negatives":
            _show_negatives(result.summary)
        case "candidates":
            drawn = result.summary
            _OUT.print(f"  {drawn['draws']} draws for each of {drawn['windows']:,} {drawn['split']} prefixes")
        case "energy":
            _show_energy(result.summary)
        case "base":
            facts = [f"{key.replace('_', ' ')} {_short(value)}" for key, value in result.summary.items()]
            _OUT.print("  " + escape(", ".join(facts)))
        case "evaluation":
            _show_evaluation(result.summary)


def _show_corpus(summary: dict[str, Any]) -> None:
    columns = ["split", "documents", "tokens", "windows", "dropped as repeated", "n-grams seen before"]
    rows = []
    for name, split in summary["splits"].items():
        shared = split["ngrams_shared"]
        counts = [f"{split[key]:,}" for key in ("documents", "tokens", "windows", "windows_dropped")]
        rows.append([name, *counts, "" if shared is None else f"{100 * shared:.2f} %"])
    show_table(f"{summary['text']}: prefix {summary['prefix']}, continuation {summary['continuation']}", columns, rows)
    for example in summary["examples"]:
        _OUT.print(f"[dim]…{escape(_tail(example['prefix']))}[/dim] ▸[bold]{escape(example['continuation'])}[/bold]\n")


def _show_negatives(summary: dict[str, Any]) -> None:
    for split in ("train", "validation"):
        if split in summary:
            _OUT.print(f"  {split}: {summary[split]['per_prefix']} each for {summary[split]['windows']:,} prefixes")
    if summary["relative_to_another_law"]:
        _OUT.print("  not all are the base's own: the energy's optimum is relative to their law")


def _show_energy(summary: dict[str, Any]) -> None:
    for part in summary["parts"]:
        facts = [f"{key.replace('_', ' ')} {_short(value)}" for key, value in part.items() if key not in ("tried",)]
        _OUT.print("  " + escape(", ".join(facts)))
    held_out = summary["validation"]
    _OUT.print(
        f"  validation: certified gain {held_out['certified_gain']:.2f} ± {held_out['gain_error']:.2f} nats a sequence "
        f"with {held_out['candidates']:.0f} candidates, right on {100 * held_out['pair_accuracy']:.1f} % of pairs, "
        f"energies {held_out['energy_data']:+.2f} on text and {held_out['energy_noise']:+.2f} on draws "
        f"± {held_out['spread']:.2f}"
    )


def _show_joint(joint: dict[str, Any]) -> None:
    rows = []
    for name, key, unit in (
        ("base, perplexity per token", "base", ""),
        ("joint, certified perplexity", "certified", ""),
        ("certified gain", "nats_per_sequence", " nats a sequence"),
        ("less perplexity", "percent", " %"),
    ):
        value, low, high = (joint[key][end] for end in ("value", "low", "high"))
        interval = "–" if low is None or high is None else f"{low:.4g} – {high:.4g}{unit}"
        rows.append([name, "–" if value is None else f"{value:.4g}{unit}", interval])
    where = f"{joint['candidates']} candidates, {joint['windows']} windows of {joint['documents']} documents"
    show_table(f"Base and joint model on the same text ({where})", ["", "value", "95 % interval"], rows)
    _OUT.print(
        f"  right on {100 * joint['pair_accuracy']:.1f} % of pairs of text and draw; effective draws "
        f"{joint['ess']:.1f} of {joint['candidates'] - 1}; at most {joint['ceiling_percent']:.1f} % can be certified"
    )
    if joint["note"]:
        _OUT.print(f"  {joint['note']}")


def _show_evaluation(summary: dict[str, Any]) -> None:
    if "joint" in summary:
        _show_joint(summary["joint"])
    report = summary["base"]["perplexity"]
    rows = []
    for unit in ("token", "word", "byte"):
        measured = report[unit]
        value, low, high = (measured[key] for key in ("value", "low", "high"))
        interval = "–" if low is None or high is None else f"{low:.4g} – {high:.4g}"
        rows.append([f"per {unit}", "–" if value is None else f"{value:.4g}", interval])
    where = f"{report['windows']} windows of {report['documents']} documents, {report['split']}"
    show_table(f"Perplexity of the base model ({where})", ["", "perplexity", "95 % interval"], rows)
    for sample in summary["samples"]:
        _OUT.print(f"[dim]…{escape(_tail(sample['prefix']))}[/dim]")
        _OUT.print(f"  [bold]base [/bold] {escape(sample['base'])}")
        if "joint" in sample:
            _OUT.print(f"  [bold]joint[/bold] {escape(sample['joint'])}")
        _OUT.print(f"  [bold]human[/bold] {escape(sample['human'])}\n")


def _tail(text: str, width: int = 160) -> str:
    return text[-width:]


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
