"""Commands that use a residual model: sample, next, score, distil, serve."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freenergy.cli.root import AsJson, Device, RunFolder, TopK, TopP, print_json
from freenergy.core.errors import UserError

if TYPE_CHECKING:
    from freenergy.text.task import Failed, GenerationTask
    from freenergy.text.texts import Texts

Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Prefix = Annotated[str, typer.Option(help="Text to continue; empty begins a new document.")]


def sample(
    run_folder: RunFolder,
    prefix: Prefix = "",
    prefixes: Annotated[
        Path | None, typer.Option(help="Many prefixes: a text file with one per line, or .jsonl with a prefix per row.")
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", help="Number of texts for each prefix.")] = 3,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a text, or with --chunks of a chunk; as trained unless given.")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            help="How to sample: resampling (the default), rejection, metropolis, … (docs/writing.md), base for the "
            "language model alone, or module:Class."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the sampler, as in --set effective=50; may be given again."),
    ] = None,
    candidates: Annotated[int | None, typer.Option(help="Short for --set candidates=N; resampling has 256.")] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    temperature: Annotated[float | None, typer.Option(help="Below 1 is bolder, above 1 is wilder.")] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Write N chunks, each given what stands before it; as trained unless given.")
    ] = None,
    look_ahead: Annotated[
        int, typer.Option(help="Judge each candidate also by N rollouts of the next chunk; resampling only.")
    ] = 0,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write one JSON line per prefix there; killed, it resumes.")] = None,
    keep: Annotated[bool, typer.Option("--keep-candidates", help="Put every candidate into the JSON.")] = False,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text with the run's residual model, or with its base where there is no energy."""
    from freenergy.recipes.open_run import load_or_base, model_key
    from freenergy.samplers.registry import choose_sampler
    from freenergy.text.task import GenerationTask
    from freenergy.text.write import Writing

    if prefix and prefixes is not None:
        raise UserError("--prefix and --prefixes were given: give one of them")
    given = dict(_setting(text) for text in settings or ())
    short = {"candidates": candidates, "top_k": top_k, "top_p": top_p, "temperature": temperature}
    model = load_or_base(run_folder)
    chosen = choose_sampler(model.has_energy, sampler, given, short, allow_import=True)
    plan = model.plan(length, chunks)
    writing = Writing(
        sampler=chosen, num=num, chunks=plan.chunks, look_ahead=look_ahead, max_context=model.max_context,
        max_tokens=plan.max_tokens, is_shortened=plan.is_shortened,
    )  # fmt: skip
    task = GenerationTask.of(model, prefix if prefixes is None else prefixes, plan.length, seed, writing)
    if out is None:
        failed = _to_stdout(task, keep, as_json)
    else:
        failed = _to_file(task, task.key(model_key(run_folder)) | {"keep": keep}, out, keep, as_json)
    if failed:
        raise typer.Exit(2)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UserError(f"--set {text} is not KEY=VALUE: write it as in --set candidates=1000")
    return name.strip(), value.strip()


def _to_file(task: "GenerationTask", key: dict[str, Any], out: Path, keep: bool, as_json: bool) -> int:
    """Write one line per prefix; return how many failed."""
    from freenergy.cli.show import Bars
    from freenergy.core.files import resumable_jsonl

    with Bars() as bars, resumable_jsonl(out, key) as lines, bars.track("prefixes", task.count, "prefixes") as advance:
        advance(lines.done)
        for written in task.results(bars, skip=lines.done):
            lines.add(_row(written, keep))
            advance(1)
    with out.open(encoding="utf-8") as file:
        failed = sum("error" in json.loads(line) for line in file)
    if as_json:
        print_json({"out": str(out), "prefixes": task.count, "failed": failed})
    else:
        typer.echo(f"{task.count} prefixes are continued in {out}" + (f"; {failed} could not be" if failed else ""))
    return failed


