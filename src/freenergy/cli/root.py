"""The command line. Results go to stdout, progress and messages to stderr; bad input is one sentence and status 2.

Heavy modules are imported inside the commands, so that ``--help`` is quick.
"""

import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from freenergy import __version__
from freenergy.core.errors import UserError
from freenergy.core.progress import Interrupted, handle_sigterm

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_INTERRUPTED = 130
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, as in --set base.preset=small; may be given again.")
]


def _computing_on(context: Any, name: str | None) -> str | None:
    """Compute the rest of the command on this device."""
    if name is not None and not context.resilient_parsing:
        from freenergy.core.device import computing_on

        context.with_resource(computing_on(name))
    return name


Device = Annotated[
    str | None,
    typer.Option(
        help="Where networks compute: auto (a GPU if there is one), cpu, cuda, cuda:1 or mps; else the recipe's.",
        callback=_computing_on,
    ),
]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens at each step.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens of this total probability.")]


def _print_version(is_requested: bool) -> bool:
    if is_requested:
        typer.echo(f"freenergy {__version__}")
        raise typer.Exit
    return is_requested  # typer stores it as the option's value


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Energy-based models of text: train, measure, write."""


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


def main() -> None:
    """Run the command line: bad input gives one sentence and no traceback, SIGTERM a message."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of other libraries would overlap ours
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # performance advice, from every rank
    for stream in (sys.stdout, sys.stderr):  # of a terminal that cannot show a character: a question mark
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream.encoding.lower() != "utf-8" else stream.errors)
    try:
        with handle_sigterm():
            app()
    except Interrupted:
        if not _is_heard():
            return
        if "--json" in sys.argv:
            print_json({"stopped": True})
        print("freenergy: stopped on request; run the same command again to resume", file=sys.stderr)
    except UserError as error:
        refuse(str(error))
    except OSError as error:
        place = f" ({str(error.filename)[:200]})" if error.filename else ""
        refuse(f"{error.strerror or error}{place}: check that file or folder and its permissions, then run it again")
    except SystemExit as ended:
        if ended.code == _INTERRUPTED and _is_heard():  # typer has caught the KeyboardInterrupt
            print("freenergy: interrupted; run the same command again to resume", file=sys.stderr)
        raise


def announce_code(recipe: str) -> None:
    """Say that the code of a file is about to run, if the name of a recipe asks for that."""
    from freenergy.recipes.load import is_code

    if is_code(recipe):
        typer.echo(f"running the code of {recipe.rpartition(':')[0]} to make the recipe", err=True)


def refuse(sentence: str, **more: Any) -> NoReturn:
    """Print the error and exit with status 2; ``more`` is added to the JSON output."""
    if _is_heard():
        if "--json" in sys.argv:
            print_json({"error": sentence} | more)
        print(f"freenergy: {sentence}", file=sys.stderr)
    sys.exit(2)


def _is_heard() -> bool:
    """Whether this process reports errors: of several ranks that fail together, only one does."""
    if "WORLD_SIZE" not in os.environ:
        return True
    from freenergy.training.distributed.ranks import speaks

    return speaks()
