"""The command line. Results go to stdout, progress and words to stderr; bad input is one sentence and status 2.

Heavy modules are imported inside the commands, so that ``--help`` is quick.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freenergy.errors import UserError

if TYPE_CHECKING:
    from freenergy.console import Bars
    from freenergy.pipeline import Base
    from freenergy.protocols import Truncation
    from freenergy.randomness import Rng

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Energy-based models of text: train, measure, write.",
)

_AT_ONCE = 64  # continuations drawn between two movements of the bar
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A TOML file, FILE.py:FUNCTION, or a name from `freenergy recipes`.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME unless given.")] = None,
    stage: Annotated[str | None, typer.Option(help="Stop after this stage, such as base or energy.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting, as in --set base.preset=small.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Do every stage of a recipe; what is done already is not done again."""
    from freenergy.config import load_recipe
    from freenergy.console import Bars, show_stage
    from freenergy.pipeline import run as run_recipe

    loaded = load_recipe(recipe, changes or [])
    folder = out or Path("runs") / loaded.name
    results: dict[str, Any] = {}
    with Bars() as bars:
        for result in run_recipe(loaded, folder, stage=stage, progress=bars):
            results[result.name] = result.summary | {"seconds": result.seconds, "cached": result.was_cached}
            if not as_json:
                show_stage(result)
        page = _page(folder, bars) if stage is None else None
    if as_json:
        _print({"run": str(folder), "stages": results, "report": None if page is None else str(page)})
        return
    if page is not None:
        typer.echo(f"What it has shown, with figures: open {page} in a browser.")
    typer.echo(f"The run is in {folder}. Write with it: freenergy sample {folder} --prefix 'Once upon a time'")


def _page(folder: Path, bars: "Bars") -> Path | None:
    """The report of a finished run, where what draws it is installed."""
    from freenergy.pipeline import Run
    from freenergy.report import can_draw, write_report

    if can_draw():
        return write_report(Run.open(folder), bars)
    bars.say(f"for a page with figures: pip install 'freenergy[report]', then freenergy report {folder}")
    return None


