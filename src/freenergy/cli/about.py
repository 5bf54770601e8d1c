"""Commands that say what there is: recipes, resources, doctor."""

import typer

from freenergy.cli.root import AsJson, print_json


def recipes(as_json: AsJson = False) -> None:
    """List the recipes and experiments that come with the package."""
    from freenergy.cli.show import show_table
    from freenergy.recipes.load import experiments
    from freenergy.recipes.load import recipes as known

    found, others = known(), experiments()
    if as_json:
        listed = {"recipes": found, "experiments": others}
        print_json({key: [{"name": name, "about": about} for name, about in of.items()] for key, of in listed.items()})
    else:
        show_table("Recipes: freenergy run NAME", ["name", "about"], [list(row) for row in found.items()])
        show_table("Experiments: freenergy experiment NAME", ["name", "about"], [list(row) for row in others.items()])


def resources(as_json: AsJson = False) -> None:
    """List the texts and models that can be used by name."""
    from freenergy.cli.show import show_table
    from freenergy.corpus.resources import listing

    rows = listing()
    if as_json:
        print_json({"resources": rows})
        return
    for row in rows:
        row |= {"size": f"{row['size'] / 1e6:.1f} MB", "cached": "yes" if row["cached"] else "no"}
    columns = ["name", "kind", "size", "cached", "licence", "description"]
    show_table("Resources", columns, [[str(row[column]) for column in columns] for row in rows])


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and whether it works: a self-test of some ten seconds."""
    from freenergy.cli.doctor import examine
    from freenergy.cli.show import show_table

    findings = examine()
    ok = all(check["ok"] for check in findings["checks"])
    if as_json:
        print_json(findings | {"ok": ok})
    else:
        show_table(
            "What there is", ["what", "value"], [[key, str(value)] for key, value in findings["machine"].items()]
        )
        rows = [["ok" if check["ok"] else "FAILED", check["name"], check["detail"]] for check in findings["checks"]]
        show_table("Self-test", ["", "check", "seen"], rows)
    raise typer.Exit(0 if ok else 1)
