"""What is counted, and what is dropped: a small study counted by hand."""

import json
from dataclasses import asdict

import pytest

from freenergy import UserError
from freenergy.apps.study import Study, simulate, summarise, write_summary
from freenergy.apps.study.assigning import answer, next_page
from freenergy.apps.study.items import Item
from freenergy.apps.study.summary import Outcomes
from freenergy.report.study import preference, raters, sentence, simulated, study_page

# votes of three raters for the six pairs; rater 3 misses the checks of the page or pages that hold pair 0
VOTES = {1: "bbbaab", 2: "bbaaab", 3: "aabbab"}


@pytest.fixture
def counted(make_store, clock, sides):
    """Three raters, one of whom fails one of two attention checks."""
    store = make_store(pairs=6)
    store.invite(4)  # the last never comes
    dropped = []
    for rater in store.raters()[:3]:
        while hasattr(page := next_page(store, rater), "token"):
            numbers = {place.item.number for place in page.places}
            fails = rater.id == 3 and 0 in numbers
            dropped += [number for number in numbers if number < 6 and fails]

            def choose(item, rater=rater, fails=fails):
                return VOTES[rater.id][item.number] if item.kind == "pair" else "a" if fails else "b"

            clock.now += 20.0
            answer(store, rater, page.token, sides(page, choose))
    return store, summarise(store), dropped


def by_hand(dropped):
    """Votes for A and B of each pair."""
    kept = [[VOTES[r][i] for r in VOTES if not (r == 3 and i in dropped)] for i in range(6)]
    return [(votes.count("a"), votes.count("b")) for votes in kept]


def test_votes_are_counted_and_dropped(counted):
    _, summary, dropped = counted
    votes = by_hand(dropped)
    assert len(dropped) == 3
    assert [(row["a"], row["b"]) for row in summary["by_pair"]] == votes
    assert summary["votes"] == {"given": 18, "dropped": 3, "kept": 15}
    assert summary["attention"] == {"asked": 6, "failed": 1}
    wins = {"a": sum(a > b for a, b in votes), "b": sum(b > a for a, b in votes), "ties": sum(a == b for a, b in votes)}
    assert summary["outcomes"] == wins
    decided = summary["tests"]["decided"]
    assert (decided["k"], decided["n"]) == (wins["b"], wins["a"] + wins["b"])
    assert summary["pairs"] == {"asked": 6, "same": 0, "with_votes": 6, "complete": 6}
    pairs = [(a * (a - 1) + b * (b - 1), (a + b) * (a + b - 1)) for a, b in votes]
    assert summary["agreement"]["share"] == pytest.approx(sum(p[0] for p in pairs) / sum(p[1] for p in pairs))


def test_raters_are_told_apart(counted):
    _, summary, _ = counted
    assert summary["raters"] == {"invited": 4, "simulated": 0, "qualified": 3, "not_qualified": 0, "voted": 3}
    one, _, three, four = summary["by_rater"]
    assert one["votes"] == three["votes"] == 6
    assert (one["dropped"], three["dropped"], three["checks_failed"]) == (0, 3, 1)
    assert one["for_b"] == 4
    assert one["qualification"] == {"right": 4, "given": 4}
    assert one["seconds_a_page"] == summary["seconds_a_page"] == 20.0
    assert (four["is_qualified"], four["votes"], four["seconds_a_page"]) == (None, 0, None)
    assert simulated(summary) == ""


def test_examples_are_pairs_on_which_all_agreed(counted):
    _, summary, dropped = counted
    full = [(i, votes) for i, votes in enumerate(by_hand(dropped)) if 3 in votes]
    expected = [votes for _, votes in full if votes[1] == 3][:3] + [votes for _, votes in full if votes[0] == 3][:3]
    assert [(row["for_a"], row["for_b"]) for row in summary["examples"]] == expected


