"""Texts of the server are those of the library, whoever else asks; and what happens to those who wait."""

import asyncio
import threading
import time

import pytest
import torch

from freenergy import Rng, Sequences, TabularLM, UserError
from freenergy.core.rng import Streams
from freenergy.core.truncation import Truncation
from freenergy.lm.remote import RemoteLM
from freenergy.samplers import Plain, Resampling
from freenergy.text.write import Writing, stream
from freenergy.web.model_server import Added, Busy, Drawn, Finished, ModelServer, Stopping, TooLong
from freenergy.web.settings import Limits

QUESTIONS = {
    "one text": {},
    "three texts": {"num": 3, "seed": 5},
    "truncated": {"truncation": Truncation(top_k=4, temperature=0.8), "seed": 6},
    "the model itself": {"truncation": Truncation(top_p=0.8), "law": "model", "seed": 7},
    "chunks": {"max_tokens": 18, "num": 2, "seed": 8},
}


def requested(engine, prefix, *, candidates=256, truncation=Truncation(), law="restricted", **how):  # noqa: B008
    sampler = Resampling(candidates=candidates, truncation=truncation, law=law)
    return engine.request(prefix, **{"sampler": sampler, **how})


@pytest.fixture
def engine(joint):
    engine = ModelServer(joint, Limits(rows=64, least_rows=8))
    engine.start()
    yield engine
    engine.close()


async def listen(answers):
    return [event async for event in answers]


async def texts(engine, question):
    events = await listen(engine.write_all([question])[0])
    assert isinstance(events[-1], Finished)
    return events[-1].texts


def ask(engine, *questions):
    """All at once, in one event loop."""

    async def all_of_them():
        return await asyncio.gather(*(texts(engine, question) for question in questions))

    return asyncio.run(all_of_them())


def expected(joint, prefix, how):
    """What the library gives."""
    how = {"candidates": 50, "seed": 0, "num": 1} | how
    chunks = how.pop("max_tokens", 6) // 6
    return joint.sample(prefix, n=how.pop("num"), chunks=chunks, **how)


def others():
    """Questions that share the batch: other prefixes, seeds, and numbers of candidates."""
    return [{"prefix": f"{'abcde'[i]} bad" * (i + 1), "candidates": 30 + 20 * i, "seed": 100 + i} for i in range(5)]


# randomness


def test_streams_draw_what_each_would_alone():
    streams = [Rng(7).child("a"), Rng(8), Rng(9).shift(candidates=3)]
    both = Streams(streams)
    rows = both.child("draw").shift(candidates=2).rows(3, 4, 5)
    for b, one in enumerate(streams):
        alone = one.child("draw").shift(candidates=2).rows(1, 4, 5)
        for t in range(5):
            assert rows.uniform(t)[b].equal(alone.uniform(t)[0])
    later = both.shift(contexts=1).rows(2, 4, 5)
    assert later.uniform(0)[0].equal(streams[1].rows(1, 4, 5).uniform(0)[0])
    with pytest.raises(UserError, match="one stream a context"):
        both.rows(4, 1, 1)
    for draw in (both.integer, lambda: both.uniform(2), lambda: both.categorical(torch.zeros(2, 2))):
        with pytest.raises(UserError, match="candidates only"):
            draw()


@pytest.mark.parametrize("batch_size", [1, 7, 20, 1000])
def test_contexts_that_fit_are_drawn_in_one_call(joint, monkeypatch, batch_size):
    contexts = Sequences.from_lists([[97], [98, 99, 100], [], [101, 97]])
    alone = [joint.residual.propose(contexts[b : b + 1], 7, joint.space, Rng(1).shift(contexts=b)) for b in range(4)]
    calls, sample = [], TabularLM.sample

    def counting(self, contexts, num, *rest):
        calls.append((len(contexts), num))
        return sample(self, contexts, num, *rest)

    monkeypatch.setattr(TabularLM, "sample", counting)
    done = []
    found = joint.residual.propose(contexts, 7, joint.space, Rng(1), batch_size=batch_size, advance=done.append)
    assert found.x.lists() == [part.x.lists()[0] for part in alone]
    torch.testing.assert_close(found.energy, torch.cat([part.energy for part in alone]), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.log_base, torch.cat([part.log_base for part in alone]), atol=1e-12, rtol=0)
    assert all(b * n <= max(batch_size, 1) for b, n in calls)
    assert len(calls) == {1: 28, 7: 4, 20: 2, 1000: 1}[batch_size]
    assert sum(done) == 28


