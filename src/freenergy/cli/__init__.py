"""What a person types."""

from freenergy.cli.about import doctor, recipes, resources
from freenergy.cli.cost import cost
from freenergy.cli.experiment import experiment
from freenergy.cli.root import app, main
from freenergy.cli.runs import cite, evaluate, report, run, verify
from freenergy.cli.serving import serve
from freenergy.cli.study import study_app
from freenergy.cli.writing import distil, next_token, sample, score

__all__ = ["app", "main"]

_ABOUT_RUNS = (run, sample, score, evaluate, report, verify, serve, distil)
for _command in (*_ABOUT_RUNS, experiment, cost, cite, recipes, resources, doctor):
    app.command()(_command)
app.command("next")(next_token)
app.add_typer(study_app, name="study")
