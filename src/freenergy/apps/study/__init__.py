"""A blind study in pairs: which of two models writes the better continuation, asked of people.

The human evaluation of Deng et al. (2020), Table 2 and appendix A.4, as a tool.
"""

from freenergy.apps.study.creating import Making, create
from freenergy.apps.study.items import Study, StudySettings
from freenergy.apps.study.simulating import simulate
from freenergy.apps.study.store import Store
from freenergy.apps.study.summary import summarise, write_summary

__all__ = ["Making", "Store", "Study", "StudySettings", "create", "simulate", "summarise", "write_summary"]