# the same texts as the library's


@pytest.mark.parametrize("how", QUESTIONS.values(), ids=QUESTIONS.keys())
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "with five others"])
def test_texts_equal_those_of_the_library(joint, engine, how, is_alone):
    made = [requested(engine, "a bad cab", candidates=50, **how)]
    if not is_alone:
        made += [
            requested(engine, **{"prefix": "", **other} | {k: v for k, v in how.items() if k != "seed"})
            for other in others()
        ]
    found = ask(engine, *made)[0]
    wanted = expected(joint, "a bad cab", how)
    assert [text.tokens for text in found.texts] == [text.tokens for text in wanted.texts]
    assert found.prefix == wanted.prefix
    for text, other in zip(found.texts, wanted.texts, strict=True):
        assert (text.text, text.drawn, text.has_ended) == (other.text, other.drawn, other.has_ended)
        assert text.energy == pytest.approx(other.energy, abs=1e-9)
        assert text.log_base == pytest.approx(other.log_base, abs=1e-9)
    assert found.to_json()["steps"] == [pytest.approx(step) for step in wanted.to_json()["steps"]]
    assert found.all_notes() == wanted.all_notes()
    is_shared = any(size > 1 for size in engine.counts.batches)
    assert is_shared != is_alone


def test_texts_of_the_base_are_its_plain_draws(joint, engine):
    plain = joint.write("dad", joint.space_of(9), stream(4), Writing(sampler=Plain(), num=5))
    how = {"sampler": Plain(), "num": 5, "max_tokens": 9, "seed": 4}
    found = ask(engine, engine.request("dad", model=engine.base, **how))[0]
    assert [text.tokens for text in found.texts] == [text.tokens for text in plain.texts]
    assert any(text.has_ended for text in found.texts) or all(text.drawn == 9 for text in found.texts)
    for text, other in zip(found.texts, plain.texts, strict=True):
        assert text.has_ended or text.log_base == pytest.approx(other.log_base, abs=1e-9)
    assert [text.energy for text in found.texts] == [0] * 5, "the energy has not read them"


def test_a_shorter_text_is_the_beginning_of_a_whole_one(joint, engine):
    short, whole = ask(
        engine,
        *(requested(engine, "a", num=4, candidates=20, max_tokens=most, seed=3) for most in (2, None)),
    )
    assert [text.tokens for text in short.texts] == [text.tokens[:2] for text in whole.texts]
    assert [text.energy for text in short.texts] == [text.energy for text in whole.texts]
    assert all(text.drawn == 6 for text in short.texts)


def test_prompts_of_one_request_have_streams_of_their_own(joint, engine):
    found = ask(engine, *(requested(engine, "a", candidates=20, seed=3, number=i) for i in range(2)))
    for i, one in enumerate(found):
        wanted = joint.write("a", joint.space, stream(3, i), Writing(sampler=Resampling(candidates=20)))
        assert one[0].tokens == wanted[0].tokens


def test_events_come_in_order_and_hold_every_candidate(joint, engine):
    async def one():
        return await listen(
            engine.write_all([requested(engine, "abc", candidates=150, max_tokens=12, num=2, seed=1)])[0]
        )

    events = asyncio.run(one())
    parts = {(event.text, event.chunk) for event in events if isinstance(event, Drawn)}
    assert {(0, 0), (1, 0)} < parts <= {(0, 0), (0, 1), (1, 0), (1, 1)}, "a text may end in its first chunk"
    for text, chunk in parts:
        drawn = [e for e in events if isinstance(e, Drawn) and (e.text, e.chunk) == (text, chunk)]
        sizes = [event.candidates.energy.shape[1] for event in drawn]
        assert sum(sizes) == 150
        assert max(sizes) <= 64
        assert [event.start for event in drawn] == [sum(sizes[:i]) for i in range(len(sizes))]
    added = [event for event in events if isinstance(event, Added)]
    assert [tuple(t for e in added if e.text == r for t in e.tokens) for r in range(2)] == [
        text.tokens for text in events[-1].texts.texts
    ]
    assert isinstance(events[-1], Finished)


