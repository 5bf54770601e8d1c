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
        case "baselines":
            for name, record in result.summary.items():
                cost = f"{_short(record['parameters'])} parameters, {record['cpu_seconds'] / 60:.1f} CPU minutes"
                _OUT.print(f"  {escape(name)}: {cost}")
        case "evaluation":
            show_evaluation(result.summary)


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


def show_evaluation(summary: dict[str, Any]) -> None:
    """What was measured of base, joint model and baselines, and what they write."""
    base, joint = summary["base"], summary.get("joint")
    columns = ["perplexity", "per token", "95 % interval", "per word", "per byte"]
    rows = [["base", *_perplexities(base["perplexity"], base["interval"]["token"])]]
    rows += _joint_rows(joint) if joint else []
    for name, found in summary["baselines"].items():
        by_unit = {"token": found["perplexity"], "word": found["per_word"], "byte": found["per_byte"]}
        rows.append([name, *_perplexities(by_unit, found["interval"])])
    where = f"{summary['windows']} windows of {summary['documents']} documents, {summary['split']}"
    show_table(f"Perplexity ({where})", columns, rows)
    if joint:
        _show_gain(joint)
    for name, found in summary["baselines"].items():
        verdict = found["verdict"] and f"; {found['verdict']}"
        _OUT.print(f"  {escape(name)}: gain over the base {_percent(found['against_base'])}{escape(verdict)}")
    if "text" in summary:
        _show_text(summary["text"])
    for sample in summary["samples"]:
        _OUT.print(f"[dim]…{escape(_tail(sample['prefix']))}[/dim]")
        _OUT.print(f"  [bold]base [/bold] {escape(sample['base'])}")
        if "joint" in sample:
            _OUT.print(f"  [bold]joint[/bold] {escape(sample['joint'])}")
        _OUT.print(f"  [bold]human[/bold] {escape(sample['human'])}\n")


def _joint_rows(joint: dict[str, Any]) -> list[list[str]]:
    """The joint model by each bound, and the base on the same windows."""
    rows = [[f"base, the joint's {joint['windows']} windows", _cell(joint["base_perplexity"])]]
    rows[0] += [_interval(joint["base_interval"]), "", ""]
    for bound, word in (("lower", "optimistic"), ("upper", "conservative"), ("certified", "certified")):
        by_unit = {"token": joint["perplexity"][bound]}
        by_unit |= {unit: joint[f"per_{unit}"][bound] for unit in ("word", "byte")}
        rows.append([f"joint, {word}", *_perplexities(by_unit, joint["interval"][bound])])
    return rows


def _show_gain(joint: dict[str, Any]) -> None:
    gain = joint["gain"]
    _OUT.print(
        f"  certified gain over the base: {_cell(gain['nats_per_sequence'])} nats a sequence "
        f"({_interval(gain['nats_interval'])}), {_percent(gain)} of its perplexity; at most "
        f"{_cell(gain['ceiling_percent'])} % can be certified"
    )
    tail = "" if joint["k_hat"] is None else f", tail k̂ {joint['k_hat']:.2f}"
    _OUT.print(
        f"  {joint['draws']} draws a window: {joint['ess']:.1f} effective, the heaviest has "
        f"{100 * joint['largest_share']:.1f} % of the weight{tail}; right on {100 * joint['pair_accuracy']:.1f} % of "
        "pairs of text and draw"
    )
    if joint["verdict"]:
        _OUT.print(f"  [bold]mind:[/bold] {escape(joint['verdict'])}")


def _show_text(text: dict[str, Any]) -> None:
    def shares(found: dict[str, Any]) -> list[str]:
        return [_cell(None if found[n][0] is None else 100 * found[n][0]) for n in ("2", "3", "4")]

    rows = []
    for name in ("human", "base", "joint"):
        found = text[name]
        share = found["repetition"][0]
        repetition = _cell(None if share is None else 100 * share)
        rows.append([name, " / ".join(shares(found["distinct"])), repetition, " / ".join(shares(found["unseen"]))])
    tokens = min(found["tokens"] for found in text.values())
    columns = ["text", "distinct 2-, 3-, 4-grams %", "repeated 4-grams %", "unseen 2-, 3-, 4-grams %"]
    show_table(f"Statistics of text ({tokens:,} tokens each)", columns, rows)


def _perplexities(by_unit: dict[str, float | None], interval: Sequence[float | None]) -> list[str]:
    return [_cell(by_unit["token"]), _interval(interval), _cell(by_unit["word"]), _cell(by_unit["byte"])]


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _interval(ends: Sequence[float | None]) -> str:
    return "–" if None in ends else f"{_cell(ends[0])} – {_cell(ends[1])}"


def _percent(change: dict[str, Any]) -> str:
    """A gain in percent, with its interval."""
    return f"{_cell(change['percent'])} % ({_interval(change['interval'])})"


def _tail(text: str, width: int = 160) -> str:
    return text[-width:]


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
