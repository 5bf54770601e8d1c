"""The command that serves a residual model: serve."""

import os
from pathlib import Path
from typing import Annotated

import typer

from freenergy.cli.root import RunFolder
from freenergy.core.errors import UserError


def serve(
    run_folder: RunFolder,
    host: Annotated[str, typer.Option(help="Address to listen on; needs a token beyond this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the bearer token; or set FREENERGY_TOKEN.")
    ] = None,
    queue: Annotated[int, typer.Option(help="Maximum number of waiting requests; further ones get HTTP 503.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds until a request times out.")] = 120.0,
    max_candidates: Annotated[int, typer.Option(help="Maximum candidates per request.")] = 4096,
    name: Annotated[str | None, typer.Option(help="Name of the model; default: the run's name.")] = None,
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
    check_port(port)  # before loading the model, which is slow
    limits = Limits(queue=queue, timeout_seconds=timeout, candidates=max_candidates)
    app = create_app(ModelServer(load_or_base(run_folder), limits), settings)
    run(app, host=host, port=port, words=lambda words: typer.echo(words, err=True))


def _token(file: Path | None) -> str | None:
    """Read the token from the file or the environment; every user of the machine can read a command line."""
    if file is None:
        return os.environ.get("FREENERGY_TOKEN") or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the token file {file} cannot be read ({error}): write one line of text there") from None