def test_the_summary_goes_beside_the_study_and_into_its_runs(counted, tmp_path):
    store, summary, _ = counted
    models = {
        "a": {"name": "r (base)", "run": str(tmp_path / "run")},
        "b": {"name": "gone", "run": str(tmp_path / "gone")},
    }
    (tmp_path / "run").mkdir()
    study = Study(folder=store.study.folder, settings=store.study.settings, models=models, items=store.study.items)
    paths = write_summary(study, summary)
    assert paths == [store.study.folder / "summary.json", tmp_path / "run" / "studies" / "study.json"]
    assert [json.loads(path.read_text()) for path in paths] == [json.loads(json.dumps(summary))] * 2
    assert not (tmp_path / "gone").exists()


def test_the_page_tells_every_number_and_runs_nothing(counted):
    _, summary, _ = counted
    bad = "<script>document.title = 'taken over'</script>"
    summary["examples"] = [{"prefix": bad, "a": bad, "b": bad, "for_a": 0, "for_b": 3}]
    summary["models"] = {"a": {"name": bad}, "b": {"name": "tuned"}}
    html = study_page(summary)
    assert bad not in html
    assert "&lt;script&gt;" in html
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in html
    for row in [*preference(summary).rows, *raters(summary).rows]:
        for cell in row:
            told = cell.replace(" %", "\N{NO-BREAK SPACE}%").replace("<", "&lt;").replace("'", "&#39;")
            assert told in html
    assert "simulated" not in html.lower()


def test_simulated_raters_are_labelled_everywhere(make_store):
    store = make_store(pairs=6)
    simulate(store, 3)
    summary = summarise(store)
    assert summary["raters"]["simulated"] == 3
    assert all(rater["is_simulated"] for rater in summary["by_rater"])
    assert {rater["label"] for rater in summary["by_rater"]} == {"simulated 1", "simulated 2", "simulated 3"}
    html = study_page(summary)
    assert "freenergy study · simulated" in html
    assert "<strong>Simulated:</strong> 3 of 3 raters are simulated" in html


def test_before_any_vote(make_store):
    summary = summarise(make_store())
    assert sentence(summary) == "No pair is decided yet."
    assert summary["votes"] == {"given": 0, "dropped": 0, "kept": 0}
    assert "No pair is decided yet." in study_page(summary)


def test_a_verdict_of_chance(make_store):
    store = make_store(pairs=6, qualification=0)
    simulate(store, 3, preference=1.0, attention=1.0)
    assert sentence(summarise(store)) == (
        "Of 6 pairs raters preferred tuned in 100.0 % and plain in 0.0 % (95 % interval 54.1 to 100.0 %; one-sided "
        "binomial test, p = 0.016)."
    )
    store = make_store(pairs=4, qualification=0)
    simulate(store, 3, preference=1.0, attention=1.0)
    assert sentence(summarise(store)).endswith("p = 0.062), which can be chance.")


def test_ties_are_told(counted):
    _, summary, _ = counted
    outcomes = Outcomes(a=1, b=3, ties=2)
    summary["outcomes"] = asdict(outcomes)
    summary["tests"] = {name: asdict(test) for name, test in outcomes.tests().items()}
    assert sentence(summary).startswith(
        "Of 6 pairs raters preferred tuned in 50.0 % and plain in 16.7 %; 33.3 % are ties. Without ties tuned has 75"
    )


def test_texts_survive_the_file(make_study, tmp_path):
    study = make_study(tmp_path / "study", pairs=1)
    odd = Item(number=0, kind="pair", prefix="one\u2028two\x85three", a="\n\r\t", b='"\\ü')
    written = Study(
        folder=tmp_path / "odd", settings=study.settings, models=study.models, items=(odd, *study.items[1:])
    )
    assert Study.open(written.write().folder) == written


def test_damaged_studies(make_study, tmp_path):
    folder = make_study(tmp_path / "study").folder
    with pytest.raises(UserError, match="is not a study"):
        Study.open(tmp_path)
    lines = (folder / "items.jsonl").read_text().splitlines(keepends=True)
    (folder / "items.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(UserError, match="damaged"):
        Study.open(folder)
    (folder / "items.jsonl").unlink()
    with pytest.raises(UserError, match="is incomplete"):
        Study.open(folder)
