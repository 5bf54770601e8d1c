"""A base that only samples: texts of every kind of source become draws, and every fault is one sentence."""

import json
import sys
import textwrap

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from freenergy import (
    Continuations,
    Resampling,
    ResidualModel,
    Rng,
    SamplesLM,
    SecondLM,
    Sequences,
    SequenceSpace,
    TabularLM,
    Tokenizer,
    UserError,
)
from freenergy.core.scored import Scored
from freenergy.core.truncation import Truncation
from freenergy.energies.second_lm import Second, SecondLMEnergy
from freenergy.evaluation.certified import WindowNumbers
from freenergy.lm.load import load_lm, save_lm
from freenergy.lm.sample_only import has_log_prob, part_of, relative_log_prob
from freenergy.lm.sources.command import FromCommand
from freenergy.lm.sources.endpoint import FromEndpoint
from freenergy.lm.sources.function import FromFunction
from freenergy.lm.sources.load import load_source
from freenergy.lm.sources.pool import read_pool
from freenergy.lm.sources.settings import CommandSource, EndpointSource, FunctionSource, PoolSource
from freenergy.lm.sources.trust import SWITCH
from freenergy.models.residual import Residual
from freenergy.samplers import Metropolis, Rejection
from freenergy.samplers.registry import sampler_named
from freenergy.testing import check_sample_only
from text_server import text_server

WORDS = ["<end>", "a", "b", "c", "d", "e"]
V, EOS, L = len(WORDS), 0, 4
CONTEXTS = [[1, 2], [3], []]
SPACE = SequenceSpace(vocab_size=V, length=L, eos=EOS)


@pytest.fixture
def tokenizer():
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, eos=EOS)


@pytest.fixture
def trusted(monkeypatch):
    monkeypatch.setenv(SWITCH, "1")


