"""``freenergy study create``: one continuation of each model for the same held-out prefixes.

    prefix c:    a ~ A(· | c),    b ~ B(· | c), or the real text where B is ``human``
    checks:      a ~ base of A,   b = the real text, for other prefixes

Text goes in and text comes out, so the models may have different tokenizers; prefixes are cut by A's. Windows are taken
far enough apart that no text is shown twice. Comparison i draws from streams of its own, so a study that was killed
resumes with the same bits.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from freenergy.apps.study.items import ITEMS, KINDS, RECORD, Item, Study, StudySettings, write_record
from freenergy.core.compatibility import ERA
from freenergy.core.errors import UserError
from freenergy.core.files import exclusive_lock, fingerprint, read_json, resumable_jsonl
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.corpus import Corpus, Tokenizer, Windows
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.load import load_run
from freenergy.recipes.open_run import load_or_base, model_key
from freenergy.recipes.stages.given_text import given_text
from freenergy.runs.run import versions
from freenergy.samplers import Plain, Resampling
from freenergy.text.model import ResidualModel
from freenergy.text.task import GenerationTask
from freenergy.text.write import Writing

HUMAN = "human"
Law = Literal["base", "joint"]
_SILENT = Silent()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """How texts are generated. The default law is the residual model if the run has an energy, else the base."""

    a: Law | None = None
    b: Law | None = None
    candidates: int = 256
    length: int | None = None  # tokens per continuation; default: as trained
    truncation: Truncation = ANCESTRAL
    human: tuple[Path, ...] = ()  # files with prefixes and real text; default: the run's held-out text


@final
@dataclass(frozen=True, slots=True)
class _Writer:
    """One of the two models: its name, and how it continues a prefix."""

    task: GenerationTask
    folder: Path
    law: Law

    @classmethod
    def of(cls, joint: ResidualModel, folder: Path, law: Law | None, making: Making, seed: int) -> "_Writer":
        if law == "joint" and not joint.has_energy:
            raise UserError(f"the run in {folder} has no energy and so no residual model: use --a base or --b base")
        law = law or ("joint" if joint.has_energy else "base")
        sampler: Plain | Resampling = Plain(truncation=making.truncation)
        if law == "joint":
            sampler = Resampling(candidates=making.candidates, truncation=making.truncation)
        plan = joint.plan(making.length)
        writing = Writing(
            sampler=sampler, chunks=plan.chunks, max_context=joint.max_context, max_tokens=plan.max_tokens,
            is_shortened=plan.is_shortened,
        )  # fmt: skip
        return cls(GenerationTask.of(joint, "", plan.length, seed, writing), folder, law)

    def __call__(self, prefix: str, rng: Rng) -> str:
        tokenizer = self.task.model.tokenizer
        assert tokenizer is not None, "a run has a tokenizer"
        text = self.task.model.write(prefix, self.task.space, rng, self.task.writing)[0]
        return spoken(tokenizer, tokenizer.encode(prefix), text.tokens)

    def about(self) -> dict[str, Any]:
        folder = self.folder.resolve()
        key = {key: value for key, value in self.task.key(model_key(self.folder)).items() if key != "prefixes"}
        return {"name": f"{folder.name} ({self.law})", "run": str(folder), "law": self.law, **key}


@final
@dataclass(frozen=True, slots=True)
class _Source:
    """Held-out windows that do not overlap: the prefix and the real continuation of each."""

    windows: Windows
    rows: list[int]
    tokenizer: Tokenizer
    length: int

    def __getitem__(self, i: int) -> tuple[str, str]:
        x = self.windows.continuations([self.rows[i]])
        context, continuation = x.contexts.tokens[0].tolist(), x.lists()[0][0][: self.length]
        return self.tokenizer.decode(context), spoken(self.tokenizer, context, continuation)


def create(
    run_a: str | Path,
    run_b: str | Path,
    out: str | Path,
    settings: StudySettings,
    making: Making,
    progress: Progress = _SILENT,
) -> Study:
    """Generate the missing texts of a study; ``run_b`` may be the word ``human``."""
    this, folder = load_run(run_a), Path(out)
    corpus = Corpus.open(this.stage("corpus"))
    joint = load_or_base(run_a)
    a = _Writer.of(joint, this.folder, making.a, making, settings.seed)
    b: _Writer | None = None
    if str(run_b) != HUMAN:
        is_same = Path(run_b).resolve() == this.folder.resolve()  # what is in memory already is not loaded again
        b = _Writer.of(joint if is_same else load_or_base(run_b), Path(run_b), making.b, making, settings.seed)
    if b is not None and a.about() == b.about():
        raise UserError(f"{run_a} would be compared with itself: give another run, or --a base and --b joint")
    source, identity = _held_out(this, corpus, a, settings, making, progress)
    human = {"name": HUMAN, "run": None, "law": None}
    models = {"a": a.about(), "b": human if b is None else b.about()}
    key = fingerprint([models, asdict(settings), identity, ERA])
    _begin(folder, key, settings, models)
    if not (folder / ITEMS).is_file():
        reader = _Writer.of(joint, this.folder, "base", making, settings.seed)
        with (
            resumable_jsonl(folder / ITEMS, key) as lines,
            progress.track("texts", len(source.rows), "prefixes") as advance,
        ):
            advance(lines.done)
            for item in _items(source, settings, a, b, reader, lines.done):
                lines.add(asdict(item))
                advance(1)
    return Study.open(folder)


def _begin(folder: Path, key: str, settings: StudySettings, models: dict[str, dict[str, Any]]) -> None:
    """Create the folder with its record, or check that it belongs to this study."""
    if (folder / RECORD).is_file():
        if read_json(folder / RECORD).get("key") != key:
            raise UserError(f"{folder} contains another study: choose another --out, or remove it")
        return
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} contains other files than a study: choose another --out")
    write_record(folder, settings, models, {"key": key, "versions": versions()})


def _held_out(
    this: ResidualRun, corpus: Corpus, a: _Writer, settings: StudySettings, making: Making, progress: Progress
) -> tuple[_Source, Any]:
    """Return windows for every comparison, and the fingerprint of their text."""
    if making.length is not None and making.length > corpus.continuation:
        raise UserError(
            f"--length is {making.length}, but the real text after a prefix has {corpus.continuation} tokens in this "
            f"run: set it to {corpus.continuation} or less"
        )
    if making.human:
        with exclusive_lock(this.folder):
            text = given_text(making.human, this, corpus, progress)
        windows, identity, free = text.windows, text.fingerprint, np.flatnonzero(~text.shared)
    else:
        windows, identity = corpus.windows(this.recipe.evaluation.split), corpus.fingerprint
        free = np.arange(len(windows))
    order = free[Rng(settings.seed).child("windows").permutation(len(free)).numpy()]
    num = settings.prefixes + settings.num_checks + settings.qualification
    rows = apart(windows.starts, order, corpus.prefix + corpus.continuation, num)
    if len(rows) < num:
        raise UserError(
            f"the held-out text has {len(rows)} windows that do not overlap, but {settings.prefixes} pairs, "
            f"{settings.num_checks} attention checks and {settings.qualification} questions need {num}: use fewer "
            "--prefixes or --checks, or give more text with --human"
        )
    return _Source(windows, rows, corpus.tokenizer, a.task.writing.max_tokens or a.task.space.length), identity


def _items(
    source: _Source, settings: StudySettings, a: _Writer, b: _Writer | None, base: _Writer, skip: int
) -> Iterator[Item]:
    """Yield pairs, then attention checks, then qualification questions."""
    counts = (settings.prefixes, settings.num_checks, settings.qualification)
    kinds = [kind for kind, count in zip(KINDS, counts, strict=True) for _ in range(count)]
    for i, kind in list(enumerate(kinds))[skip:]:
        (prefix, real), rng = source[i], Rng(settings.seed).child("item", i)
        if kind == "pair":
            text = real if b is None else b(prefix, rng.child("b"))
            yield Item(number=i, kind=kind, prefix=prefix, a=a(prefix, rng.child("a")), b=text)
        else:
            yield Item(number=i, kind=kind, prefix=prefix, a=base(prefix, rng.child("a")), b=real)


def apart(starts: np.ndarray, order: np.ndarray, width: int, num: int) -> list[int]:
    """Return the first ``num`` rows in an order whose windows of ``width`` tokens do not overlap.

    >>> apart(np.array([0, 5, 10, 30]), np.array([1, 0, 2, 3]), 8, 3)
    [1, 3]
    """
    taken: list[int] = []
    rows: list[int] = []
    for row in order.tolist():
        start = int(starts[row])
        at = bisect_left(taken, start)
        if any(abs(start - other) < width for other in taken[max(at - 1, 0) : at + 1]):
            continue
        insort(taken, start)
        rows.append(row)
        if len(rows) == num:
            break
    return rows


def spoken(tokenizer: Tokenizer, context: Sequence[int], tokens: Sequence[int]) -> str:
    """Return what tokens add to a text, normalised so that only the words can reveal which model wrote it.

    Tokenizers differ in the space at the border, and text that is cut may end in half a character.
    """
    before, both = tokenizer.decode(context), tokenizer.decode([*context, *tokens])
    text = both[len(before) :] if both.startswith(before) else tokenizer.decode(tokens)
    return tidy(text)


def tidy(text: str) -> str:
    r"""Remove what differs between tokenizers: one space before, none after, no partial character.

    >>> tidy("\n  man  "), tidy("esting"), tidy("  ")
    (' man', 'esting', '')
    """
    text = text.rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
    return f" {text.lstrip()}" if text[:1].isspace() else text
