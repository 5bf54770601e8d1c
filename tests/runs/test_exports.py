"""Every public name is exported on purpose."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys

import freenergy

PUBLIC_PACKAGES = ["freenergy.corpus", "freenergy.corpus.resources", "freenergy.testing", "freenergy.recipes"]


def test_every_listed_name_is_there():
    for name in freenergy.__all__:
        assert getattr(freenergy, name) is not None
    assert sorted(freenergy.__all__) == dir(freenergy)
    assert set(freenergy._HOMES) | {"__version__"} == set(freenergy.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(freenergy, "no_such_name")


def test_packages_export_what_they_list():
    for package in PUBLIC_PACKAGES:
        module = importlib.import_module(package)
        named = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
        }
        imports = [each for each in ast.parse(inspect.getsource(module)).body if isinstance(each, ast.ImportFrom)]
        as_itself = {name.asname for each in imports for name in each.names if name.asname == name.name}
        assert named == set(getattr(module, "__all__", as_itself)), package


def test_every_module_imports_and_says_what_it_is():
    for module in pkgutil.walk_packages(freenergy.__path__, "freenergy."):
        assert importlib.import_module(module.name).__doc__, module.name


def test_importing_the_command_line_stays_light():
    """Without torch and transformers, so that --help is quick."""
    code = "import sys, freenergy.cli; print(sorted(m for m in ('torch', 'transformers', 'numpy') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_matches_the_metadata():
    assert freenergy.__version__ == importlib.metadata.version("freenergy")
