"""The one switch for code that a recipe or a run names: nothing of it runs unless the user says so.

A run can be passed on, and no code may be loaded from a folder that somebody else has made. So a program or a function
that texts come from is started only where the environment variable FREENERGY_ALLOW_IMPORT is 1; a function that is
given in Python, as an object, needs no switch.
"""

import os

from freenergy.core.errors import UserError

SWITCH = "FREENERGY_ALLOW_IMPORT"


def check_trusted(what: str) -> None:
    """Refuse code of a recipe or a run as long as the switch is off."""
    if os.environ.get(SWITCH) != "1":
        raise UserError(f"{what} is code that the recipe names: set {SWITCH}=1 in the environment if you trust it")
