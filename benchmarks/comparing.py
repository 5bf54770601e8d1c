"""What is said of new results beside the committed ones, and beside what we promise.

fell by  =  1 − ratio now / ratio then,      seen where it is more than 20 %
"""

FALL = 0.2
AT_LEAST = {"needs": "ratio", "needs_share": "share"}
AT_MOST = {"at_most_seconds": "seconds", "at_most_megabytes": "megabytes"}


def key(row):
    return row["case"], row["way"]


def named(row):
    return f"{row['case']}, {row['way']}"


def regressions(name, now, then, whole):
    """Lines on ratios that fell, and, where the ``whole`` benchmark ran, on those that are not there any more."""
    found = {key(row): row for row in now}
    lines = []
    for old in then:
        if "ratio" not in old:
            continue
        new = found.get(key(old))
        if new is None or "ratio" not in new:
            lines += [f"{name}: {named(old)} was {old['ratio']:.2f}× and is missing"] if whole else []
        elif new["ratio"] < (1 - FALL) * old["ratio"]:
            fall = 1 - new["ratio"] / old["ratio"]
            lines.append(f"{name}: {named(old)} fell by {fall:.0%}, from {old['ratio']:.2f}× to {new['ratio']:.2f}×")
    return lines


def shared(now, then):
    """How many ratios there are in both."""
    return len({key(row) for row in now if "ratio" in row} & {key(row) for row in then if "ratio" in row})


def unmet(name, rows):
    """A line for every promise that does not hold."""
    lines = []
    for row in rows:
        for words, promises, sign in (("at least", AT_LEAST, 1), ("at most", AT_MOST, -1)):
            for promise, what in promises.items():
                if promise in row and sign * row[what] < sign * row[promise]:
                    lines.append(f"{name}: {named(row)}: {what} {row[what]:.3g}, promised {words} {row[promise]:.3g}")
    return lines


def other_processors(results, committed):
    """Ratios of two kinds of processor are two things."""
    lines = []
    for name, result in results.items():
        old, new = ((each or {}).get("processor") for each in (committed.get(name), result))
        if old and new and old != new:
            lines.append(f"{name}: the committed results are of another processor ({old}; this is {new})")
    return lines


def last_lines(results, committed, whole):
    """The end of a run, and whether it is a good one.

    ``results`` and ``committed`` are what benchmarks wrote, by name; of a new one nothing is committed (None).
    """
    now = {name: result["rows"] for name, result in results.items()}
    then = {name: (committed.get(name) or {}).get("rows", []) for name in results}
    falls = [line for name in now for line in regressions(name, now[name], then[name], whole)]
    broken = [line for name, rows in now.items() for line in unmet(name, rows)]
    counts = {name: shared(now[name], then[name]) for name in now}
    lines = [f"promise not met: {line}" for line in broken] or ["all promises are met"]
    lines += [f"regression: {line}" for line in falls]
    lines += [f"{name}: there are no committed results to compare with" for name, count in counts.items() if not count]
    lines += other_processors(results, committed)
    if (count := sum(counts.values())) and not falls:
        lines.append(f"all {count} ratios within {FALL:.0%} of the committed ones".replace("%", " %"))
    return lines, not falls and not broken
