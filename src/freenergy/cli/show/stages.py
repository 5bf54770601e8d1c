"""What came of the stages of a run, and what was measured."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.markup import escape

from freenergy.cli.show.tables import OUT, interval, percent, short, show_table, tail
from freenergy.core.files import RERUN, corruption_as_user_error
from freenergy.core.format import learning_sentence, minutes, significant
from freenergy.evaluation.black_box import CLAIM, has_perplexity
from freenergy.evaluation.ladder import verdict
from freenergy.recipes import StageResult


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
        case "local" | "negatives" | "energy" | "evaluation":
            _SHOWN[result.name](result.summary)
        case "candidates":
            drawn = result.summary
            OUT.print(f"  {drawn['draws']} draws for each of {drawn['windows']:,} {drawn['split']} prefixes")
        case "baselines":
            for name, record in result.summary.items():
                cost = f"{short(record['parameters'])} parameters, {record['cpu_seconds'] / 60:.1f} CPU minutes"
                OUT.print(f"  {escape(name)}: {cost}")
        case "measurement":
            for name, value in result.summary["numbers"]:
                OUT.print(f"  {escape(name)}: {significant(value)}")
        case _:
            facts = [f"{key.replace('_', ' ')} {short(value)}" for key, value in result.summary.items()]
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
        facts = [f"{key.replace('_', ' ')} {short(value)}" for key, value in part.items() if key not in ("tried",)]
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


def show_evaluation(summary: dict[str, Any]) -> None:
    """What was measured of base, residual model and baselines, and what they write."""
    base, joint = summary["base"], summary.get("joint")
    where = f"{summary['windows']} windows of {summary['documents']} documents, {summary['split']}"
    if not has_perplexity(summary):
        _show_nats(summary["joint"], summary["split"])
        _show_ranking(summary["ranking"])
        _show_texts(summary)
        return
    columns = ["perplexity", "per token", "95 % interval", "per word", "per byte"]
    rows = [["base", *_perplexities(base["perplexity"], base["interval"]["token"])]]
    rows += _joint_rows(joint) if joint else []
    for name, found in summary["baselines"].items():
        by_unit = {"token": found["perplexity"], "word": found["per_word"], "byte": found["per_byte"]}
        rows.append([name, *_perplexities(by_unit, found["interval"])])
    show_table(f"Perplexity ({where})", columns, rows)
    if joint:
        _show_gain(joint)
    _show_ladder(summary.get("ladder") or [])
    if ranking := summary.get("ranking"):
        _show_ranking(ranking)
    for name, found in summary["baselines"].items():
        verdict = found["verdict"] and f"; {found['verdict']}"
        OUT.print(f"  {escape(name)}: gain over the base {percent(found['against_base'])}{escape(verdict)}")
    _show_texts(summary)


def _show_texts(summary: dict[str, Any]) -> None:
    """Statistics of text, and samples."""
    if "text" in summary:
        _show_text(summary["text"])
    for sample in summary["samples"]:
        OUT.print(f"[dim]…{escape(tail(sample['prefix']))}[/dim]")
        OUT.print(f"  [bold]base [/bold] {escape(sample['base'])}")
        if "joint" in sample:
            OUT.print(f"  [bold]joint[/bold] {escape(sample['joint'])}")
        OUT.print(f"  [bold]human[/bold] {escape(sample['human'])}\n")


def _joint_rows(joint: dict[str, Any]) -> list[list[str]]:
    """The residual model by each bound, and the base on the same windows."""
    rows = [[f"base, the joint's {joint['windows']} windows", significant(joint["base_perplexity"])]]
    rows[0] += [interval(joint["base_interval"]), "", ""]
    for bound, word in (("lower", "optimistic"), ("upper", "conservative"), ("certified", "certified")):
        by_unit = {"token": joint["perplexity"][bound]}
        by_unit |= {unit: joint[f"per_{unit}"][bound] for unit in ("word", "byte")}
        rows.append([f"joint, {word}", *_perplexities(by_unit, joint["interval"][bound])])
    return rows


def _show_nats(joint: dict[str, Any], split: str) -> None:
    """What is certified over a base that only samples."""
    gain = joint["gain"]
    OUT.print(
        f"  {significant(gain['nats_per_sequence'])} {CLAIM}; 95 % interval {interval(gain['nats_interval'])}, at most "
        f"{significant(gain['ceiling_nats'])}; {joint['windows']} texts of {joint['documents']} documents, {split}"
    )
    _show_draws(joint)


def _show_gain(joint: dict[str, Any]) -> None:
    gain = joint["gain"]
    OUT.print(
        f"  certified gain over the base: {significant(gain['nats_per_sequence'])} nats a sequence "
        f"({interval(gain['nats_interval'])}), {percent(gain)} of its perplexity; at most "
        f"{significant(gain['ceiling_percent'])} % can be certified; sampler: {joint['sampler']}"
    )
    _show_draws(joint)


def _show_draws(joint: dict[str, Any]) -> None:
    """How much the draws say."""
    unit = "chunk" if "chunk by chunk" in joint["sampler"] else "window"
    tail = "" if joint["k_hat"] is None else f", tail k̂ {joint['k_hat']:.2f}"
    OUT.print(
        f"  {joint['draws']} draws per {unit}: {joint['ess']:.1f} effective, the heaviest has "
        f"{100 * joint['largest_share']:.1f} % of the weight{tail}; right on {100 * joint['pair_accuracy']:.1f} % of "
        "pairs of text and draw"
    )
    if joint["verdict"]:
        OUT.print(f"  [bold]mind:[/bold] {escape(joint['verdict'])}")


def _show_ladder(rungs: list[dict[str, Any]]) -> None:
    """What each rung gains over the one before, and which of them paid."""
    if len(rungs) < 2:
        return
    rows = []
    for row in rungs:
        gains = ["" if row[key] is None else percent(row[key]) for key in ("over_below", "over_base")]
        cost = minutes(row.get("cpu_seconds"))
        rows.append([row["name"], row["kind"], significant(row["perplexity"]), interval(row["interval"]), *gains, cost])
    columns = ["rung", "measured", "per token", "95 % interval", "gain over the rung before", "gain over the base"]
    show_table("The ladder (the same windows for all rungs)", [*columns, "CPU minutes"], rows)
    OUT.print(f"  [bold]{escape(verdict(rungs))}[/bold]")


def _show_ranking(ranking: dict[str, Any]) -> None:
    rows = []
    for rule in [rule for rule in ("likelihood", "energy", "model") if rule in ranking]:
        cells = [f"{significant(100 * ranking[rule][key][0])} %" for key in ("first", "pairs", "auc")]
        rows.append([rule, *cells])
    columns = ["ranked by", "real text first", "real text beats a draw", "AUC as a detector"]
    show_table(f"Real text among {ranking['candidates']} candidates", columns, rows)


def _show_text(text: dict[str, Any]) -> None:
    def shares(found: dict[str, Any]) -> list[str]:
        return [significant(None if found[n][0] is None else 100 * found[n][0]) for n in ("2", "3", "4")]

    rows = []
    for name in ("human", "base", "joint"):
        found = text[name]
        share = found["repetition"][0]
        repetition = significant(None if share is None else 100 * share)
        rows.append([name, " / ".join(shares(found["distinct"])), repetition, " / ".join(shares(found["unseen"]))])
    tokens = min(found["tokens"] for found in text.values())
    columns = ["text", "distinct 2-, 3-, 4-grams %", "repeated 4-grams %", "unseen 2-, 3-, 4-grams %"]
    show_table(f"Statistics of text ({tokens:,} tokens each)", columns, rows)


def _perplexities(by_unit: dict[str, float | None], ends: Sequence[float | None]) -> list[str]:
    return [significant(by_unit["token"]), interval(ends), significant(by_unit["word"]), significant(by_unit["byte"])]


_SHOWN = {"local": _show_local, "negatives": _show_negatives, "energy": _show_energy, "evaluation": show_evaluation}
