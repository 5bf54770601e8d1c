"""From settings to jobs: the base, the rows, the points of a study, and the controls, in the order they are done in.

A job has the same random streams as its siblings of the same seed: rows and controls see the same batches.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Literal, final

from freenergy.apps.images.settings import ImageSubject
from freenergy.apps.translation.settings import TranslationSubject
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.recipes.experiment.settings import Base, Continued, LanguageSubject, Row, Study
from freenergy.training.lm_loss import LanguageModelLoss
from freenergy.training.settings import Optimisation

BASE = "base"
_LONGEST_NAME = 100
SubjectSettings = LanguageSubject | TranslationSubject | ImageSubject


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training and what is measured of it."""

    name: str
    kind: Literal["base", "row", "study", "control"]
    teaching: LanguageModelLoss
    optimisation: Optimisation
    scratch: bool
    of: "tuple[Job, ...]" = ()  # the jobs that this is the control of; its steps cost what the costliest of them costs
    point: tuple[float, float] | None = None  # start epoch and weight, in a study

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return folder_name(self.name)

    @property
    def stream(self) -> str:
        """The random stream of its training."""
        return BASE if self.scratch else "continued"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A whole experiment. With ``variants``, all of it is done once for each of these subjects."""

    name: str
    about: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    subject: SubjectSettings
    variants: dict[str, SubjectSettings] = field(default_factory=dict)
    base: Base = field(default_factory=Base)
    continued: Continued = field(default_factory=Continued)
    rows: tuple[Row, ...] = ()
    study: Study | None = None
    paper: dict[str, dict[str, float]] = field(default_factory=dict)  # row → column → what a paper reports

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _LONGEST_NAME or not folder_name(self.name):
            raise UserError(f"name is {self.name[:40]!r}: take up to {_LONGEST_NAME} letters, digits, dots and dashes")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"seeds is {list(self.seeds)}: give at least one seed, none of them twice")
        for seed in self.seeds:
            Rng(seed)  # refuses a bad one
        _check_names(self.variants, "variant")
        _check_names([job.name for job in self.jobs()], "row")
        for name in self.paper:
            if name not in self.row_names():
                known = ", ".join(self.row_names())
                raise UserError(f"paper names the row {name!r}, which there is not: choose one of {known}")

    @property
    def subjects(self) -> dict[str, SubjectSettings]:
        """The subjects by variant; the name is empty where there are no variants."""
        return self.variants or {"": self.subject}

    def jobs(self) -> list[Job]:
        """The jobs of one seed and subject: the base first, controls last."""
        once = Job(
            name=BASE, kind="base", teaching=self.base.teaching, optimisation=self.base.optimisation, scratch=True
        )
        rows = [self._job(row.name, "row", row.teaching, row.scratch) for row in self.rows]
        study = self._points()
        controls = [_control(row.name, [job]) for row, job in zip(self.rows, rows, strict=True) if row.control]
        if self.study is not None and self.study.control:
            controls.append(_control("study", study))
        return [once, *rows, *study, *controls]

    def row_names(self) -> list[str]:
        """The names of the rows of the table."""
        return [labelled(variant, job.name) for variant in self.subjects for job in self.jobs()]

    def _points(self) -> list[Job]:
        if self.study is None:
            return []
        made = []
        for epoch, weight in self.study.points():
            name = f"E-ARM, start epoch {epoch:g}, weight {weight:g}"
            job = self._job(name, "study", self.study.at(epoch, weight), self.study.scratch)
            made.append(replace(job, point=(epoch, weight)))
        return made

    def _job(self, name: str, kind: Literal["row", "study"], teaching: LanguageModelLoss, scratch: bool) -> Job:
        optimisation = self.base.optimisation if scratch else self.continued.optimisation
        return Job(name=name, kind=kind, teaching=teaching, optimisation=optimisation, scratch=scratch)


def _control(name: str, of: list[Job]) -> Job:
    """The same without E-ARM; how many steps it has is decided when those have been done."""
    like = of[0]
    return Job(
        name=f"{name}, control",
        kind="control",
        teaching=replace(like.teaching, earm=None),
        optimisation=like.optimisation,
        scratch=like.scratch,
        of=tuple(of),
    )


def labelled(variant: str, name: str) -> str:
    """A row's name in the table."""
    return f"{variant}: {name}" if variant else name


def folder_name(name: str) -> str:
    """A name in small letters, digits, dots and dashes.

    >>> folder_name("E-ARM + label smoothing 0.1")
    'e-arm-label-smoothing-0.1'
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _check_names(names: "list[str] | dict[str, SubjectSettings]", what: str) -> None:
    seen: dict[str, str] = {}
    for name in names:
        folder = folder_name(name)
        if not folder or len(name) > _LONGEST_NAME:
            raise UserError(f"a {what} is called {name[:40]!r}: take up to {_LONGEST_NAME} letters, digits and dashes")
        if folder in seen:
            raise UserError(f"two {what}s are called {seen[folder]!r} and {name!r}: give each a name of its own")
        seen[folder] = name
