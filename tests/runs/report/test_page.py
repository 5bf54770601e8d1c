"""The page: what it says, in whatever state the run is; nothing that a model wrote can act in it."""

import re
import tomllib
from html.parser import HTMLParser
from urllib.parse import parse_qs, urlsplit

import pytest

from freenergy import UserError, load_recipe
from freenergy.core.files import write_json
from freenergy.core.progress import Silent
from freenergy.recipes import load_run
from freenergy.recipes.load import make_recipe, recipes
from freenergy.report import cite, write_report
from freenergy.report.page import PLAYGROUND, page, read_evaluation, to_toml
from freenergy.report.tables import against_baselines, headline, summary, verdicts, versions

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Tags, ids, links and text of a page; refuses tags that do not nest."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.words = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[key] for key in ("src", "href", "xlink:href") if key in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def whole(write_run, all_measured, tmp_path_factory):
    """The page of a run of which everything was measured."""
    run = write_run(tmp_path_factory.mktemp("run"), all_measured())
    return run, read(write_report(run, Silent()))


def test_it_is_whole_and_alone(whole):
    run, shown = whole
    assert shown.tags.count("svg") == 4
    assert len(shown.ids) == len(set(shown.ids)), "an id stands twice"
    outside = [link for link in shown.links if not link.startswith(("#", "data:"))]
    assert all(link.startswith(PLAYGROUND) for link in outside), "something else than the playground is linked to"
    assert all(link[1:] in shown.ids for link in shown.links if link.startswith("#") and link != "#")
    assert sorted(path.name for path in (run.folder / "figures").iterdir()) == sorted(
        f"{name}.{ending}" for name in ("positions", "draws", "distinct", "densities") for ending in ("svg", "png")
    )


def test_examples_open_in_the_playground(whole, evaluation):
    """Whatever stands in a prefix, the link gives it back."""
    _, shown = whole
    prefixes = [one["prefix"] for one in (*evaluation["examples"], *evaluation["samples"])]
    links = [link for link in shown.links if link.startswith(PLAYGROUND)]
    assert [parse_qs(urlsplit(link).fragment)["prefix"] for link in links] == [[prefix] for prefix in prefixes]
    assert "freenergy serve 'runs/made up'" in " ".join(shown.words)


def test_what_a_model_wrote_is_text(whole):
    _, shown = whole
    assert "script" not in shown.tags
    assert "img" not in shown.tags
    assert sum("<script>document.title" in words for words in shown.words) == 6  # prefix, four endings, a sample


def test_the_numbers_are_those_of_the_evaluation(whole):
    _, shown = whole
    words = " ".join(shown.words).replace("\N{NO-BREAK SPACE}", " ")
    for told in (
        "On 40 test windows the residual model's certified perplexity is 12.9 % below the base's "
        "(95 % interval 12.7 to 13.0 %).",
        "no cause for doubt",
        "28.40 27.10 to 29.90 88.00 2.70",  # the base
        "25.20 24.10 to 26.40 75.60 2.52 12.9 % 12.7 to 13.0 % + 7.5",  # certified; negatives 3 + energy 4.5
        "26.00 25.00 to 27.00 80.00 2.60 8.0 % 7.0 to 9.0 % 4.0",  # the baseline
        "54.0 % (52.0–56.0)",
        "E = −4.50, log P_LM = −95.50",
        "freenergy evaluate 'runs/made up' --json",
        "ffffffffffffffff",
    ):
        assert told in re.sub(r"\s+", " ", words), told


@pytest.mark.parametrize("part", ["by_position", "draws_curve", "text", "densities"])
def test_what_was_not_measured_is_a_sentence(part, evaluation, write_run, tmp_path):
    """All but one part are missing, and so are examples; figures of earlier data go."""
    (tmp_path / "figures").mkdir()
    for name in ("positions", "draws", "distinct", "densities"):
        (tmp_path / "figures" / f"{name}.png").touch()
    others = {"by_position", "draws_curve", "text", "densities", "examples", "samples"} - {part}
    kept = {key: value for key, value in evaluation.items() if key not in others}
    shown = read(write_report(write_run(tmp_path, kept), Silent()))
    assert shown.tags.count("svg") == 1
    assert sum("Not measured" in words for words in shown.words) == 3
    assert "article" not in shown.tags
    assert len(list((tmp_path / "figures").iterdir())) == 2, "a figure of earlier data was left"