def test_a_stop_string_saves_the_chunks_after_it(joint, engine):
    whole = ask(engine, requested(engine, "abc", candidates=5, max_tokens=60, seed=1))[0]
    word = whole[0].text[1:3]
    found = ask(engine, requested(engine, "abc", candidates=5, max_tokens=60, seed=1, stop=[word]))[0]
    assert word in found[0].text
    assert len(found.steps) == 1 < len(whole.steps)


# taking turns


class Gate:
    """An energy that waits, so that a test can look at who stands in the row."""

    def __init__(self):
        self.open, self.begun, self.calls = threading.Event(), threading.Event(), 0

    def __call__(self, x):
        self.calls += 1
        self.begun.set()
        assert self.open.wait(10)
        return torch.zeros(x.shape, dtype=torch.float64)


@pytest.fixture
def gated(make_joint):
    """An engine that stands still until its gate is opened."""
    gate = Gate()
    engine = ModelServer(make_joint(energy=gate), Limits(queue=4, rows=64, least_rows=8, timeout_seconds=30.0))
    engine.start()
    yield engine, gate
    gate.open.set()
    engine.close()


def test_a_large_question_does_not_hold_up_a_small_one(joint):
    engine, order = ModelServer(joint, Limits(rows=64, least_rows=8)), []

    async def one(name, **how):
        await listen(engine.write_all([requested(engine, "ab", **how)])[0])
        order.append(name)

    async def both():
        large = asyncio.create_task(one("large", candidates=4096))
        await asyncio.sleep(0)
        small = asyncio.create_task(one("small", candidates=40, truncation=Truncation(top_k=3)))
        await asyncio.sleep(0)
        engine.start()  # both stand there, the large one first
        await asyncio.gather(large, small)

    asyncio.run(both())
    engine.close()
    assert order == ["small", "large"]


def test_a_full_queue_says_so(gated):
    engine, gate = gated

    async def fill():
        waiting = [engine.write_all([requested(engine, "a", candidates=8, seed=i)])[0] for i in range(4)]
        with pytest.raises(Busy) as busy:
            engine.write_all([requested(engine, "a")])[0]
        with pytest.raises(Busy):
            await engine.call(lambda progress: 1)
        with pytest.raises(Busy):
            engine.write_all([requested(engine, "a")] * 5)
        assert 1 <= int(busy.value.headers["Retry-After"]) <= 60
        assert len(engine.turns) == 4, "of several questions that do not fit none stands in the row"
        gate.open.set()
        await asyncio.gather(*(listen(answers) for answers in waiting))
        assert await engine.call(lambda progress: 41 + 1) == 42

    asyncio.run(fill())
    assert engine.counts.refused == 3
    assert (engine.counts.finished, engine.counts.cancelled) == (5, 0)


def test_who_has_an_answer_finds_its_place_free(joint):
    engine = ModelServer(joint, Limits(queue=1))
    engine.start()

    async def again():
        for seed in range(100):
            await texts(engine, requested(engine, "a", candidates=1, seed=seed))
            await engine.call(lambda progress: None)

    asyncio.run(again())
    engine.close()
    assert engine.counts.finished == 200


@pytest.mark.parametrize("way", ["cancelled", "closed", "forgotten"])
def test_who_goes_away_frees_a_place_at_once(gated, way):
    engine, gate = gated

    async def leave():
        answers = engine.write_all([requested(engine, "a", candidates=640)])[0]
        await asyncio.to_thread(gate.begun.wait, 10)
        assert len(engine.turns) == 1
        if way == "closed":
            await answers.aclose()
        elif way == "cancelled":
            task = asyncio.create_task(listen(answers))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            del answers
        assert len(engine.turns) == 0

    asyncio.run(leave())
    gate.open.set()
    asyncio.run(listen_to(engine))
    assert engine.counts.cancelled == 1
    assert gate.calls == 2, "ten parts were asked for: one was being drawn, and one is of the question after it"


async def listen_to(engine):
    return await texts(engine, requested(engine, "b", candidates=8))


def test_an_answer_that_takes_too_long_is_given_up(make_joint):
    gate = Gate()
    engine = ModelServer(make_joint(energy=gate), Limits(timeout_seconds=0.5))
    engine.start()

    async def wait():
        with pytest.raises(TooLong, match=r"after 0\.5 seconds"):
            await listen(engine.write_all([requested(engine, "a", candidates=8)])[0])
        assert len(engine.turns) == 0
        gate.open.set()
        return await texts(engine, requested(engine, "b", candidates=8))

    assert len(asyncio.run(wait())) == 1
    engine.close()
    assert engine.counts.too_long == 1


