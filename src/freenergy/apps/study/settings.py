"""What a study is: how many prefixes, votes, checks and questions before it begins."""

from dataclasses import dataclass
from typing import final

from freenergy.core.errors import UserError

ON_A_PAGE = 4  # comparisons, one of them an attention check (Deng et al. 2020, A.4)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """The study of Deng et al. (2020), A.4, unless told otherwise."""

    prefixes: int = 333
    votes: int = 3  # asked for each pair
    qualification: int = 12  # questions with a known answer, before the first pair; 0 asks none
    pass_mark: float = 2 / 3  # a rater goes on with more than this share of them right
    checks: int | None = None  # attention checks; None is one for each page of a rater who sees every pair
    pages: int | None = None  # the most pages of pairs for one rater; None is as many as there are
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("prefixes", 1), ("votes", 1), ("qualification", 0), ("checks", 1), ("pages", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name} is {value}: set it to {least} or more")
        if not 0 <= self.pass_mark < 1:
            raise UserError(f"the pass mark is {self.pass_mark:g}: give a share from 0 to below 1, such as 0.6667")

    @property
    def num_checks(self) -> int:
        """Attention checks: enough that nobody sees one twice, or as many as were asked for."""
        return -(-self.prefixes // (ON_A_PAGE - 1)) if self.checks is None else self.checks

    def passes(self, right: int, asked: int) -> bool:
        """Whether so many right answers of those asked in the qualification are enough."""
        return not asked or right > self.pass_mark * asked