def test_a_run_without_an_energy(evaluation, write_run, tmp_path):
    kept = {key: evaluation[key] for key in ("split", "windows", "documents", "tokens", "base", "baselines")}
    run = write_run(tmp_path, kept, energy=None)
    shown = read(write_report(run, Silent()))
    assert "svg" not in shown.tags
    words = " ".join(shown.words)
    assert "On 400 test windows the base's perplexity is 28.40 per token" in words
    assert "the run has no energy" in words
    assert words.count("It needs a residual model") == 4
    assert "Can the estimates be believed?" not in words


def test_nothing_can_be_told_of_one_document(evaluation, write_run, tmp_path):
    """Intervals and estimates that do not exist are None in the file, and dashes on the page."""
    evaluation["joint"]["gain"] |= {"interval": [None, None], "nats_interval": [None, None]}
    evaluation["joint"] |= {"k_hat": None, "interval": {name: [None, None] for name in ("lower", "upper", "certified")}}
    evaluation["joint"]["perplexity"]["upper"] = None
    evaluation["base"]["interval"] = {unit: [None, None] for unit in ("token", "word", "byte")}
    for row in evaluation["draws_curve"]:
        row["upper"] = None
    for row in evaluation["by_position"]:
        row["interval"] = [None, None]
    for found in evaluation["text"].values():
        found["distinct"] = {n: [0.5, None, None] for n in ("2", "3", "4")}
    evaluation["densities"]["joint"]["joint"] = [-3.0, -3.0]
    evaluation["densities"]["difference_of_means"]["joint"]["joint"] = [0.2, None, None]
    shown = read(write_report(write_run(tmp_path, evaluation), Silent()))
    assert shown.tags.count("svg") == 4
    assert "interval unknown, with so few documents" in " ".join(shown.words)
    assert "None" not in " ".join(shown.words)
    assert "nan" not in re.findall(r"\bnan\b", " ".join(shown.words))


def test_the_summary_in_words(evaluation):
    gain = evaluation["joint"]["gain"]
    gain |= {"percent": -3.04, "interval": [-4.0, -2.0]}
    assert "is 3.0 % above the base's (95 % interval 2.0 to 4.0 %)." in summary(evaluation)
    gain |= {"percent": 0.5, "interval": [-1.0, 2.0]}
    assert "is not shown to differ from the base's (gain 0.5 %, 95 % interval −1.0 to 2.0 %)" in summary(evaluation)
    gain |= {"percent": None, "interval": [None, None]}
    assert summary(evaluation).endswith("could not be measured.")


def test_a_doubtful_estimate_is_no_warning_on_the_certificate(evaluation, write_run, tmp_path):
    evaluation["joint"] |= {"verdict": "", "doubt": "few draws carry the weight"}
    run = write_run(tmp_path, evaluation)
    text = page(run, read_evaluation(run), [])
    assert verdicts(evaluation) == against_baselines(evaluation, are_beaten=False)
    assert text.index("Of the two estimates: few draws carry the weight.") > text.index("<h2")
    assert "no cause for doubt" not in text


def test_a_bad_verdict_stands_at_the_top(evaluation, write_run, tmp_path):
    evaluation["joint"]["verdict"] = "few draws carry the weight"
    balm = evaluation["baselines"]["balm"]
    balm |= {"verdict": "the residual model loses to it", "against_joint": {"percent": 5.0, "interval": [4.0, 6.0]}}
    assert verdicts(evaluation) == ["Few draws carry the weight.", "Against balm, the residual model loses to it."]
    run = write_run(tmp_path, evaluation)
    text = page(run, read_evaluation(run), [])
    assert text.index("Few draws carry the weight.") < text.index("<h2")
    assert "no cause for doubt" not in text


def test_a_baseline_that_is_beaten_asks_for_no_care(evaluation, write_run, tmp_path):
    evaluation["baselines"]["balm"]["verdict"] = "the residual model is better"
    assert verdicts(evaluation) == []
    run = write_run(tmp_path, evaluation)
    text = page(run, read_evaluation(run), [])
    assert "Against balm, the residual model is better." in text
    assert "With care" not in text
    evaluation["baselines"]["balm"]["against_joint"]["interval"] = [None, None]
    assert verdicts(evaluation) == ["Against balm, the residual model is better."]


@pytest.mark.parametrize(("windows", "perplexity", "rows"), [(40, 28.4, 1), (400, 28.9, 2), (40, None, 2)])
def test_the_base_on_other_windows_has_a_row_of_its_own(evaluation, windows, perplexity, rows):
    """As many windows need not be the same ones."""
    evaluation["joint"] |= {"windows": windows, "base_perplexity": perplexity}
    assert sum(row[0].startswith("base") for row in headline(evaluation).rows) == rows


