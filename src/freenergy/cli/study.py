"""``freenergy study``: a blind comparison by people, from generating the texts to the report."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from freenergy.cli.root import AsJson, Device, TopK, TopP, print_json
from freenergy.core.errors import UserError

study_app = typer.Typer(no_args_is_help=True, help="Ask people which of two models writes better, blindly.")
StudyFolder = Annotated[Path, typer.Argument(metavar="STUDY", help="The folder of a study.")]
Law = Annotated[
    Literal["base", "joint"] | None,
    typer.Option(help="Base or residual (joint) model; default: residual if the run has an energy."),
]


@study_app.command()
def create(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run; its held-out text gives the prefixes.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="Another run, the same, or the word human.")],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    human: Annotated[
        list[Path] | None, typer.Option(help="Take prefixes and real text from this file; may be repeated.")
    ] = None,
    prefixes: Annotated[int, typer.Option(help="Pairs to compare.")] = 333,
    a: Law = None,
    b: Law = None,
    candidates: Annotated[int, typer.Option(help="Candidates per text of a residual model.")] = 256,
    length: Annotated[int | None, typer.Option(help="Tokens per continuation; default: as trained.")] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    temperature: Annotated[float, typer.Option(help="Softmax temperature: <1 sharpens, >1 flattens.")] = 1.0,
    votes: Annotated[int, typer.Option(help="Votes per pair.")] = 3,
    qualification: Annotated[int, typer.Option(help="Questions with a known answer before the first pair.")] = 12,
    pass_mark: Annotated[float, typer.Option(help="Share of right answers that a rater must exceed.")] = 2 / 3,
    checks: Annotated[int | None, typer.Option(help="Attention checks; default: enough for every rater.")] = None,
    pages: Annotated[int | None, typer.Option(help="Maximum pages per rater.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the texts, their order and sides.")] = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Generate the pairs: one continuation per model for the same held-out prefixes. A killed command resumes."""
    from freenergy.apps.study import Making, StudySettings
    from freenergy.apps.study import create as make
    from freenergy.cli.show import Bars
    from freenergy.core.truncation import Truncation

    settings = StudySettings(
        prefixes=prefixes,
        votes=votes,
        qualification=qualification,
        pass_mark=pass_mark,
        checks=checks,
        pages=pages,
        seed=seed,
    )
    truncation = Truncation(temperature=temperature, top_k=top_k, top_p=top_p)
    making = Making(a=a, b=b, candidates=candidates, length=length, truncation=truncation, human=tuple(human or ()))
    with Bars() as bars:
        study = make(run_a, run_b, out, settings, making, bars)
    same = sum(item.kind == "pair" and item.is_same for item in study.items)
    names = {side: model["name"] for side, model in study.models.items()}
    if as_json:
        counts = {kind: len(study.of(kind)) for kind in ("pair", "check", "qualification")}
        print_json({"study": str(out), "models": names, "same": same, **counts})
        return
    note = f"; {same} more are identical texts and will not be shown" if same else ""
    typer.echo(f"{len(study.of('pair'))} pairs of {names['a']} and {names['b']} are in {out}{note}.")
    typer.echo(f"Invite raters: freenergy study invite {out} --raters 8, then: freenergy study serve {out}")


@study_app.command()
def invite(
    folder: StudyFolder,
    raters: Annotated[int, typer.Option(help="Number of raters.")] = 8,
    address: Annotated[str, typer.Option(help="Where raters reach the study.")] = "http://127.0.0.1:8001",
    as_json: AsJson = False,
) -> None:
    """Print links for new raters. They are shown once and not stored."""
    from freenergy.apps.study import Store, Study

    if not address.startswith(("http://", "https://")) or any(char in address for char in "#?"):
        raise UserError(f"{address} is not a valid address: write it as in --address https://study.example.org")
    with Store(Study.open(folder)) as store:
        links = [(new.label, f"{address.rstrip('/')}/#{new.token}") for new in store.invite(raters)]
    if as_json:
        print_json({"invitations": [{"label": label, "link": link} for label, link in links]})
        return
    for label, link in links:
        typer.echo(f"{label}\t{link}")
    typer.echo("Send each to one person. A link lets its holder vote and cannot be printed again.", err=True)


@study_app.command()
def serve(
    folder: StudyFolder,
    host: Annotated[str, typer.Option(help="Address to listen on; put it behind HTTPS beyond loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free one.")] = 8001,
    name: Annotated[list[str] | None, typer.Option(help="A host name that raters use, as behind a proxy.")] = None,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address of a proxy whose X-Forwarded-For and -Proto are believed; may be given again."),
    ] = None,
) -> None:
    """Show the pages to raters; answers are on disk before they are acknowledged."""
    try:
        from freenergy.apps.study.web import create_study_app
        from freenergy.web.running import checked_proxies, run
        from freenergy.web.security import LOOPBACK_HOSTS, is_loopback
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}: install it with pip install 'freenergy[web]'") from None
    from freenergy.apps.study import Store, Study

    known = (*LOOPBACK_HOSTS, *(name or ()))
    with Store(Study.open(folder)) as store:
        app = create_study_app(store, hosts=known if is_loopback(host) or name else None)
        proxies = checked_proxies(trust_proxy or ())
        run(app, host=host, port=port, words=lambda words: typer.echo(words, err=True), proxies=proxies)


@study_app.command()
def report(folder: StudyFolder, as_json: AsJson = False) -> None:
    """Count the votes: preference, ties, the binomial test, dropped votes, agreement; a table and a page."""
    from freenergy.apps.study import Store, Study, summarise, write_summary

    study = Study.open(folder)
    with Store(study) as store:
        summary = summarise(store)
    paths = [str(path) for path in write_summary(study, summary)]
    page = _page(folder, summary)
    if as_json:
        print_json({**summary, "files": paths, "report": page})
        return
    _show(summary)
    typer.echo(f"All counts are in {paths[0]}" + (f", with examples in {page}." if page else "."))


def _page(folder: Path, summary: dict[str, Any]) -> str | None:
    """Write the study's page, if the report extra is installed."""
    from freenergy.report import can_draw
    from freenergy.report.study import write_study_page

    if not can_draw():
        typer.echo("for a page: pip install 'freenergy[report]'", err=True)
        return None
    return str(write_study_page(folder, summary))


def _show(summary: dict[str, Any]) -> None:
    from freenergy.cli.show import show_table
    from freenergy.report.study import sentence, simulated, tables

    if label := simulated(summary):
        typer.echo(f"SIMULATED: {label}")
    typer.echo(sentence(summary))
    for table in tables(summary):
        show_table(table.caption, table.columns, table.rows)


@study_app.command()
def simulate(
    folder: StudyFolder,
    raters: Annotated[int, typer.Option(help="Simulated raters.")] = 30,
    preference: Annotated[float, typer.Option(help="Probability of choosing B.")] = 0.6,
    attention: Annotated[float, typer.Option(help="Probability of finding a known answer.")] = 0.9,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Let simulated raters vote, permanently labelled as such: this checks the statistics, not the texts."""
    from freenergy.apps.study import Store, Study
    from freenergy.apps.study import simulate as let_vote
    from freenergy.cli.show import Bars

    with Store(Study.open(folder)) as store, Bars() as bars:
        pages = let_vote(store, raters, preference=preference, attention=attention, seed=seed, progress=bars)
    if as_json:
        print_json({"raters": raters, "pages": pages})
    else:
        typer.echo(f"{raters} simulated raters have answered {pages} pages. Count: freenergy study report {folder}")
