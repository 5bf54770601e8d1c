"""What a person types."""

from freenergy.cli.about import cost, doctor, recipes, resources
from freenergy.cli.root import app, main
from freenergy.cli.runs import cite, evaluate, experiment, report, run, verify
from freenergy.cli.study import study_app
from freenergy.cli.tagging import tag
from freenergy.cli.writing import distil, next_token, sample, score, serve

__all__ = ["app", "main"]

_ABOUT_RUNS = (run, sample, score, tag, evaluate, report, verify, serve, distil)
for _command in (*_ABOUT_RUNS, experiment, cost, cite, recipes, resources, doctor):
    app.command()(_command)
app.command("next")(next_token)
app.add_typer(study_app, name="study")
