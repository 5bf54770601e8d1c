"""What a person types."""

from freenergy.cli.about import doctor, recipes, resources
from freenergy.cli.experiment import experiment
from freenergy.cli.root import app, main
from freenergy.cli.runs import cite, evaluate, report, run
from freenergy.cli.serving import serve
from freenergy.cli.study import study_app
from freenergy.cli.writing import distil, next_token, sample, score

__all__ = ["app", "main"]

for _command in (run, sample, score, evaluate, report, serve, distil, experiment, cite, recipes, resources, doctor):
    app.command()(_command)
app.command("next")(next_token)
app.add_typer(study_app, name="study")
