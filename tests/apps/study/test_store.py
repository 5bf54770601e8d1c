"""Answers on disk: what the file holds and does not hold, and what it refuses."""

import sqlite3
import threading

import pytest

from freenergy import UserError
from freenergy.apps.study import Store, simulate
from freenergy.apps.study.assigning import RefusedError, answer, next_page
from freenergy.apps.study.store import Rater


@pytest.fixture
def study(make_study, tmp_path):
    return make_study(tmp_path / "study")


def rows(study, query):
    with sqlite3.connect(study.folder / "answers.sqlite") as db:
        found = db.execute(query).fetchall()
    db.close()
    return found


def test_the_file_is_durable_and_strict(study):
    with Store(study) as store, store.transaction() as db:
        settings = {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "foreign_keys")}
        assert settings == {"journal_mode": "wal", "foreign_keys": 1}
        assert db.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL


def test_tokens_are_not_in_the_file(study):
    with Store(study) as store:
        (invitation,) = store.invite(1)
        session = store.enter(invitation.token)
        assert store.rater_of(session) == Rater(1, "rater 1", is_simulated=False)
        assert store.enter("wrong") is None
        assert store.rater_of(invitation.token) is None
        files = b"".join(path.read_bytes() for path in study.folder.glob("answers.sqlite*"))
    assert b"rater 1" in files
    for secret in (invitation.token, session):
        assert secret.encode() not in files


def test_tokens_are_long_and_never_the_same(study):
    with Store(study) as store:
        tokens = [invitation.token for invitation in store.invite(50)]
        assert len(set(tokens)) == 50
        assert min(map(len, tokens)) >= 43  # 256 bits in base 64
        labels = [invitation.label for invitation in store.invite(1) + store.invite(1, simulated=True)]
    assert labels == ["rater 51", "simulated 1"]


def test_answers_outlive_the_process_that_took_them(study, sides):
    with Store(study) as store:
        token = store.invite(1)[0].token
        rater = store.rater_of(store.enter(token))
        page = next_page(store, rater)
        assert answer(store, rater, page.token, sides(page, lambda item: "b"))
    with Store(study) as store:
        rater = store.rater_of(store.enter(token))
        assert not answer(store, rater, page.token, sides(page, lambda item: "b"))  # counted before
        with pytest.raises(RefusedError, match="changed"):
            answer(store, rater, page.token, sides(page, lambda item: "a"))
    assert len(rows(study, "SELECT * FROM votes")) == 4


def test_nothing_is_left_of_a_transaction_that_fails(study):
    with Store(study) as store:
        rows = [("x", "one", 0), ("x", "two", 0)]  # the same label twice
        with pytest.raises(sqlite3.IntegrityError), store.transaction() as db:
            db.executemany("INSERT INTO raters (label, token, is_simulated) VALUES (?, ?, ?)", rows)
        assert store.raters() == []


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO votes SELECT page, place, rater, item, side FROM votes LIMIT 1",  # a place twice
        "INSERT INTO votes SELECT page, place + 90, rater, item, side FROM votes LIMIT 1",  # an item twice
        "INSERT INTO votes SELECT page, place, rater, item, 3 FROM votes LIMIT 1",
        "INSERT INTO pages (rater, token, kind, state, opened, seen) VALUES (99, 't', 'task', 'open', 0, 0)",
        "INSERT INTO places SELECT page, place + 90, item, first FROM places LIMIT 1",
    ],
)
def test_the_tables_forbid_what_must_not_be(study, statement):
    with Store(study) as store:
        simulate(store, 1)
        with pytest.raises(sqlite3.IntegrityError), store.transaction() as db:
            db.execute(statement)


def test_a_rater_has_one_open_page(study):
    with Store(study) as store:
        store.invite(1)
        next_page(store, store.raters()[0])
        with pytest.raises(sqlite3.IntegrityError), store.transaction() as db:
            db.execute(
                "INSERT INTO pages (rater, token, kind, state, opened, seen) VALUES (1, 't', 'task', 'open', 0, 0)"
            )


def test_answers_to_other_texts_are_refused(study, make_study):
    Store(study).close()
    with Store(study) as store:
        store.invite(1)
    with pytest.raises(UserError, match="other texts"):
        Store(make_study(study.folder, pairs=7))


def test_a_file_that_is_no_database(study):
    (study.folder / "answers.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match="cannot be opened"):
        Store(study)


def test_threads_and_connections_do_not_give_a_pair_too_often(make_study, tmp_path, sides):
    """Eight raters ask and answer at once, through two connections to one file."""
    study = make_study(tmp_path / "study", pairs=9, qualification=0, checks=9)
    with Store(study) as one, Store(study) as two:
        one.invite(8)

        def work(rater, store):
            for _ in range(20):
                page = next_page(store, rater)
                if not hasattr(page, "token"):
                    return
                answer(store, rater, page.token, sides(page, lambda item: "b"))

        threads = [threading.Thread(target=work, args=(rater, (one, two)[rater.id % 2])) for rater in one.raters()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts = rows(study, "SELECT item, COUNT(*), COUNT(DISTINCT rater) FROM votes WHERE item < 9 GROUP BY item")
    assert counts == [(item, 3, 3) for item in range(9)]
