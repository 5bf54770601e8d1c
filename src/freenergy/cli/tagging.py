"""The command of taggers: tag, which samples and scores too."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freenergy.cli.root import AsJson, Device, RunFolder, print_json
from freenergy.core.errors import UserError

if TYPE_CHECKING:
    from freenergy.tagging.sentences import Sentence
    from freenergy.tagging.tagger import Tagger


def tag(
    run_folder: RunFolder,
    file: Annotated[
        Path | None, typer.Argument(help="Sentences: a table (CoNLL), .conllu or .jsonl, also .gz.")
    ] = None,
    text: Annotated[str, typer.Option(help="One sentence instead of a file: words apart by blanks.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="Write the tagged sentences there, in the format of its name.")
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", help="Also draw this many taggings of each sentence.")] = 0,
    score: Annotated[bool, typer.Option("--score", help="Report log p of the tags that the file has.")] = False,
    marginals: Annotated[bool, typer.Option("--marginals", help="Add the probability of each tag.")] = False,
    seed: Annotated[int, typer.Option(help="The same seed draws the same taggings.")] = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Tag sentences with the run's tagger; draw taggings with --num, score given tags with --score."""
    from freenergy.recipes.open_run import load_tagger
    from freenergy.tagging.formats import Columns, format_of, read_sentences, to_lines, write_sentences
    from freenergy.tagging.sentences import Sentence

    tagger, data = load_tagger(run_folder)
    if (file is None) == (not text.split()):
        raise UserError("give a file of sentences or --text, one of them")
    if score and file is None:
        raise UserError("--score needs a file with tags: give one")
    layout = Columns(word=data.word, tag=data.tag if score else None, columns=data.columns)
    sentences = [Sentence(tuple(text.split()))] if file is None else read_sentences(file, "auto", layout)
    rows = _rows(tagger, sentences, num=num, score=score, marginals=marginals, seed=seed)
    tags = [row["tags"] for row in rows]
    if out is not None:
        write_sentences(out, sentences, tags, column=data.tag)
    if as_json:
        print_json({"sentences": rows, "out": None if out is None else str(out)})
    elif out is not None:
        typer.echo(f"{len(rows):,} sentences are tagged in {out}")
    elif num or score or marginals:
        _show(rows)
    else:
        kind = "conll" if file is None else format_of(file)
        for one, own in zip(sentences, tags, strict=True):
            typer.echo("\n".join(to_lines(one, own, kind, data.tag)) + ("" if kind == "jsonl" else "\n"))


def _rows(
    tagger: "Tagger", sentences: "list[Sentence]", *, num: int, score: bool, marginals: bool, seed: int
) -> list[dict[str, Any]]:
    """What is asked for each sentence."""
    from freenergy.core.rng import Rng

    rows: list[dict[str, Any]] = [
        {"words": list(one.words), "tags": tags} for one, tags in zip(sentences, tagger.tag(sentences), strict=True)
    ]
    if marginals:
        for row, p in zip(rows, tagger.marginals(sentences), strict=True):
            numbers = [tagger.tags.number(tag) for tag in row["tags"]]
            row["probabilities"] = [own[k].item() for own, k in zip(p, numbers, strict=True)]
    if score:
        for row, one, found in zip(rows, sentences, tagger.score(sentences), strict=True):
            row |= {"given": list(one.tags), "log_prob": found.log_prob, "is_exact": found.is_exact}
    if num:
        for row, drawn in zip(rows, tagger.sample(sentences, num, Rng(seed)), strict=True):
            row["samples"] = drawn
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        p = row.get("probabilities", [None] * len(row["words"]))
        for word, own, probability in zip(row["words"], row["tags"], p, strict=True):
            typer.echo(f"{word}\t{own}" + ("" if probability is None else f"\t{probability:.4f}"))
        if "log_prob" in row:
            bound = "" if row["is_exact"] else " at most (the beam's log Z is a lower bound)"
            typer.echo(f"# log p of the given tags: {row['log_prob']:.4f}{bound}")
        for drawn in row.get("samples", []):
            typer.echo("# drawn: " + " ".join(drawn))
        typer.echo("")
