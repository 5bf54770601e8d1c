"""The tables of a tagger and its result in a sentence: for the page and for the terminal."""

from typing import Any

from freenergy.report.tables import ReportTable


def sentence(found: dict[str, Any]) -> str:
    """Return the result in one sentence.

    >>> sentence({"rates": [["F1 %", [93.5, 93.0, 94.0]]], "sentences": 2012, "words": 47377, "spans": 23852})
    'On 2,012 test sentences (47,377 words, 23,852 spans) F1 is 93.50 % (95 % interval 93.00 to 94.00).'
    """
    name, (value, low, high) = found["rates"][0]
    spans = f", {found['spans']:,} spans" if found["spans"] else ""
    ends = f" (95 % interval {low:.2f} to {high:.2f})" if low is not None else ""
    counts = f"On {found['sentences']:,} test sentences ({found['words']:,} words{spans})"
    return f"{counts} {name.removesuffix(' %')} is {value:.2f} %{ends}."


def rate_table(found: dict[str, Any]) -> ReportTable:
    """Return the rates with their intervals."""
    rows = [
        [name, f"{value:.2f}", "" if low is None else f"{low:.2f} to {high:.2f}"]
        for name, (value, low, high) in found["rates"]
    ]
    if found["nats_per_word"] is not None:
        bound = "" if found["nats_are_exact"] else ", a lower bound: the beam's log Z is one"
        rows.append([f"nats per word of the true tags{bound}", f"{found['nats_per_word']:.4f}", ""])
    return ReportTable(
        caption="Rates on the test sentences; spans are counted as seqeval does, intervals are over sentences",
        columns=("rate", "value", "95 % interval"),
        rows=rows,
    )


def confusion_table(found: dict[str, Any]) -> ReportTable:
    """Return the commonest wrong tags."""
    rows = [[true, predicted, f"{times:,}"] for true, predicted, times in found["confusions"]]
    return ReportTable(caption="Commonest confusions", columns=("true", "predicted", "words"), rows=rows)
