"""The README and the docs tell the truth: their Python runs, their commands exist, their links lead somewhere."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from freenergy import load_recipe, run
from freenergy.cli import app
from freenergy.recipes.load import make_recipe
from freenergy.samplers.registry import KERNELS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands():
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    return sorted({line.split("#")[0].strip() for line in lines if line.strip()})


@pytest.fixture(scope="session")
def small_demo(tmp_path_factory):
    """What ``freenergy run demo`` leaves, from a small text and in seconds."""
    folder = tmp_path_factory.mktemp("readme")
    text = folder / "text.txt"
    text.write_text(
        "\n\n".join(f"The river {i} runs to the sea and the sea is {i} times full. " * 30 for i in range(20))
    )
    changes = [
        f'corpus.source="{text}"',
        "corpus.documents=paragraph",
        "corpus.deduplicate=0",
        "corpus.prefix=10",
        "corpus.continuation=5",
        "tokenizer.vocab_size=300",
        "base.block=16",
        "base.validation_tokens=50",
        "base.optimisation.steps=2",
        "base.optimisation.validate_every=1",
        "negatives.windows=20",
        "negatives.validation_windows=5",
        "negatives.validation_per_prefix=3",
        "evaluation.windows=5",
        "evaluation.candidates=4",
        "evaluation.certified_windows=3",
    ]
    list(run(load_recipe("demo-tiny", changes), folder / "runs" / "demo"))
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.name)
def test_python_blocks_run(page, small_demo, monkeypatch):
    monkeypatch.chdir(small_demo)
    monkeypatch.setattr(KERNELS, "_classes", dict(KERNELS._classes))  # a page may register its own
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {"__name__": "__main__"})


def test_the_readme_s_estimate_is_right(capsys):
    """The first block prints the exact log Z and an estimate with its error; they agree within five errors."""
    exec(blocks(ROOT / "README.md", "python")[0], {"__name__": "__main__"})
    exact, estimate, error = map(float, re.findall(r"-?\d+\.\d+", capsys.readouterr().out))
    assert 0 < error < 0.02
    assert abs(exact - estimate) < 5 * error


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("freenergy ")])
def test_commands_are_understood(command):
    """Every freenergy command of the docs parses: the subcommand and each option exist."""
    found, rest = get_command(app), command.split()[1:]
    while hasattr(found, "commands"):
        assert rest[0] in found.commands, command
        found = found.commands[rest.pop(0)]
    options = {option for parameter in found.params for option in parameter.opts}
    for word in rest:
        if word.startswith("--"):
            assert word in options, command


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    wanted = {c.split()[1] for c in commands() if c.startswith("make ")}
    assert wanted
    assert wanted <= targets


def test_the_readme_s_two_commands_do_all_their_set_up():
    """make -n on a copy without .venv shows the set-up before the command itself."""
    for target, last in (("demo", "freenergy run demo"), ("test", "pytest")):
        done = subprocess.run(
            ["make", "-n", target, "READY=/nonexistent/.ready"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        steps = done.stdout
        assert steps.index("-m venv") < steps.index("pip install") < steps.rindex(last)
        assert "-c constraints.txt" in steps


def test_light_commands_run(small_demo):
    """The commands that need no network and no minutes, as commands."""
    freenergy = shutil.which("freenergy", path=str(Path(sys.executable).parent))
    river = ["runs/demo", "--prefix", "The river"]
    commands = [["sample", *river, "--candidates", "64"], ["next", *river, "--completions", "16"]]
    for command in (*commands, ["recipes"], ["resources"]):
        done = subprocess.run([freenergy, *command], cwd=small_demo, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_recipes_of_the_docs_are_valid():
    tables = [tomllib.loads(block) for page in PAGES for block in blocks(page, "toml")]
    assert tables
    for table in tables:
        assert make_recipe(table).name == table["name"]


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_index_of_papers_names_files_that_exist():
    named = re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?)`", (ROOT / "docs" / "paper_index.md").read_text())
    assert len(named) > 30
    assert [path for path in named if not (ROOT / "src" / "freenergy" / path).exists()] == []
