"""Families of recipes: each lists the sections of its recipes in one dataclass, and returns their stages.

A family is imported when a recipe names it, so a family may live in any package. To add one, write its class and add a
line here.
"""

from importlib import import_module
from typing import Any

from freenergy.core.errors import UserError

DEFAULT = "residual"
FAMILIES = {
    DEFAULT: "freenergy.recipes.families.residual:ResidualRecipe",
    "language-model": "freenergy.recipes.families.language_model:LanguageModelRecipe",
    "translation": "freenergy.apps.translation.domain:TranslationRecipe",
    "images": "freenergy.apps.images.domain:ImagesRecipe",
}


def family_class(name: Any) -> type[Any]:
    """Returns the class of a family's recipes."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"family is {str(name)[:40]!r}: choose one of {', '.join(FAMILIES)}")
    module, _, attribute = FAMILIES[name].partition(":")
    found: type[Any] = getattr(import_module(module), attribute)
    return found