def test_what_was_spent_may_be_unknown(evaluation):
    spent = {"negatives": {"cpu_seconds": 60.0}, "energy": {"cpu_seconds": 90.0}}
    assert headline(evaluation | {"cost": spent}).rows[2][-1] == "+ 2.5"
    spent["energy"]["cpu_seconds"] = None  # a part of the cost is not the cost
    assert headline(evaluation | {"cost": spent}).rows[2][-1] == "–"


def test_the_same_files_give_the_same_bytes(evaluation, write_run, tmp_path):
    kept = {key: value for key, value in evaluation.items() if key not in ("by_position", "text", "densities")}
    found = []
    for name in ("a", "b"):
        path = write_report(write_run(tmp_path / name, kept), Silent())
        figures = sorted((tmp_path / name / "figures").iterdir())
        found.append([path.read_bytes(), *(figure.read_bytes() for figure in figures)])
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_bad_runs_are_one_sentence(evaluation, write_run, tmp_path):
    run = write_run(tmp_path, evaluation)
    (tmp_path / "evaluation" / "evaluation.json").write_text('{"base": {"perplexity": {}}, "samples": []}')
    with pytest.raises(UserError, match="is of another version of freenergy"):
        write_report(run, Silent())
    (tmp_path / "evaluation" / "stage.json").unlink()
    with pytest.raises(UserError, match=r"the stage evaluation of .* is not finished"):
        write_report(run, Silent())
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(UserError, match="is not a run"):
        write_report(load_run(tmp_path / "nowhere"), Silent())


def test_only_what_was_used_is_cited(evaluation, write_run, tmp_path):
    run = write_run(tmp_path / "a", evaluation)
    keys = set(re.findall(r"@\w+\{(\w+),", cite(run)))
    assert keys == {
        "chen1998smoothing", "deng2020residual", "gutmann2010nce", "ma2018nce", "ou2024energy", "nowozin2018debiasing",
        "lawson2019energy", "vehtari2024pareto",
    }  # fmt: skip
    assert cite(run).count("{") == cite(run).count("}")
    binary = {"objective": {"kind": "binary"}}
    other = write_run(tmp_path / "b", evaluation, base={"kind": "train"}, energy={"kind": "unit"}, training=binary)
    keys = set(re.findall(r"@\w+\{(\w+),", cite(other)))
    assert keys == {
        "deng2020residual", "gutmann2010nce", "nowozin2018debiasing", "lawson2019energy", "vehtari2024pareto",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(recipes()))
def test_the_recipe_on_the_page_gives_the_recipe_back(name):
    recipe = load_recipe(name)
    assert make_recipe(tomllib.loads(to_toml(recipe.to_json()))) == recipe


def test_odd_words_in_a_recipe_come_back():
    table = {"name": 'a"b\\c', "corpus": {"source": "é\n\t\x7f 'x'", "test_share": 1e-07}, "list": [1, {"a": True}]}
    assert tomllib.loads(to_toml(table)) == table


def test_studies_of_a_run_stand_on_its_page(evaluation, write_run, tmp_path):
    run = write_run(tmp_path, evaluation)
    assert "What people prefer" not in page(run, read_evaluation(run), [])
    test = {"k": 188, "n": 319, "rate": 188 / 319, "p_value": 0.00084, "interval": [0.533, 0.644]}
    summary = {
        "study": "<b>asked</b>",
        "models": {"a": {"name": "the base"}, "b": {"name": "the residual model"}},
        "raters": {"invited": 30, "simulated": 30},
        "pairs": {"with_votes": 319},
        "outcomes": {"a": 131, "b": 188, "ties": 0},
        "tests": {"decided": test, "strict": test, "not_worse": test},
    }
    write_json(run.folder / "studies" / "asked.json", summary)
    shown = page(run, read_evaluation(run), [])
    assert "&lt;b&gt;asked&lt;/b&gt;" in shown
    assert "188 of 319" in shown
    assert "0.00084" in shown
    assert "30 of 30 raters are simulated" in shown


def test_versions_are_told_once_each_whatever_a_record_holds():
    records = {"corpus": {"versions": {"torch": "2.13", "numpy": 2.0}}, "base": {"versions": {"torch": None}}}
    assert versions(records).rows == [["torch", "2.13, None"], ["numpy", "2.0"]]
