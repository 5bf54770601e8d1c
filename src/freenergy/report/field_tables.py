"""The tables of a random field, for the page and for the terminal."""

from typing import Any

from freenergy.core.format import interval, number
from freenergy.report.tables import ReportTable

_FORMS = {"by length": "field, one constant per length (TRF)", "global": "field, one constant (GN-ELM)"}
_WORDS = {
    "certified": "certified",
    "estimate": "importance estimate",
    "lower": "with log Z from below",
    "upper": "with log Z from above",
    "jackknife": "jackknife",
}


def is_field(evaluation: dict[str, Any]) -> bool:
    """Return whether an evaluation is one of a random field."""
    return evaluation.get("family") == "random-field"


def of_pairs(evaluation: dict[str, Any]) -> ReportTable:
    """Return the exact perplexity of a field of pairs, next to its estimates."""
    exact = evaluation["exact"]
    rows = [
        ["base", number(exact["base"][0]), interval(exact["base"][1:]), "exact", ""],
        ["field of pairs", number(exact["perplexity"][0]), interval(exact["perplexity"][1:]), "exact", ""],
    ]
    for each in evaluation["estimates"]:
        for name, words in (("perplexity", "importance estimate"), ("certified", "certified")):
            value = each[name]
            how = f"{words}, {each['draws']:,} draws"
            rows.append(["field of pairs", number(value[0]), interval(value[1:]), how, number(each["ess"])])
    for rival in evaluation["rivals"]:
        rows.append([rival["name"], number(rival["perplexity"][0]), interval(rival["perplexity"][1:]), "exact", ""])
    columns = ("model", "perplexity", "95 % interval", "how it is known", "effective draws")
    caption = f"Perplexity per token of {exact['sentences']:,} {evaluation['split']} sentences, EOS counted"
    return ReportTable(caption=caption, columns=columns, rows=rows)


def all_tables(evaluation: dict[str, Any]) -> list[ReportTable]:
    """Return the tables of an evaluation of either form."""
    if evaluation.get("form") == "pairs":
        return [of_pairs(evaluation)]
    return [perplexities(evaluation), gains(evaluation), normaliser(evaluation)]


def perplexities(evaluation: dict[str, Any]) -> ReportTable:
    """Return the perplexity of base, field and rivals, with intervals over sentences."""
    found = evaluation["field"]
    rows = [["base", number(found["base"][0]), interval(found["base"][1:]), "exact"]]
    for form, title in _FORMS.items():
        for name, words in _WORDS.items():
            if name in found[form]:
                value = found[form][name]
                rows.append([title, number(value[0]), interval(value[1:]), words])
    for rival in evaluation["rivals"]:
        rows.append([rival["name"], number(rival["perplexity"][0]), interval(rival["perplexity"][1:]), "exact"])
    columns = ("model", "perplexity", "95 % interval", "how it is known")
    caption = f"Perplexity per token of {found['sentences']:,} {evaluation['split']} sentences, EOS counted"
    return ReportTable(caption=caption, columns=columns, rows=rows)


def gains(evaluation: dict[str, Any]) -> ReportTable:
    """Return certified nats per sentence over the base and the rivals."""
    found = evaluation["field"]
    rows = [["base", _FORMS[form], number(value[0]), interval(value[1:])] for form, value in found["gain"].items()]
    for rival in evaluation["rivals"]:
        gain = rival["field gains"]
        rows.append([rival["name"], _FORMS["by length"], number(gain[0]), interval(gain[1:])])
    columns = ("over", "form", "nats per sentence", "95 % interval")
    return ReportTable(caption="Certified gain of the field", columns=columns, rows=rows)


def normaliser(evaluation: dict[str, Any]) -> ReportTable:
    """Return log Z with its bounds and diagnostics."""
    z = evaluation["field"]["log Z"]
    names = ("lower", "upper", "jackknife", "standard error", "ess", "draws", "k_hat")
    titles = ("from below", "from above", "jackknife", "standard error", "effective draws", "draws", "k̂")
    return ReportTable(
        caption="log Z relative to the base, by fresh draws",
        columns=titles,
        rows=[[number(z[name]) for name in names]],
    )


def penalties(summary: dict[str, Any]) -> ReportTable:
    """Return the penalties that were tried: the loss falls on while the fresh draws stop to count."""
    if summary.get("form") == "pairs":
        exact = [[f"{each['l2']:g}", number(each["validation"])] for each in summary["tried"]]
        return ReportTable(caption="Penalties", columns=("l2", "exact validation perplexity"), rows=exact)
    rows = [
        [f"{each['l2']:g}", number(each["loss"]), number(each["gain"]), f"{each['ess']:,.0f} of {each['draws']:,}"]
        for each in summary["tried"]
    ]
    columns = ("l2", "training loss", "certified nats on validation", "effective fresh draws")
    return ReportTable(caption="Penalties", columns=columns, rows=rows)


def of_fit(summary: dict[str, Any]) -> list[ReportTable]:
    """Return the tables of stage ``field``: penalties of the features, validations of the network."""
    found = [penalties(summary)] if summary["tried"] else []
    return [*found, network(summary)] if "curve" in summary else found


def network(summary: dict[str, Any]) -> ReportTable:
    """Return what each validation of a network found."""
    rows = [
        [str(each["step"]), f"{each['cpu_seconds']:,.0f}", number(each["gain"]), f"{each['ess']:,.0f}"]
        for each in summary["curve"]
    ]
    columns = ("step", "CPU seconds of fitting", "certified nats on validation", "effective fresh draws")
    return ReportTable(caption="Training of the network", columns=columns, rows=rows)


def sentence(evaluation: dict[str, Any]) -> str:
    """Return the result in one sentence."""
    if evaluation.get("form") == "pairs":
        exact = evaluation["exact"]
        return (
            f"On {exact['sentences']:,} {evaluation['split']} sentences the perplexity of the field of pairs is "
            f"exactly {number(exact['perplexity'][0])}, that of its bigram model {number(exact['base'][0])}."
        )
    found = evaluation["field"]
    base, best = found["base"][0], found["by length"]["certified"][0]
    low, high = found["gain"]["by length"][1:]
    where = f"On {found['sentences']:,} {evaluation['split']} sentences"
    if low <= 0 <= high:
        return f"{where} the field's certified perplexity {number(best)} is not shown to differ from the base's."
    side = "below" if best < base else "above"
    return (
        f"{where} the field's certified perplexity is {number(best)}, {abs(1 - best / base):.1%} {side} the base's "
        f"{number(base)} ({number(found['gain']['by length'][0])} nats per sentence, 95 % interval "
        f"{interval([low, high])})."
    )
