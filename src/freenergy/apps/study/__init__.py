"""A blind study in pairs: which of two models writes the better continuation, asked of people.

The human evaluation of Deng et al. (2020), Table 2 and appendix A.4, as a tool.
"""

from freenergy.apps.study.agreement import Agreement, agreement
from freenergy.apps.study.assigning import End, Page, RefusedError, answer, next_page
from freenergy.apps.study.creating import Making, create
from freenergy.apps.study.items import Item, Study
from freenergy.apps.study.settings import StudySettings
from freenergy.apps.study.simulating import simulate
from freenergy.apps.study.statistics import Outcomes, Preference, counts_behind
from freenergy.apps.study.store import Invitation, Rater, Store
from freenergy.apps.study.summary import summarise, write_summary

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