def _to_stdout(task: "GenerationTask", keep: bool, as_json: bool) -> int:
    """Texts for a person, or one JSON object that is printed piece by piece."""
    from freenergy.cli.show import Bars
    from freenergy.cli.show.results import Live, show_texts
    from freenergy.text.task import Failed

    failed = 0
    head = json.dumps({"seed": task.seed, "length": task.writing.max_tokens or task.space.length})
    with Bars() as bars:
        live = Live(bars.above)
        for i, written in enumerate(task.results(bars, on_chunk=None if as_json else live.chunk)):
            row = _row(written, keep)
            failed += "error" in row
            if as_json:
                opening = head[:-1] + ', "results": [' if not i else ", "
                piece = opening + json.dumps(row, ensure_ascii=False, allow_nan=False)
                with bars.above() as console:  # bars leave whole lines alone; elsewhere the object is one line
                    console.out(piece, highlight=False, end="\n" if console.is_terminal else "")
            elif not isinstance(written, Failed):
                live.end()
                with bars.above() as console:
                    show_texts(written, console, is_shown=task.writing.chunks > 1)
            if isinstance(written, Failed):
                bars.say(f"{written.prefix[:40]!r}: {written.error}")
    if as_json:
        typer.echo("]}")
    return failed


def _row(written: "Texts | Failed", keep: bool) -> dict[str, Any]:
    from freenergy.text.task import Failed

    if isinstance(written, Failed):
        return {"prefix": written.prefix, "error": written.error}
    return written.to_json(candidates=keep)


def next_token(
    run_folder: RunFolder,
    prefix: Prefix = "",
    written: Annotated[str, typer.Option(help="What has been written of the continuation already.")] = "",
    top_k: Annotated[int, typer.Option(help="The k likeliest tokens of the base.")] = 5,
    completions: Annotated[int, typer.Option(help="Completions that are rolled out for each of them.")] = 128,
    length: Annotated[int | None, typer.Option(help="Tokens of the continuation; as trained unless given.")] = None,
    seed: Seed = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """What comes next under the base and under the residual model, side by side, with standard errors."""
    from freenergy.cli.show import Bars
    from freenergy.cli.show.results import show_next
    from freenergy.recipes.open_run import load_residual

    model = load_residual(run_folder)
    with Bars() as bars:
        found = model.next(
            prefix, written=written, top_k=top_k, completions=completions, length=length, seed=seed, progress=bars
        )
    if as_json:
        print_json({"seed": seed, **found.to_json()})
    else:
        show_next(found)


def score(
    run_folder: RunFolder,
    file: Annotated[Path, typer.Argument(help="JSON lines, each with a prefix and candidates; see docs/ranking.md.")],
    tune: Annotated[Path | None, typer.Option(help="Find the weights on these lists, which have references.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the ranked lists there; killed, it resumes.")] = None,
    ends: Annotated[bool, typer.Option("--ends", help="Each candidate is a whole text: EOS follows it.")] = False,
    weights: Annotated[
        list[str] | None, typer.Option("--weight", help="A weight, as in --weight acoustic=0.7; may be given again.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the restarts and the bootstrap.")] = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Rank lists of candidates with the residual model: exact, since Z is the same for all of a list."""
    from freenergy.cli.show import Bars, show_table
    from freenergy.cli.show.results import show_lists
    from freenergy.recipes.open_run import load_residual
    from freenergy.text.nbest import rank_file, tables

    given = dict(_weight(text) for text in weights or ())
    with Bars() as bars:
        found = rank_file(
            load_residual(run_folder),
            file,
            out=out,
            tune=tune,
            ends=ends,
            weights=given or None,
            seed=seed,
            progress=bars,
        )
    if as_json:
        print_json(found)
        return
    show_lists(found)
    for table in tables(found):
        show_table(*table)


def _weight(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise UserError(f"--weight {text} is not NAME=NUMBER: write it as in --weight energy=0.5") from None


def distil(
    run_folder: RunFolder,
    out: Annotated[Path, typer.Option(help="Folder of the distilled model, a Hugging Face checkpoint.")],
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 200,
    contexts: Annotated[int, typer.Option(help="Prefixes in a step.")] = 8,
    draws: Annotated[int, typer.Option(help="Continuations drawn for each of them.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-4,
    validate_every: Annotated[int, typer.Option(help="Steps between two looks at held-out text.")] = 25,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Tune a copy of the base until plain sampling comes near to the residual model."""
    from dataclasses import replace

    from freenergy.cli.show import Bars
    from freenergy.cli.show.results import show_distilled
    from freenergy.recipes.stages.distil import distil as work
    from freenergy.training.tasks.distil import Distilling

    default = Distilling().optimisation
    optimisation = replace(
        default, steps=steps, batch_size=contexts, learning_rate=learning_rate, validate_every=validate_every
    )
    with Bars() as bars:
        found = work(run_folder, Distilling(draws=draws, optimisation=optimisation), out, bars)
    if as_json:
        print_json(found)
    else:
        show_distilled(found, out)


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
    device: Device = None,
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
