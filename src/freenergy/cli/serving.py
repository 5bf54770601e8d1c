"""The command that serves a residual model: serve."""

import os
from pathlib import Path
from typing import Annotated

import typer

from freenergy.cli.root import RunFolder
from freenergy.core.errors import UserError


def serve(
    run_folder: RunFolder,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the bearer token; or put it into FREENERGY_TOKEN.")
    ] = None,
    queue: Annotated[int, typer.Option(help="Questions that may wait; one more is told to come again.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds until an answer is given up.")] = 120.0,
    most_candidates: Annotated[int, typer.Option(help="Candidates that one question may ask for.")] = 4096,
    name: Annotated[str | None, typer.Option(help="Name of the model; the run's unless given.")] = None,
) -> None:
    """Serve a run: an OpenAI-style API, and a playground to open in a browser."""
    try:
        from freenergy.web.app import create_app
        from freenergy.web.model_server import ModelServer
        from freenergy.web.running import check_port, run
        from freenergy.web.settings import Limits, ServerSettings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("freenergy"):
            raise
        raise UserError(f"serving needs {error.name}: pip install 'freenergy[web]'") from None
    from freenergy.recipes.open_run import load_or_base

    settings = ServerSettings(
        name=name or run_folder.resolve().name, host=host, token=_token(token_file), folder=run_folder
    )
    check_port(port)  # before the model is opened, which takes its time
    limits = Limits(queue=queue, timeout_seconds=timeout, candidates=most_candidates)
    app = create_app(ModelServer(load_or_base(run_folder), limits), settings)
    run(app, host=host, port=port, words=lambda words: typer.echo(words, err=True))


def _token(file: Path | None) -> str | None:
    """From the file or the environment, never from the command line, which everybody on the machine can read."""
    if file is None:
        return os.environ.get("FREENERGY_TOKEN") or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the token file {file} cannot be read ({error}): write one line of text there") from None