def letters(prefix, seed):
    """1 to 7 words, which depend on prefix and seed."""
    return " ".join(WORDS[1 + (seed // 7**i + len(prefix)) % 5] for i in range(1 + seed % 7))


def energy(x):
    return torch.where(x.mask, 0.4 * (x.tokens % 3).double(), 0.0).sum(-1) + 0.1 * x.contexts.lengths.view(-1, 1)


PROGRAM = """
    import json, sys
    for line in sys.stdin:
        asked = json.loads(line)
        seed, shift = asked["seed"], len(asked["prefix"])
        words = [chr(ord("a") + (seed // 7**i + shift) % 5) for i in range(1 + seed % 7)]
        {answer}
"""
GOOD = 'print(json.dumps({"text": " ".join(words)}), flush=True)'


def program(folder, answer=GOOD):
    path = folder / "write.py"
    path.write_text(textwrap.dedent(PROGRAM).replace("{answer}", answer))
    return CommandSource(command=("python", str(path)), timeout_seconds=20.0)


def pool_file(folder, rows):
    path = folder / "pool.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sources(tokenizer, tmp_path, trusted):
    """One of each kind, apart from the server."""
    prefixes = [tokenizer.decode(context) for context in CONTEXTS]
    rows = [{"prefix": prefix, "text": letters(prefix, seed)} for seed in range(40) for prefix in prefixes]
    return {
        "function": FromFunction(letters, "letters"),
        "command": FromCommand(program(tmp_path)),
        "pool": read_pool(pool_file(tmp_path, rows)),
    }


@pytest.mark.parametrize("kind", ["function", "command", "pool"])
def test_contract(kind, sources, tokenizer):
    check_sample_only(SamplesLM(source=sources[kind], tokenizer=tokenizer), contexts=CONTEXTS)


def test_a_program_and_a_function_with_the_same_rule_draw_the_same(sources, tokenizer):
    function, command = (
        SamplesLM(source=sources[kind], tokenizer=tokenizer).sample(Sequences.from_lists(CONTEXTS), 5, SPACE, Rng(3))
        for kind in ("function", "command")
    )
    assert torch.equal(function.x.tokens, command.x.tokens)
    assert torch.equal(function.x.lengths, command.x.lengths)


def test_texts_end_with_eos_or_are_cut(tokenizer):
    lm = SamplesLM(source=FromFunction(lambda prefix, seed: "b c d e a", "f"), tokenizer=tokenizer)
    for length, wanted in ((7, [2, 3, 4, 5, 1, EOS]), (5, [2, 3, 4, 5, 1]), (3, [2, 3, 4])):
        space = SequenceSpace(vocab_size=V, length=length, eos=EOS)
        assert lm.sample(Sequences.from_lists([[1]]), 1, space, Rng(0)).x.lists() == [[wanted]]
    empty = SamplesLM(source=FromFunction(lambda prefix, seed: "", "f"), tokenizer=tokenizer)
    assert empty.sample(Sequences.from_lists([[]]), 1, SPACE, Rng(0)).x.lists() == [[[EOS]]]


def test_lead_joins_a_text_to_its_prefix(tokenizer):
    lm = SamplesLM(source=FromFunction(lambda prefix, seed: "b", "f"), tokenizer=tokenizer, lead=" ")
    assert lm.sample(Sequences.from_lists([[1], []]), 1, SPACE, Rng(0)).x.lists() == [[[2, EOS]], [[2, EOS]]]


# --- the twin: a language model behind a server that returns text, and the same with its probabilities ---------------


@pytest.mark.parametrize("chat", [True, False])
def test_the_twin_behind_a_server_has_the_same_certificate(chat, tokenizer):
    """The same draws and energy: certified nats per text equal those with probabilities, to rounding."""
    lm = TabularLM.random(Rng(2), vocab_size=V, order=2)
    contexts = Sequences.from_lists([[1, 2], [3], [4]])
    truth = Continuations.from_lists(contexts.lists(), [[[2, 3, EOS]], [[1, 1, 4, 5]], [[EOS]]])
    with text_server(lm, tokenizer, L) as (url, seen):
        box = SamplesLM(
            source=FromEndpoint(EndpointSource(url=url, chat=chat, model="m", max_tokens=L)), tokenizer=tokenizer
        )
        drawn = box.sample(contexts, 31, SPACE, Rng(5))
    for b in range(3):  # the texts are the language model's own draws, token by token
        for n in range(31):
            seed = Rng(5).child("samples", b).child(n).integer() % 2**31
            own = lm.sample(contexts[b : b + 1], 1, SPACE, Rng(seed))
            assert drawn.x.lists()[b][n] == own.x.lists()[0][0]
    found = {}
    for name, base in {"text only": box, "with probabilities": lm}.items():
        model = Residual(base, energy)
        both = Scored.cat([model.scored(truth), model.scored(drawn.x)], dim=1)
        numbers = WindowNumbers.of(both)
        found[name] = numbers.log_p["certified"] - numbers.log_base
    torch.testing.assert_close(found["text only"], found["with probabilities"], rtol=0, atol=1e-12)
    assert (found["text only"].abs() > 0.01).all()
    assert all("logprobs" not in body and body["model"] == "m" for body in seen)


def test_weights_and_writing_are_those_of_the_twin(tokenizer):
    """Resampling of the same draws by the same energy chooses the same texts, with and without probabilities."""
    lm = TabularLM.random(Rng(2), vocab_size=V, order=1)

    def same(prefix, seed):
        draws = lm.sample(Sequences.from_lists([tokenizer.encode(prefix)]), 1, SPACE, Rng(seed))
        return tokenizer.decode(draws.x.lists()[0][0])

    box = SamplesLM(source=FromFunction(same, "same"), tokenizer=tokenizer)
    model = ResidualModel(box, energy, tokenizer, space=SPACE)
    texts = model.sample("a b", n=6, candidates=40, seed=4)
    found = texts.steps[0].candidates
    assert torch.equal(found.log_weight, -found.energy)
    assert texts.to_json(candidates=True)["texts"][0]["log_base"] is None
    assert {row["log_base"] for row in texts.to_json(candidates=True)["steps"][0]["candidates"]} == {None}
    assert "log P_LM" not in str(texts)


@pytest.mark.parametrize("sampler", [Resampling(candidates=8), Rejection(log_bound=3.0), Metropolis(steps=4)])
def test_samplers_that_need_no_probability_work(sampler, tokenizer):
    model = ResidualModel(
        SamplesLM(source=FromFunction(letters, "letters"), tokenizer=tokenizer), energy, tokenizer, space=SPACE
    )
    assert len(model.sample("a", n=2, sampler=sampler)) == 2


@pytest.mark.parametrize("name", ["sequential", "autoregressive"])
def test_samplers_that_need_probabilities_are_refused(name, tokenizer):
    model = ResidualModel(
        SamplesLM(source=FromFunction(letters, "letters"), tokenizer=tokenizer), energy, tokenizer, space=SPACE
    )
    with pytest.raises(UserError, match=r"the base only gives .*: write with resampling"):
        model.sample("a", n=2, sampler=sampler_named(name))


def test_ranking_is_by_energy_and_says_so(tokenizer):
    lm = SamplesLM(source=FromFunction(letters, "letters"), tokenizer=tokenizer)
    ranking = ResidualModel(lm, energy, tokenizer, space=SPACE).score("a", ["b b", "c c c", "d"])
    assert [row.rank for row in ranking.candidates] == [3, 1, 2]
    assert {row["log_base"] for row in ranking.to_json()["candidates"]} == {None}
    assert "–" in str(ranking)


def test_probabilities_and_truncation_are_refused(tokenizer):
    lm = SamplesLM(source=FromFunction(letters, "letters"), tokenizer=tokenizer)
    contexts = Sequences.from_lists([[1]])
    assert not has_log_prob(lm)
    x = Continuations.from_lists([[1]], [[[2, EOS]]])
    assert torch.equal(relative_log_prob(lm, x), torch.zeros(1, 1, dtype=torch.float64))
    with pytest.raises(UserError, match="set them where the texts are made"):
        lm.sample(contexts, 1, SPACE, Rng(0), Truncation(top_k=2))
    with pytest.raises(UserError, match=r'set corpus\.ending = "eos"'):
        lm.sample(contexts, 1, SequenceSpace(vocab_size=V, length=3), Rng(0))
    with pytest.raises(UserError, match="no probabilities"):
        ResidualModel(lm, energy, tokenizer, space=SPACE).next("a")


# --- pools ------------------------------------------------------------------------------------------------------------


def test_no_text_of_a_pool_serves_two_splits_and_none_is_drawn_twice(tokenizer, tmp_path):
    texts = [" ".join(WORDS[1 + (i // 5**k) % 5] for k in range(3)) for i in range(100)]
    lm = SamplesLM(source=read_pool(pool_file(tmp_path, [{"text": text} for text in texts])), tokenizer=tokenizer)
    drawn = {}
    for split, count in {"train": 50, "validation": 20, "test": 30}.items():
        x = part_of(lm, split).sample(Sequences.from_lists([[]]), count, SPACE, Rng(7).child(split)).x
        drawn[split] = {tuple(row) for row in x.lists()[0]}
        assert len(drawn[split]) == count
        with pytest.raises(UserError, match=f"has {count} {split} texts .* candidate {count + 1} was asked for: add"):
            part_of(lm, split).sample(Sequences.from_lists([[]]), count + 1, SPACE, Rng(7))
    assert (
        not drawn["train"] & drawn["validation"] | drawn["train"] & drawn["test"] | drawn["validation"] & drawn["test"]
    )
    other = lm.sample(Sequences.from_lists([[]]), 30, SPACE, Rng(8)).x
    assert {tuple(row) for row in other.lists()[0]} == drawn[
        "test"
    ]  # writing takes those that nothing has learned from


def test_a_pool_may_say_which_split_a_text_is_for(tokenizer, tmp_path):
    rows = [{"prefix": "a", "texts": ["b", "c"], "split": "train"}, {"prefix": "a", "text": "d", "split": "test"}]
    lm = SamplesLM(source=read_pool(pool_file(tmp_path, rows)), tokenizer=tokenizer)
    one = lm.part("train").sample(Sequences.from_lists([[1]]), 2, SPACE, Rng(0)).x.lists()[0]
    assert sorted(one) == [[2, EOS], [3, EOS]]
    assert lm.part("text").sample(Sequences.from_lists([[1]]), 1, SPACE, Rng(0)).x.lists() == [[[4, EOS]]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "pool.jsonl:1 is not JSON"),
        ("[1]", "is a list"),
        ("{}", 'has no "text"'),
        ('{"text": 3}', 'has no "text"'),
        ('{"text": "a", "split": "dev"}', "split 'dev': leave it out"),
        ("\n", "is empty"),
    ],
)
def test_a_bad_pool_is_one_sentence(line, words, tmp_path):
    (tmp_path / "pool.jsonl").write_text(line)
    with pytest.raises(UserError, match=words):
        read_pool(tmp_path / "pool.jsonl")
    with pytest.raises(UserError, match="there is no file"):
        load_source(PoolSource(path=str(tmp_path / "none.jsonl")))


# --- disk, trust, faults ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["command", "function", "pool", "endpoint"])
def test_a_source_comes_back_from_disk(kind, tokenizer, tmp_path, trusted):
    path = pool_file(tmp_path, [{"text": letters("", seed)} for seed in range(20)])
    settings = {
        "command": program(tmp_path),
        "function": FunctionSource(function=f"{__name__}:letters"),
        "pool": PoolSource(path=str(path)),
        "endpoint": EndpointSource(url="http://127.0.0.1:9/v1", model="m", prompt="Continue: {prefix}"),
    }[kind]
    lm = SamplesLM(source=load_source(settings), tokenizer=tokenizer, lead=" ", settings=settings)
    (tmp_path / "saved").mkdir()
    save_lm(lm, tmp_path / "saved")
    if kind == "pool":
        path.unlink()  # a run has a copy
    again = load_lm(tmp_path / "saved", tokenizer)
    assert isinstance(again, SamplesLM)
    assert again.lead == " "
    if kind == "endpoint":
        assert again.settings == settings
        return
    contexts = Sequences.from_lists([[]])
    first, second = (each.part("train").sample(contexts, 3, SPACE, Rng(1)).x.tokens for each in (lm, again))
    assert torch.equal(first, second)


def test_code_runs_only_where_the_user_says_so(tokenizer, tmp_path, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    for settings in (program(tmp_path), FunctionSource(function=f"{__name__}:letters")):
        lm = SamplesLM(source=load_source(settings), tokenizer=tokenizer, settings=settings)
        with pytest.raises(UserError, match=f"is code that the recipe names: set {SWITCH}=1"):
            lm.sample(Sequences.from_lists([[]]), 1, SPACE, Rng(0))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("print('hello', flush=True)", "answered 'hello': let it print one line such as"),
        ("print(json.dumps({'txt': 'a'}), flush=True)", "let it print one line such as"),
        ("print(json.dumps(3), flush=True)", "let it print one line such as"),
        ("raise SystemExit('no more paper')", r"ended with code 1 \(no more paper\) .*: run it by hand"),
        ("sys.stdout.close(); sys.exit(0)", "ended with code"),
        ("print(json.dumps({'text': 'a', 'ended': False}), flush=True)", "cut off after 1 tokens"),
    ],
)
def test_a_bad_program_is_one_sentence(answer, words, tokenizer, tmp_path, trusted):
    lm = SamplesLM(source=FromCommand(program(tmp_path, answer)), tokenizer=tokenizer)
    with pytest.raises(UserError, match=words):
        lm.sample(Sequences.from_lists([[]]), 3, SPACE, Rng(0))


def test_a_program_that_never_answers_or_is_not_there(tokenizer, trusted):
    silent = CommandSource(command=(sys.executable, "-c", "import sys; sys.stdin.read()"), timeout_seconds=0.3)
    for settings, words in (
        (silent, "did not answer within 0.3 seconds: let it flush"),
        (CommandSource(command=("no-such-program",)), "cannot be started"),
    ):
        with pytest.raises(UserError, match=words):
            SamplesLM(source=FromCommand(settings), tokenizer=tokenizer).sample(
                Sequences.from_lists([[]]), 1, SPACE, Rng(0)
            )


def test_a_bad_function_is_one_sentence(tokenizer, trusted):
    def fails(prefix, seed):
        raise ValueError("no ink")

    def numbers(prefix, seed):
        return seed

    for source, words in (
        (FromFunction(fails, "fails"), r"function fails failed .*\(ValueError: no ink\)"),
        (FromFunction(numbers, "numbers"), "returned a int: let it return one text"),
        (load_source(FunctionSource(function="no_such_module:f")), "cannot be imported"),
    ):
        with pytest.raises(UserError, match=words):
            SamplesLM(source=source, tokenizer=tokenizer).sample(Sequences.from_lists([[]]), 1, SPACE, Rng(0))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("html", "not a chat completion"),
        ("wrong", "not a chat completion"),
        ("short", "cut off"),
        ("broken", "answered 500"),
    ],
)
def test_a_bad_server_is_one_sentence(fault, words, tokenizer):
    lm = TabularLM.random(Rng(2), vocab_size=V, order=1)
    with text_server(lm, tokenizer, 2) as (url, _):
        box = SamplesLM(source=FromEndpoint(EndpointSource(url=f"{url}/{fault}")), tokenizer=tokenizer)
        with pytest.raises(UserError, match=words):
            box.sample(Sequences.from_lists([[1]]), 8, SPACE, Rng(0))
    with pytest.raises(UserError, match="no server answers"):
        box.sample(Sequences.from_lists([[1]]), 1, SPACE, Rng(0))


def test_the_key_travels_in_a_header_and_the_prompt_is_filled_in(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("FREENERGY_API_KEY", "secret")
    lm = TabularLM.random(Rng(2), vocab_size=V, order=1)
    with text_server(lm, tokenizer, L) as (url, seen):
        settings = EndpointSource(url=url, prompt="a {prefix}", system="b", temperature=0.5, max_tokens=L)
        box = SamplesLM(source=FromEndpoint(settings), tokenizer=tokenizer, settings=settings)
        box.sample(Sequences.from_lists([[3]]), 1, SPACE, Rng(0))
    [body] = seen
    assert body["authorization"] == "Bearer secret"
    assert [message["content"] for message in body["messages"]] == ["b", "a c"]
    assert body["temperature"] == 0.5
    assert "secret" not in json.dumps(box.write(tmp_path))


def test_a_second_language_model_is_the_energy_by_itself(tokenizer):
    """φ = log Q(x | c), since log P_LM is 0 by agreement."""
    box = SamplesLM(source=FromFunction(letters, "letters"), tokenizer=tokenizer)
    Q = TabularLM.random(Rng(9), vocab_size=V, order=1)
    x = Continuations.from_lists([[1], [2]], [[[2, 3, EOS], [4, 4]], [[EOS], [5, 1, 1]]])
    found = SecondLM(SecondLMEnergy(path="q"), box, Second(Q, None, "q")).features(x)[..., 0]
    torch.testing.assert_close(found, Q.log_prob(x), atol=0, rtol=0)