@app.command()
def sample(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    prefix: Annotated[str, typer.Option(help="Text to go on from; empty begins a new document.")] = "",
    num: Annotated[int, typer.Option(help="How many continuations.")] = 3,
    length: Annotated[int, typer.Option(help="At most this many tokens.")] = 40,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens at each step.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this total probability.")] = None,
    temperature: Annotated[float, typer.Option(help="Below 1 is bolder, above 1 is wilder.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Continue a text with the run's base language model."""
    from freenergy.console import show_samples
    from freenergy.pipeline import load_base
    from freenergy.protocols import Truncation
    from freenergy.randomness import Rng

    truncation, rng = Truncation(temperature=temperature, top_k=top_k, top_p=top_p), Rng(seed)
    rows = _draw(load_base(run_folder), prefix, num, length, rng, truncation)
    if as_json:
        _print({"prefix": prefix, "seed": seed, "continuations": rows})
    else:
        show_samples(prefix, rows)


def _draw(
    base: "Base", prefix: str, num: int, length: int, rng: "Rng", truncation: "Truncation"
) -> list[dict[str, Any]]:
    """Draw in parts, so that the bar moves; candidates own their randomness, so the parts change nothing else."""
    from freenergy.console import Bars
    from freenergy.protocols import Draws
    from freenergy.sequences import Sequences, SequenceSpace

    if num < 1:
        raise UserError(f"{num} continuations were asked for: ask for at least one")
    lm, tokenizer = base
    space = SequenceSpace(vocab_size=tokenizer.vocab_size, length=length, eos=tokenizer.eos)
    contexts = Sequences.from_lists([tokenizer.encode(prefix)])
    parts = []
    with Bars() as bars, bars.track("drawing", num, "continuations") as advance:
        for n in range(0, num, _AT_ONCE):
            part = min(_AT_ONCE, num - n)
            parts.append(lm.sample(contexts, part, space, rng.shift(candidates=n), truncation))
            advance(part)
    draws = Draws.cat(parts, dim=1)
    columns = (draws.x.lists()[0], draws.log_base[0].tolist(), draws.log_proposal[0].tolist())
    return [
        {"text": tokenizer.decode(x), "tokens": len(x), "log_base": log_base, "log_proposal": log_proposal}
        for x, log_base, log_proposal in zip(*columns, strict=True)
    ]


@app.command()
def evaluate(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with an energy.")],
    text: Annotated[
        list[Path] | None, typer.Option(help="Measure on this text (.txt, .jsonl, .parquet); may be given again.")
    ] = None,
    windows: Annotated[int | None, typer.Option(help="Measure on this many windows.")] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Candidates a window, the true text among them: one more than the draws.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Measure on the run's test or validation text.")] = None,
    baselines: Annotated[bool, typer.Option("--baselines", help="Measure the baselines on this text too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure base, joint model and baselines, with bounds; without options, show what the run has measured."""
    from freenergy.console import Bars, show_evaluation
    from freenergy.pipeline.evaluating import Question
    from freenergy.pipeline.evaluating import evaluate as measure

    question = Question(
        texts=tuple(text or ()), split=split, windows=windows, candidates=candidates, baselines=baselines
    )
    with Bars() as bars:
        summary = measure(run_folder, question, bars)
    if as_json:
        _print(summary)
    else:
        show_evaluation(summary)


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    as_json: AsJson = False,
) -> None:
    """Write one page with the tables, figures and examples of a run."""
    from freenergy.console import Bars
    from freenergy.pipeline import Run
    from freenergy.report import write_report

    with Bars() as bars:
        path = write_report(Run.open(run_folder), bars)
    if as_json:
        _print({"report": str(path)})
    else:
        typer.echo(f"The report is in {path}: open it in a browser.")


@app.command()
def cite(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    as_json: AsJson = False,
) -> None:
    """Print the references of the methods that a run has used, as BibTeX."""
    from freenergy.pipeline import Run
    from freenergy.report import cite as references

    found = references(Run.open(run_folder))
    if as_json:
        _print({"bibtex": found})
    else:
        typer.echo(found)


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the recipes that come with the package."""
    from freenergy.config import recipes as known
    from freenergy.console import show_table

    found = known()
    if as_json:
        _print({"recipes": [{"name": name, "about": about} for name, about in found.items()]})
    else:
        show_table("Recipes: freenergy run NAME", ["name", "about"], [list(row) for row in found.items()])


@app.command()
def resources(as_json: AsJson = False) -> None:
    """List the texts and models that can be used by name."""
    from freenergy.console import show_table
    from freenergy.resources import listing

    rows = listing()
    if as_json:
        _print({"resources": rows})
        return
    for row in rows:
        row |= {"size": f"{row['size'] / 1e6:.1f} MB", "cached": "yes" if row["cached"] else "no"}
    columns = ["name", "kind", "size", "cached", "licence", "description"]
    show_table("Resources", columns, [[str(row[column]) for column in columns] for row in rows])


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and whether it works: a self-test of some ten seconds."""
    from freenergy.console import show_table
    from freenergy.doctor import examine

    findings = examine()
    ok = all(check["ok"] for check in findings["checks"])
    if as_json:
        _print(findings | {"ok": ok})
    else:
        show_table(
            "What there is", ["what", "value"], [[key, str(value)] for key, value in findings["machine"].items()]
        )
        rows = [["ok" if check["ok"] else "FAILED", check["name"], check["detail"]] for check in findings["checks"]]
        show_table("Self-test", ["", "check", "seen"], rows)
    raise typer.Exit(0 if ok else 1)


def _print(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def main() -> None:
    """Entry point: one sentence for bad input, never a traceback for it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of other libraries would cross ours
    try:
        app()
    except UserError as error:
        if "--json" in sys.argv:
            _print({"error": str(error)})
        print(f"freenergy: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("freenergy: interrupted; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
