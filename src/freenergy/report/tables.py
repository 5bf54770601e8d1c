"""The tables of a run, and its result in sentences: for the page and for the terminal."""

from dataclasses import dataclass
from math import isclose
from typing import Any, final

from freenergy.core.format import DASH, gain, gain_interval, interval, is_number, minutes, number, percent
from freenergy.evaluation.black_box import CLAIM, has_perplexity
from freenergy.evaluation.ladder import ENERGY

_BOUNDS = {"certified": "residual, certified", "upper": "residual, upper estimate", "lower": "residual, lower estimate"}
_RUNGS = {"base": "base", "tuned": "tuned base", "local": "local mix"}
_TRAINING = ("negatives", "energy")  # the stages that an energy adds to the cost of its base


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table of text cells; the first cell of a row is its name."""

    caption: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    is_prose: bool = False  # cells contain sentences, not numbers


def summary(evaluation: dict[str, Any]) -> str:
    """Return the result in one sentence."""
    joint, split, under = evaluation.get("joint"), evaluation["split"], corrected(evaluation)
    if not joint:
        base = evaluation["base"]
        return (
            f"On {base['windows']:,} {split} windows the {under}'s perplexity is {number(base['perplexity']['token'])} "
            f"per token (95 % interval {interval(base['interval']['token'])}); the run has no energy, so there is no "
            "residual model to measure."
        )
    if not has_perplexity(evaluation):
        return _nats(joint, split)
    percent, ends = joint["gain"]["percent"], joint["gain"]["interval"] or [None, None]
    where = f"On {joint['windows']:,} {split} windows the residual model's certified perplexity"
    if not is_number(percent):
        return f"{where} could not be measured."
    has_ends = all(map(is_number, ends))
    if has_ends and ends[0] <= 0 <= ends[1]:
        ends_in_words = gain_interval(ends)
        return (
            f"{where} is not shown to differ from the {under}'s (gain {gain(percent)}, 95 % interval {ends_in_words})."
        )
    side, ends = ("below", ends) if percent > 0 else ("above", [-end for end in reversed(ends)] if has_ends else ends)
    ends_in_words = gain_interval(ends) if has_ends else "unknown, with so few documents"
    return f"{where} is {abs(percent):.1f} % {side} the {under}'s (95 % interval {ends_in_words})."


def corrected(evaluation: dict[str, Any]) -> str:
    """Return what the language model that the energy corrects is called: the last rung below it."""
    rungs = [rung["name"] for rung in evaluation.get("ladder") or () if rung["name"] != ENERGY]
    return _RUNGS.get(rungs[-1] if rungs else "base", "base")


def _nats(joint: dict[str, Any], split: str) -> str:
    """Return the result over a base that only samples."""
    sure = joint["gain"]
    where = f"On {joint['windows']:,} {split} texts of {joint['documents']:,} documents the residual model gains"
    found = f"{number(sure['nats_per_sequence'])} over its base, which only samples"
    ends = f"95 % interval {interval(sure['nats_interval'])}, at most {number(sure['ceiling_nats'])}"
    return f"{where} {found}: {CLAIM}; {ends}."


def verdicts(evaluation: dict[str, Any]) -> list[str]:
    """Return what a reader must know before believing the numbers."""
    found = [(evaluation.get(name) or {}).get("verdict") for name in ("joint", "sequential")]
    return [*(_sentence(words) for words in found if words), *against_baselines(evaluation, are_beaten=False)]


def against_baselines(evaluation: dict[str, Any], *, are_beaten: bool) -> list[str]:
    """Return the verdicts on baselines: those that the residual model is shown to beat, or the others."""
    found = []
    for name, baseline in (evaluation.get("baselines") or {}).items():
        ends = (baseline.get("against_joint") or {}).get("interval") or [None, None]
        is_worse = all(map(is_number, ends)) and ends[1] < 0
        if baseline.get("verdict") and is_worse == are_beaten:
            found.append(_sentence(f"against {name}, {baseline['verdict']}"))
    return found


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:].rstrip(".") + "."


def headline(evaluation: dict[str, Any]) -> ReportTable:
    """Return the perplexity of every model, per token and in units that are comparable across tokenizers."""
    if not has_perplexity(evaluation):
        return nats(evaluation)
    rows = [_base(evaluation)]
    joint = evaluation.get("joint")
    if joint:
        if not _are_same(joint.get("base_perplexity"), evaluation["base"]["perplexity"]["token"]):
            cells = [number(joint.get("base_perplexity")), interval(joint.get("base_interval")), *[DASH] * 5]
            rows.append([f"{corrected(evaluation)}, on the residual model's {joint['windows']:,} windows", *cells])
        rows += [_joint(joint, evaluation.get("cost") or {}, bound) for bound in _BOUNDS]
        rows += [_sequential(evaluation["sequential"])] if evaluation.get("sequential") else []
    rows += [_baseline(name, found) for name, found in (evaluation.get("baselines") or {}).items()]
    return ReportTable(
        caption=f"Perplexity on {evaluation['windows']:,} windows of {evaluation['documents']:,} documents, "
        f"{evaluation['split']}; lower is better",
        columns=("model", "per token", "95 % interval", "per word", "per byte",
                 f"gain over the {corrected(evaluation)}", "95 % interval", "CPU minutes"),
        rows=rows,
    )  # fmt: skip


def nats(evaluation: dict[str, Any]) -> ReportTable:
    """Return what is certified over a base that only samples."""
    joint, cost = evaluation["joint"], evaluation.get("cost") or {}
    sure, spent = joint["gain"], [cost.get(stage, {}).get("cpu_seconds") for stage in _TRAINING]
    ends, n = interval(sure["nats_interval"]), joint["draws"] + 1
    paid = minutes(sum(spent)) if all(map(is_number, spent)) else DASH
    row = ["residual, certified", number(sure["nats_per_sequence"]), ends, number(sure["ceiling_nats"]), paid]
    return ReportTable(
        caption=f"Gain over a base that only samples, on {joint['windows']:,} {evaluation['split']} texts of "
        f"{joint['documents']:,} documents: {CLAIM}",
        columns=("model", "nats per text", "95 % interval", f"log {n:,}, the most that can be certified",
                 "CPU minutes"),
        rows=[row],
    )  # fmt: skip


def _are_same(a: Any, b: Any) -> bool:
    """Whether both perplexities of the base were measured on the same windows."""
    return is_number(a) and is_number(b) and isclose(a, b, rel_tol=1e-9)


def _base(evaluation: dict[str, Any]) -> list[str]:
    base = evaluation["base"]
    per = base["perplexity"]
    costs = evaluation.get("cost") or {}
    spent = [costs[rung].get("cpu_seconds") for rung in _RUNGS if rung in costs]
    cost = sum(spent) if spent and all(map(is_number, spent)) else None
    found = [number(per["token"]), interval(base["interval"]["token"]), number(per["word"]), number(per["byte"])]
    return [corrected(evaluation), *found, DASH, DASH, minutes(cost)]


def _joint(joint: dict[str, Any], cost: dict[str, Any], bound: str) -> list[str]:
    found = [number(joint["perplexity"][bound]), interval(joint["interval"][bound])]
    found += [number((joint.get(unit) or {}).get(bound)) for unit in ("per_word", "per_byte")]
    if bound != "certified":
        return [_BOUNDS[bound], *found, DASH, DASH, DASH]
    spent = [cost.get(stage, {}).get("cpu_seconds") for stage in _TRAINING]
    found += [gain(joint["gain"]["percent"]), gain_interval(joint["gain"]["interval"])]
    paid = f"+ {minutes(sum(spent))}" if all(map(is_number, spent)) else DASH
    return [_BOUNDS[bound], *found, paid]


def _sequential(found: dict[str, Any]) -> list[str]:
    cells = [number(found["perplexity"]), interval(found["interval"]), DASH, DASH]
    gained = [gain(found["gain"]["percent"]), gain_interval(found["gain"]["interval"]), DASH]
    return [f"residual, certified for {found['sampler']}", *cells, *gained]


def _baseline(name: str, found: dict[str, Any]) -> list[str]:
    against = found.get("against_base") or {}
    per_unit = [number(found.get(unit)) for unit in ("per_word", "per_byte")]
    gains = [gain(against.get("percent")), gain_interval(against.get("interval"))]
    own = [number(found["perplexity"]), interval(found.get("interval")), *per_unit]
    return [name, *own, *gains, minutes(found.get("cpu_seconds"))]


def rungs(rows: list[dict[str, Any]]) -> ReportTable:
    """Return the ladder: what each rung gains over the one below it, on the same windows."""
    cells = []
    for row in rows:
        below, over_base = row.get("over_below") or {}, row.get("over_base") or {}
        cells.append([
            row["name"], row["kind"], number(row["perplexity"]), interval(row["interval"]),
            gain(below.get("percent")), gain_interval(below.get("interval")), gain(over_base.get("percent")),
            minutes(row.get("cpu_seconds")),
        ])  # fmt: skip
    return ReportTable(
        caption="The ladder: each rung stands on the one above it in this table; the same windows for all",
        columns=("rung", "measured", "per token", "95 % interval", "gain over the rung before", "95 % interval",
                 "gain over the base", "CPU minutes"),
        rows=cells,
    )  # fmt: skip


def ranking(found: dict[str, Any]) -> ReportTable:
    """Return how well each rule tells real text from draws."""
    names = {"likelihood": "the base's likelihood", "energy": "the energy", "model": "likelihood and energy"}
    known = {rule: title for rule, title in names.items() if rule in found}  # not all without probabilities
    rows = [[title, *(share(found[rule][key]) for key in ("first", "pairs", "auc"))] for rule, title in known.items()]
    chance = found["chance"]
    rows.append(["chance", *(percent(chance[key]) for key in ("first", "pairs", "auc"))])
    return ReportTable(
        caption=f"Telling real text from draws ({found['candidates']} candidates for each prefix)",
        columns=("ranked by", "real text comes first", "real text beats a draw", "AUC as a detector"),
        rows=rows,
    )


def diagnostics(joint: dict[str, Any]) -> ReportTable:
    """Return the diagnostics of the estimates, each with its meaning."""
    Z, sure = joint.get("log_partition") or {}, joint["gain"]
    nats = f"{number(sure['nats_per_sequence'])} ({interval(sure.get('nats_interval'))})"
    rows = [
        ["certified gain, nats a sequence", nats, "what resampling is sure to gain over the base, in expectation"],
        ["certified for the sampler", joint.get("sampler", DASH), "whose text the certificate is of"],
        ["maximum that can be certified", gain(sure.get("ceiling_percent")), "log n nats with n candidates, for "
         "every chunk; a gain near to it asks for more draws"],
        ["draws", number(joint["draws"]), "continuations of the base, per window or chunk, that Z is estimated from"],
        ["effective draws", number(joint["ess"]), "how many equal weights carry as much information; few are bad"],
        ["largest share", percent(joint["largest_share"]), "of the weight on one draw; near 100 % one draw decides"],
        ["Pareto k̂", number(joint["k_hat"]), "how heavy the tail of the weights is; above 0.7 no mean can be trusted"],
        ["log Z, lower", number(Z.get("lower")), "below the truth in expectation, mean over windows"],
        ["log Z, upper", number(Z.get("upper")), "above the truth in expectation for enough draws"],
        ["log Z, jackknife", f"{number(Z.get('jackknife'))} ± {number(Z.get('standard_error'))}", "in between, "
         "with its standard error"],
        ["accuracy in pairs", percent(joint.get("pair_accuracy")), "how often real text has the lower energy of two, "
         "the other a draw; 50 % is chance"],
        ["accuracy by sign", percent(joint.get("nce_accuracy")), "how often the sign of the energy is right"],
    ]  # fmt: skip
    kept = [row for row in rows if row[1].strip("– ±()")]
    return ReportTable(
        caption="Can the estimates be believed?", columns=("diagnostic", "value", "meaning"), rows=kept, is_prose=True
    )


def stages(records: dict[str, dict[str, Any]]) -> ReportTable:
    """Return cost and fingerprint of each stage."""
    rows = []
    for name, record in records.items():
        digest = record.get("summary", {}).get("fingerprint", DASH)
        times = [minutes(record.get("seconds")), minutes(record.get("cpu_seconds"))]
        rows.append([name, *times, record.get("key", DASH), digest])
    columns = ("stage", "minutes", "CPU minutes", "key of its inputs", "fingerprint of its result")
    return ReportTable(caption="Stages: cost and fingerprints", columns=columns, rows=rows)


def versions(records: dict[str, dict[str, Any]]) -> ReportTable:
    """Return the packages that the stages ran with; all versions if they differ."""
    found: dict[str, list[str]] = {}
    for record in records.values():
        for package, version in record.get("versions", {}).items():
            if str(version) not in found.setdefault(package, []):
                found[package].append(str(version))
    rows = [[package, ", ".join(seen)] for package, seen in found.items()]
    return ReportTable(caption="Versions", columns=("package", "version"), rows=rows, is_prose=True)


def share(cell: list[Any]) -> str:
    """Format a share with its interval."""
    value, low, high = cell
    if not (is_number(low) and is_number(high)):
        return percent(value)
    return f"{percent(value)} ({100 * low:.1f}–{100 * high:.1f})"
