"""Settings of a human study: how many prefixes, votes, attention checks and qualification questions."""

from dataclasses import dataclass
from typing import final

from freenergy.core.checks import check_range

ITEMS_PER_PAGE = 4  # comparisons, one of them an attention check (Deng et al. 2020, A.4)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """Defaults are the study of Deng et al. (2020), A.4."""

    prefixes: int = 333
    votes: int = 3  # per pair
    qualification: int = 12  # questions with a known answer, before the first pair; 0 asks none
    pass_mark: float = 2 / 3  # raters with at most this share of right answers are excluded
    checks: int | None = None  # attention checks; None: one per page of a rater who sees every pair
    pages: int | None = None  # maximum pages of pairs per rater; None: no limit
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(self, "prefixes", "votes", "checks", "pages", at_least=1)
        check_range(self, "qualification", at_least=0)
        check_range(self, "pass_mark", at_least=0, below=1)

    @property
    def num_checks(self) -> int:
        """The number of attention checks: as set, or enough that no rater sees one twice."""
        return -(-self.prefixes // (ITEMS_PER_PAGE - 1)) if self.checks is None else self.checks

    def passes(self, right: int, asked: int) -> bool:
        """Whether ``right`` answers out of ``asked`` qualification questions suffice."""
        return not asked or right > self.pass_mark * asked
