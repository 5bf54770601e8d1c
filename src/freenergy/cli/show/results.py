"""Prints what came of the commands: stages, what was measured, written, ranked and looked up."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from freenergy.cli.show import OUT, show_table, show_wide, tail
from freenergy.core.files import RERUN, corruption_as_user_error
from freenergy.core.format import interval, learning_sentence, significant
from freenergy.evaluation.ladder import verdict
from freenergy.recipes import StageResult
from freenergy.report import field_tables, tables, text_tables
from freenergy.report.field_tables import is_field
from freenergy.text.texts import COLUMNS, NextTable, Texts, evidence_lines


def show_stage(result: StageResult) -> None:
    """What came of a stage."""
    state = "kept from before" if result.was_cached else f"{result.seconds:.0f} s"
    OUT.print(f"[bold]{result.name}[/bold] ({state})")
    # what was read from disk may be damaged; what was made just now may not
    with corruption_as_user_error(Path(result.name) / "stage.json", RERUN) if result.was_cached else nullcontext():
        _show(result)


def _show(result: StageResult) -> None:
    match result.name:
        case "corpus" if "splits" in result.summary:
            _show_corpus(result.summary)
        case "field" | "rivals" | "local" | "negatives" | "energy" | "evaluation":
            _SHOWN[result.name](result.summary)
        case "candidates":
            drawn = result.summary
            OUT.print(f"  {drawn['draws']} draws for each of {drawn['windows']:,} {drawn['split']} prefixes")
        case "baselines":
            for name, record in result.summary.items():
                cost = f"{_short(record['parameters'])} parameters, {record['cpu_seconds'] / 60:.1f} CPU minutes"
                OUT.print(f"  {escape(name)}: {cost}")
        case "measurement":
            for name, value in result.summary["numbers"]:
                OUT.print(f"  {escape(name)}: {significant(value)}")
        case _:
            facts = [f"{key.replace('_', ' ')} {_short(value)}" for key, value in result.summary.items()]
            OUT.print("  " + escape(", ".join(facts)))


def _show_corpus(summary: dict[str, Any]) -> None:
    columns = ["split", "documents", "tokens", "windows", "dropped as repeated", "n-grams seen before"]
    rows = []
    for name, split in summary["splits"].items():
        shared = split["ngrams_shared"]
        counts = [f"{split[key]:,}" for key in ("documents", "tokens", "windows", "windows_dropped")]
        rows.append([name, *counts, "" if shared is None else f"{100 * shared:.2f} %"])
    show_table(f"{summary['text']}: prefix {summary['prefix']}, continuation {summary['continuation']}", columns, rows)
    for example in summary["examples"]:
        OUT.print(f"[dim]…{escape(tail(example['prefix']))}[/dim] ▸[bold]{escape(example['continuation'])}[/bold]\n")


def _show_local(summary: dict[str, Any]) -> None:
    before, after = summary["nats_per_token_before"], summary["nats_per_token_fitted"]
    OUT.print(
        f"  counted {summary['documents']:,} documents, {summary['documents_left_for_energies']:,} are left for "
        f"energies; {before:.3f} → {after:.3f} nats per token on the {summary['windows']} validation windows of the fit"
    )
    OUT.print("  weights: " + escape(", ".join(f"{name} {weight:+.2f}" for name, weight in summary["weights"].items())))


def _show_negatives(summary: dict[str, Any]) -> None:
    for split in ("train", "validation"):
        if split in summary:
            OUT.print(f"  {split}: {summary[split]['per_prefix']} each for {summary[split]['windows']:,} prefixes")
    if summary["relative_to_another_law"]:
        OUT.print("  not all are the base's own: the energy's optimum is relative to their law")


def _show_energy(summary: dict[str, Any]) -> None:
    for part in summary["parts"]:
        facts = [f"{key.replace('_', ' ')} {_short(value)}" for key, value in part.items() if key not in ("tried",)]
        OUT.print("  " + escape(", ".join(facts)))
    held_out = summary["validation"]
    OUT.print(
        f"  validation: certified gain {held_out['certified_gain']:.2f} ± {held_out['gain_error']:.2f} nats a sequence "
        f"with {held_out['candidates']:.0f} candidates, right on {100 * held_out['pair_accuracy']:.1f} % of pairs, "
        f"energies {held_out['energy_data']:+.2f} on text and {held_out['energy_noise']:+.2f} on draws "
        f"± {held_out['spread']:.2f}"
    )
    if "learning_curve" in summary:
        OUT.print("  " + learning_sentence(summary["learning_curve"]))


def _show_fit(summary: dict[str, Any]) -> None:
    """Show the fit of a random field."""
    OUT.print(f"  {summary['features']:,} features, sentences of up to {summary['longest']} words")
    table = field_tables.penalties(summary)
    show_table(f"{table.caption}; {summary['l2']:g} was kept", table.columns, table.rows)


def _show_rivals(summary: dict[str, Any]) -> None:
    """Show the rivals of a random field."""
    for name, record in summary.items():
        OUT.print("  " + escape(f"{name}: {', '.join(f'{key} {_short(value)}' for key, value in record.items())}"))


def _show_field(summary: dict[str, Any]) -> None:
    """Show what was measured of a random field."""
    for found in field_tables.all_tables(summary):
        show_table(found.caption, found.columns, found.rows)
    OUT.print(f"[bold]{escape(field_tables.sentence(summary))}[/bold]")
    if verdict_of := summary.get("field", {}).get("verdict"):
        OUT.print(f"[bold]mind:[/bold] {escape(verdict_of)}")
    for each in summary["sentences"]:
        OUT.print(f"  {escape(each)}")


def _show_sentences(summary: dict[str, Any]) -> None:
    """Say what a reader must know before believing the numbers, and which baselines are beaten."""
    if doubt := (summary.get("joint") or {}).get("doubt"):
        OUT.print(f"[dim]the estimates next to the certificate, which does not need them: {escape(doubt)}[/dim]")
    for sentence in tables.verdicts(summary):
        OUT.print(f"[bold]mind:[/bold] {escape(sentence)}")
    for sentence in tables.against_baselines(summary, are_beaten=True):
        OUT.print(escape(sentence))


def show_evaluation(summary: dict[str, Any]) -> None:
    """Show what was measured of base, residual model and baselines, in the report's tables, and what they write."""
    if "rates" in summary:
        _show_rates(summary)
        return
    if is_field(summary):
        _show_field(summary)
        return
    headline, rungs = tables.headline(summary), summary.get("ladder") or []
    show_wide(headline.caption, headline.columns, headline.rows)
    if len(rungs) > 1:
        ladder = tables.rungs(rungs)
        show_wide(ladder.caption, ladder.columns, ladder.rows)
        OUT.print(f"[bold]{escape(verdict(rungs))}[/bold]")
    found = [tables.diagnostics(summary["joint"])] if summary.get("joint") else []
    found += [tables.ranking(summary["ranking"])] if summary.get("ranking") else []
    found += [text_tables.text_statistics(summary["text"])] if "text" in summary else []
    for table in found:
        show_table(table.caption, table.columns, table.rows)
    _show_sentences(summary)
    for sample in summary["samples"]:
        OUT.print(f"[dim]…{escape(tail(sample['prefix']))}[/dim]")
        for name in ("base", "joint", "human"):
            if name in sample:
                OUT.print(f"  [bold]{name:5}[/bold] {escape(sample[name])}")
        OUT.print()


def _show_rates(summary: dict[str, Any]) -> None:
    """What a tagger is worth."""
    from freenergy.report.tagging_tables import confusion_table, rate_table, sentence

    OUT.print(escape(sentence(summary)))
    for table in (rate_table(summary), confusion_table(summary)):
        show_table(table.caption, table.columns, table.rows)


_SHOWN = {
    "field": _show_fit,
    "rivals": _show_rivals,
    "local": _show_local,
    "negatives": _show_negatives,
    "energy": _show_energy,
    "evaluation": show_evaluation,
}


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


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
    if mind := found.found.verdict():
        OUT.print(f"[bold]mind:[/bold] {escape(mind)}")


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