def test_a_question_that_fails_fails_alone(make_joint):
    def picky(x):
        if any(row[-1:] == [ord("!")] for row in x.contexts.lists()):
            raise RuntimeError("secret")
        if any(row[-1:] == [ord("?")] for row in x.contexts.lists()):
            raise UserError("the energy cannot read this: ask something else")
        return torch.zeros(x.shape, dtype=torch.float64)

    engine = ModelServer(make_joint(energy=picky))

    async def all_of_them():
        made = [requested(engine, prefix, candidates=16) for prefix in ("ok", "no!", "fine", "why?")]
        tasks = [asyncio.create_task(texts(engine, question)) for question in made]
        await asyncio.sleep(0)
        engine.start()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ok, broken, fine, refused = asyncio.run(all_of_them())
    assert isinstance(broken, RuntimeError)
    assert isinstance(refused, UserError)
    alone = ModelServer(make_joint(energy=picky))
    alone.start()
    for found, prefix in ((ok, "ok"), (fine, "fine")):
        assert found[0].tokens == ask(alone, requested(alone, prefix, candidates=16))[0][0].tokens
    assert (engine.counts.failed, engine.counts.finished) == (2, 2)
    engine.close()
    alone.close()


def test_work_takes_its_turn_and_its_errors_come_back(engine):
    def fail(progress):
        raise UserError("not like this")

    async def calls():
        names = await asyncio.gather(*(engine.call(lambda progress: threading.current_thread().name) for _ in range(3)))
        with pytest.raises(UserError, match="not like this"):
            await engine.call(fail)
        return names

    assert asyncio.run(calls()) == ["freenergy-model"] * 3


def test_closing_tells_who_waits(gated):
    engine, gate = gated

    async def wait():
        task = asyncio.create_task(texts(engine, requested(engine, "a")))
        await asyncio.to_thread(gate.begun.wait, 10)
        threading.Timer(0.1, gate.open.set).start()
        await asyncio.to_thread(engine.close)
        with pytest.raises(Stopping, match="being stopped"):
            await task

    asyncio.run(wait())
    assert len(engine.turns) == 0


def test_many_questions_take_fewer_calls(joint):
    engine = ModelServer(joint)

    async def many():
        made = [requested(engine, f"{i} bad", candidates=32, seed=i) for i in range(32)]
        tasks = [asyncio.create_task(texts(engine, question)) for question in made]
        await asyncio.sleep(0)
        engine.start()
        return await asyncio.gather(*tasks)

    found = asyncio.run(many())
    engine.close()
    assert sum(engine.counts.batches.values()) == 4, "eight contexts of 32 candidates fill 256 rows"
    assert len({text.texts[0].tokens for text in found}) > 20
    assert engine.counts.tokens == 32 * 32 * 6
    assert engine.counts.seconds_working > 0


def test_a_remote_base_is_asked_one_context_at_a_time(make_joint):
    base = RemoteLM(url="http://127.0.0.1:9", vocab_size=257, eos=256)
    assert ModelServer(make_joint(base=base)).turns.max_together == 1
    assert ModelServer(make_joint()).turns.max_together > 1


# what may be asked


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num": 0}, "n is 0: this server takes 1 to 128"),
        ({"num": 129}, "n is 129"),
        ({"candidates": 5000}, "candidates is 5000: this server takes 1 to 4096"),
        ({"max_tokens": 2049}, "max_tokens is 2049"),
        ({"seed": -1}, "seed is -1"),
        ({"prefix": [257]}, "token 257 is not below 257"),
        ({"prefix": "a" * 9000}, "9000 tokens: this server takes at most 8192"),
        ({"prefix": "\ud800"}, "not UTF-8"),
    ],
)
def test_questions_beyond_the_limits_are_refused(engine, how, words):
    with pytest.raises(UserError, match=words):
        requested(engine, **{"prefix": "a", **how})


def test_a_model_without_a_tokenizer_is_not_served(joint):
    from freenergy import ResidualModel

    with pytest.raises(UserError, match="no tokenizer"):
        ModelServer(ResidualModel(joint.base, joint.energy))
    with pytest.raises(UserError, match="queue is 0"):
        Limits(queue=0)


def test_the_model_thread_waits_without_work(engine):
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1
