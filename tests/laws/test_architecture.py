"""The floor plan, checked on the source: who may take what."""

import ast
import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "freenergy"
LM_NAMES, LM_TYPES = {"base", "lm", "language_model"}, {"LanguageModel", "HuggingFaceLM", "CausalLM"}
ENERGY_NAMES, ENERGY_TYPES = {"energy"}, {"Energy", "EnergyModule"}
ALLOWED = {
    "text/model.py:ResidualModel.__init__": "the public class is made from its two parts, once",
}


def functions(tree, path, inside=""):
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{inside}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield f"{path}:{name}", node
            yield from functions(node, path, f"{name}.")
        else:
            yield from functions(node, path, inside)


def takes(function, names, types):
    """The parameters that are called or annotated like this."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {
        argument.arg
        for argument in every
        if (argument.arg in names and "Literal" not in words(argument.annotation)) or words(argument.annotation) & types
    }


def words(annotation):
    """The names in an annotation, written out or as text."""
    return set() if annotation is None else set(names_of(annotation))


def names_of(annotation):
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value)


def two_halves(tree, path):
    """Functions that take a language model and an energy as two parameters; a Literal names a kind of one."""
    return {
        name
        for name, function in functions(tree, path)
        if takes(function, LM_NAMES, LM_TYPES) and takes(function, ENERGY_NAMES, ENERGY_TYPES)
    }


def test_a_model_is_one_argument():
    """A language model and the energy that corrects it travel as one ``Residual`` or ``Target``, outside of models/."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE).as_posix()
        if not place.startswith("models/"):
            found |= two_halves(ast.parse(path.read_text(encoding="utf-8")), place)
    assert found == set(ALLOWED)


def test_the_check_sees_names_and_annotations():
    code = """
def by_name(base, energy): ...
def by_type(p: "LanguageModel | None", *, e: Energy): ...
class A:
    async def mixed(self, lm, e: "roles.Energy"): ...
def one(energy, other): ...
def fine(model: Residual): ...
"""
    assert two_halves(ast.parse(code), "x.py") == {"x.py:by_name", "x.py:by_type", "x.py:A.mixed"}


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(SOURCE).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
