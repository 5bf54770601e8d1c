"""All benchmarks, one after another, each in a process of its own: what ``make bench`` runs.

    python benchmarks/run.py [--quick] [--continue] [--only decoding] [--rounds 3] [--out FOLDER]

Writes FOLDER/NAME.json, FOLDER/cost.svg and RESULTS.md beside FOLDER. Ends with the promises that are not met and with
the ratios that fell by more than a fifth beside the committed ones: then the exit status is 1.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import comparing
import showing

from freenergy.core.files import write_text

HERE = Path(__file__).parent
QUICK = HERE.parent / "runs" / "bench-quick" / "results"  # so that the committed results stay


def main():
    arguments = parsed()
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(arguments.benchmarks.glob("bench_*.py"))}
    names = [name for name in scripts if arguments.only in (None, name)]
    committed = {name: then(arguments.benchmarks / "results" / f"{name}.json") for name in names}
    failed = []
    for name in [] if arguments.resume else names:
        (arguments.out / f"{name}.json").unlink(missing_ok=True)  # else --continue would take old results for new ones
    for name in names:
        print(f"== {name}", flush=True)
        if subprocess.run(command(scripts[name], name, arguments), check=False).returncode:
            failed.append(f"{name} did not end well: its finished cases are kept, --continue goes on")
    found = {name: read(arguments.out / f"{name}.json") for name in names}
    found = {name: result for name, result in found.items() if result is not None}
    show(arguments)
    lines, good = comparing.last_lines(found, committed, not arguments.quick)
    print("", *failed, *lines, sep="\n")
    sys.exit(0 if good and not failed else 1)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="at most; dear cases take fewer")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, in minutes")
    parser.add_argument("--continue", dest="resume", action="store_true", help="leave out cases that are done")
    parser.add_argument("--only", help="one benchmark, such as decoding")
    parser.add_argument("--out", type=Path, help="folder for results")
    parser.add_argument("--benchmarks", type=Path, default=HERE, help="where the bench_*.py are")
    parser.add_argument("--page", type=Path, help="a page with marks to write the promised cases between")
    arguments = parser.parse_args()
    arguments.out = arguments.out or (QUICK if arguments.quick else arguments.benchmarks / "results")
    return arguments


def command(script, name, arguments):
    words = [sys.executable, script, "--rounds", arguments.rounds, "--out", arguments.out / f"{name}.json"]
    words += ["--quick"] * arguments.quick + ["--continue"] * arguments.resume
    return list(map(str, words))


def then(path):
    """The committed result, or the file as it is where git does not know it; None where there is neither."""
    line = ["git", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        done = None
    if done is not None and not done.returncode:
        return json.loads(done.stdout)
    return read(path)


def read(path):
    return json.loads(path.read_text()) if path.is_file() else None


def show(arguments):
    """The table and the figure of all results that there are, also of benchmarks that did not run now."""
    found = {path.stem: read(path) for path in sorted(arguments.out.glob("*.json"))}
    found = {name: result for name, result in found.items() if "finished" in result}
    write_text(arguments.out.parent / "RESULTS.md", showing.tables(found))
    figure = arguments.out / "cost.svg"
    showing.plot([row for result in found.values() for row in result["rows"]], figure)
    if arguments.page:
        showing.put_into(arguments.page, found, figure)


if __name__ == "__main__":
    main()
