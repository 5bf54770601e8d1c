"""A blind study in pairs: which of two models writes the better continuation, asked of people.

The human evaluation of Deng et al. (2020), Table 2 and appendix A.4, as a tool.
"""

from freenergy.study.agreement import Agreement, agreement
from freenergy.study.assigning import End, Page, RefusedError, answer, next_page
from freenergy.study.creating import Making, create
from freenergy.study.items import Item, Study
from freenergy.study.settings import StudySettings
from freenergy.study.simulating import simulate
from freenergy.study.statistics import Outcomes, Preference, counts_behind
from freenergy.study.store import Invitation, Rater, Store
from freenergy.study.summary import summarise, write_summary

__all__ = [
    "Agreement",
    "End",
    "Invitation",
    "Item",
    "Making",
    "Outcomes",
    "Page",
    "Preference",
    "Rater",
    "RefusedError",
    "Store",
    "Study",
    "StudySettings",
    "agreement",
    "answer",
    "counts_behind",
    "create",
    "next_page",
    "simulate",
    "summarise",
    "write_summary",
]
