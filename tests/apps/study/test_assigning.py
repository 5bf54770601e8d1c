"""Who gets which comparison: pages of four, fewest votes first, nobody twice, nothing lost."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freenergy.apps.study import Store
from freenergy.apps.study.assigning import EXPIRES_SECONDS, End, RefusedError, answer, next_page
from freenergy.apps.study.store import ballots, chosen


def right(item):
    return "b"


def finish(store, rater, sides, choose=right):
    """All pages of a rater."""
    pages = []
    while not isinstance(page := next_page(store, rater), End):
        answer(store, rater, page.token, sides(page, choose))
        pages.append(page)
    return pages, page


def test_a_page_has_three_pairs_and_a_check(make_store, sides):
    store = make_store(pairs=9, qualification=8)
    store.invite(1)
    pages, end = finish(store, store.raters()[0], sides)
    kinds = [Counter(place.item.kind for place in page.places) for page in pages]
    assert kinds == [{"qualification": 4}] * 2 + [{"pair": 3, "check": 1}] * 3
    assert [(page.number, page.of) for page in pages] == [(1, 2), (2, 2), (1, 3), (2, 3), (3, 3)]
    assert end == End("finished", 3)
    shown = [place.item.number for page in pages for place in page.places]
    assert len(set(shown)) == len(shown)


def test_the_last_page_may_be_short(make_store, sides):
    store = make_store(pairs=4, qualification=0)
    store.invite(1)
    pages, _ = finish(store, store.raters()[0], sides)
    assert [Counter(place.item.kind for place in page.places)["pair"] for page in pages] == [3, 1]
    assert all(Counter(place.item.kind for place in page.places)["check"] == 1 for page in pages)


def test_the_check_stands_anywhere_and_sides_are_fair(make_store):
    """400 coins and places; each count is outside its bounds with probability below 1e-6."""
    store = make_store(pairs=3, qualification=0, votes=1000)
    store.invite(400)
    pages = [next_page(store, rater) for rater in store.raters()]
    places = Counter(i for page in pages for i, place in enumerate(page.places) if place.item.kind == "check")
    assert set(places) == {0, 1, 2, 3}
    assert min(places.values()) > 55  # of 400, 100 are expected: 5.2 standard deviations
    firsts = Counter(place.first for page in pages for place in page.places)
    assert abs(firsts["a"] - 800) < 100  # of 1600: 5 standard deviations
    assert len({tuple(place.item.number for place in page.places) for page in pages}) > 10


def test_pairs_with_the_fewest_votes_come_first(make_store, sides):
    store = make_store(pairs=6, qualification=0)
    store.invite(2)
    one, two = store.raters()
    first = next_page(store, one)
    second = next_page(store, two)

    def pairs(page):
        return {place.item.number for place in page.places if place.item.kind == "pair"}

    assert not pairs(first) & pairs(second)  # those on an open page count as asked


def test_coming_back_gives_the_same_page(make_store, clock):
    store = make_store()
    store.invite(2)
    one, two = store.raters()
    page = next_page(store, one)
    clock.now += 10 * EXPIRES_SECONDS  # nobody has asked for it meanwhile
    assert next_page(store, one) == page
    assert next_page(store, two).places != page.places


def test_a_page_that_nobody_answers_goes_to_others(make_store, clock, sides):
    store = make_store(pairs=3, qualification=0, votes=1)
    store.invite(2)
    one, two = store.raters()
    page = next_page(store, one)
    assert next_page(store, two) == End("waiting", 0)
    clock.now += EXPIRES_SECONDS + 1
    taken = next_page(store, two)
    assert {place.item.number for place in taken.places if place.item.kind == "pair"} == {0, 1, 2}
    with pytest.raises(RefusedError, match="expired"):
        answer(store, one, page.token, sides(page, right))
    assert answer(store, two, taken.token, sides(taken, right))
    assert next_page(store, one) == End("finished", 0)


def test_a_late_answer_counts_while_nobody_else_has_the_page(make_store, clock, sides):
    store = make_store()
    store.invite(1)
    rater = store.raters()[0]
    page = next_page(store, rater)
    clock.now += 10 * EXPIRES_SECONDS
    assert answer(store, rater, page.token, sides(page, right))


@pytest.mark.parametrize(("wrong", "passes"), [(3, True), (4, False)])
def test_the_pass_mark(make_store, sides, wrong, passes):
    """More than two thirds of twelve are nine."""
    store = make_store(qualification=12)
    store.invite(1)
    rater = store.raters()[0]
    missed = [item.number for item in store.study.of("qualification")][:wrong]
    for _ in range(3):
        page = next_page(store, rater)
        assert page.kind == "qualification"
        answer(store, rater, page.token, sides(page, lambda item: "a" if item.number in missed else "b"))
    found = next_page(store, rater)
    assert found.kind == "task" if passes else found == End("not qualified", 0)


def test_answers_are_counted_once_and_only_whole(make_store, sides):
    store = make_store()
    store.invite(2)
    one, two = store.raters()
    page = next_page(store, one)
    good = sides(page, right)
    for token, given_sides, rater, why in [
        (page.token, good, two, "unknown"),  # another rater's page
        ("forged", good, one, "unknown"),
        (page.token, {0: 1, 1: 1, 2: 1}, one, "incomplete"),
        (page.token, good | {4: 1}, one, "incomplete"),
        (page.token, good | {0: 3}, one, "incomplete"),
    ]:
        with pytest.raises(RefusedError, match=why):
            answer(store, rater, token, given_sides)
    assert answer(store, one, page.token, good)
    assert not answer(store, one, page.token, good)
    with pytest.raises(RefusedError, match="changed"):
        answer(store, one, page.token, {place: 3 - side for place, side in good.items()})
    with store.transaction() as db:
        votes = ballots(db)
    assert [vote.choice for vote in votes] == ["b"] * 4
    assert {vote.rater for vote in votes} == {one.id}


def test_texts_that_are_the_same_are_not_shown(make_store, sides):
    store = make_store(pairs=3, same=2, qualification=0)
    store.invite(1)
    pages, _ = finish(store, store.raters()[0], sides)
    assert {place.item.number for page in pages for place in page.places if place.item.kind == "pair"} == {2, 3, 4}


def test_a_rater_gets_at_most_so_many_pages(make_store, sides):
    store = make_store(pairs=12, pages=2, qualification=0)
    store.invite(1)
    pages, end = finish(store, store.raters()[0], sides)
    assert [(page.number, page.of) for page in pages] == [(1, 2), (2, 2)]
    assert end == End("finished", 2)


def test_without_new_checks_there_are_no_pages(make_store, sides):
    store = make_store(pairs=12, checks=1, qualification=0)
    store.invite(1)
    pages, end = finish(store, store.raters()[0], sides)
    assert (len(pages), pages[0].of, end) == (1, 1, End("finished", 1))


def test_a_side_is_undone():
    assert [chosen(first, side) for first in "ab" for side in (1, 2)] == ["a", "b", "b", "a"]


@settings(max_examples=30)
@given(data=st.data(), pairs=st.integers(1, 7), votes=st.integers(1, 3), raters=st.integers(1, 4))
def test_whatever_the_order_of_events(make_study, tmp_path_factory, sides, data, pairs, votes, raters):
    """Raters ask, answer and leave in any order, and hours pass: no pair has too many votes, none of a rater twice."""
    time = [0.0]
    study = make_study(tmp_path_factory.mktemp("any") / "study", pairs, votes=votes, qualification=0, checks=pairs)
    with Store(study, in_memory=True, clock=lambda: time[0]) as store:
        store.invite(raters)
        everybody = store.raters()
        for _ in range(data.draw(st.integers(0, 25))):
            rater = data.draw(st.sampled_from(everybody))
            page = next_page(store, rater)
            event = data.draw(st.sampled_from(["answer", "leave", "wait"]))
            if event == "answer" and not isinstance(page, End):
                assert answer(store, rater, page.token, sides(page, right))
            elif event == "wait":
                time[0] += EXPIRES_SECONDS + 1
            with store.transaction() as db:
                query = """SELECT COUNT(*), COUNT(DISTINCT pages.rater) FROM places JOIN pages ON pages.id = page
                           WHERE state <> 'expired' AND item < ? GROUP BY item"""
                counts = [tuple(row) for row in db.execute(query, (pairs,))]
            assert all(count == distinct <= votes for count, distinct in counts)
        for rater in everybody:  # in the end all is asked that can be
            time[0] += EXPIRES_SECONDS + 1
            finish(store, rater, sides)
        with store.transaction() as db:
            found = Counter(vote.item for vote in ballots(db) if vote.item < pairs)
        assert found == {item: min(votes, raters) for item in range(pairs)}
