"""RemoteLM against a real server process on loopback: exact values, exact laws, and one sentence for every fault."""

import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import completion_server
from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import Truncation
from freenergy.lm.completions import Completions
from freenergy.lm.remote import RemoteLM
from freenergy.lm.remote_scoring import log_proposal
from freenergy.testing import check_language_model

V, EOS = 11, 0
CONTEXTS = [[3, 4, 5], [7], []]
SHAPES = ["legacy", "chat", "chat+no-echo", "legacy+refuse-zero", "prompt-logprobs", "legacy+apart", "chat+ignore-echo"]
FALSE_FAILURES = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, n_positions=16, n_embd=16, n_layer=2, n_head=2, eos_token_id=EOS, bos_token_id=EOS
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)  # far from uniform, so that a wrong law shows
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def address(folder):
    script = Path(completion_server.__file__)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            ready, _, _ = select.select([process.stdout], [], [], 120)
            assert ready, "the server did not start within two minutes"
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def forward(folder):
    """log P(v | ids) by a plain forward pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def law(ids):
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    return law


def remote(address, faults="legacy", **settings):
    return RemoteLM(url=f"{address}/{faults}/v1", **{"vocab_size": V, "eos": EOS, "most_log_probs": V, **settings})


def plain_log_prob(forward, context, x):
    context = context or [EOS]
    law = forward(context + x)
    return sum(float(law[len(context) + t - 1, token]) for t, token in enumerate(x))


def asked(address, faults):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{address}/{faults}", timeout=10) as reply:
        return json.load(reply)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_prob_is_that_of_a_plain_forward_pass(address, forward, shape):
    rows = [[[1, 2, 0], [9, 10, 3]], [[5], [6, 0]], [[0], [8, 8, 8]]]
    x = Continuations.from_lists(CONTEXTS, rows)
    got = remote(address, shape, batch=2).log_prob(x)
    want = [[plain_log_prob(forward, c, y) for y in ys] for c, ys in zip(CONTEXTS, rows, strict=True)]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", ["legacy", "chat"])
def test_contract(address, shape):
    """The contract of every language model; the sampler's law is the server's, and is tested by statistics below."""
    check_language_model(remote(address, shape), contexts=CONTEXTS, length=2, tolerance=1e-6, is_enumerable=False)


@pytest.mark.parametrize("eos", [None, EOS])
def test_log_prob_sums_to_one_over_the_space(address, eos):
    strings = SequenceSpace(vocab_size=V, length=2, eos=eos).enumerate()
    x = Continuations(Sequences.from_lists([[3, 4]]), strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
    assert remote(address, batch=50).log_prob(x).logsumexp(-1).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("shape", ["legacy", "chat"])
def test_next_log_probs(address, forward, shape):
    got = remote(address, shape).next_log_probs(Sequences.from_lists(CONTEXTS))
    want = torch.stack([forward(context or [EOS])[-1] for context in CONTEXTS])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("faults", ["legacy", "chat", "text+ids"])
@pytest.mark.parametrize("eos", [None, EOS])
def test_draws_are_scored_as_log_prob_scores_them(address, faults, eos):
    contexts = Sequences.from_lists(CONTEXTS)
    space = SequenceSpace(vocab_size=V, length=4, eos=eos)
    draws = remote(address, faults).sample(contexts, 8, space, Rng(1))
    assert draws.log_proposal.equal(draws.log_base)
    assert draws.x.lengths.equal(space.lengths(draws.x.tokens))
    assert (draws.x.tokens == EOS).any(), "a text that ends early is part of the test"
    torch.testing.assert_close(remote(address).log_prob(draws.x), draws.log_base, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "truncation",
    [
        Truncation(top_k=4),
        Truncation(top_k=4, temperature=0.7),
        Truncation(top_k=5, top_p=0.8),
        Truncation(top_p=0.8),
        Truncation(temperature=1.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("faults", ["legacy", "chat"])
def test_log_proposal_is_the_truncation_of_the_whole_law(address, truncation, faults):
    lm = remote(address, faults)
    draws = lm.sample(Sequences.from_lists(CONTEXTS), 4, SequenceSpace(vocab_size=V, length=3), Rng(2), truncation)
    rows = [(context or [EOS], x) for context, xs in zip(CONTEXTS, draws.x.lists(), strict=True) for x in xs]
    prefixes = Sequences.from_lists([context + x[:t] for context, x in rows for t in range(3)])
    law = truncation(lm.next_log_probs(prefixes))
    want = law.gather(-1, draws.x.tokens.view(-1, 1)).view(*draws.x.shape, 3).sum(-1)
    torch.testing.assert_close(draws.log_proposal, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(lm.log_prob(draws.x), draws.log_base, atol=1e-6, rtol=0)


def law_p_value(lm, num, seed):
    """Chi-square of drawn strings against log_prob over the enumerated space; cells below five are pooled."""
    space = SequenceSpace(vocab_size=V, length=2, eos=EOS)
    contexts, strings = Sequences.from_lists([[3, 4]]), space.enumerate()
    x = Continuations(contexts, strings.tokens.unsqueeze(0), strings.lengths.unsqueeze(0))
    expected = num * lm.log_prob(x)[0].exp()
    cells = {tuple(row): i for i, row in enumerate(strings.lists())}
    counts = torch.zeros(len(cells), dtype=torch.float64)
    for row in lm.sample(contexts, num, space, Rng(seed)).x.lists()[0]:
        counts[cells[tuple(row)]] += 1
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum().view(1)])
    wanted = torch.cat([expected[large], expected[~large].sum().view(1)])
    return stats.chisquare(observed.numpy(), (wanted * observed.sum() / wanted.sum()).numpy()).pvalue


@pytest.mark.statistical
def test_draws_follow_the_law(address):
    """False-failure rate 1e-6; the mutant server draws from a law with flattened logits and reports the right one."""
    assert law_p_value(remote(address), 1000, seed=5) > FALSE_FAILURES
    assert law_p_value(remote(address, "wrong-law"), 1000, seed=5) < FALSE_FAILURES


def test_the_same_rng_asks_with_the_same_seeds_whatever_the_batch(address):
    space = SequenceSpace(vocab_size=V, length=3, eos=EOS)
    contexts = Sequences.from_lists([[3], [4]])
    together = remote(address, "legacy-namea").sample(contexts, 3, space, Rng(9))
    again = remote(address, "legacy-nameb").sample(contexts, 3, space, Rng(9))
    apart = remote(address, "legacy-namec").sample(contexts[1:], 2, space, Rng(9).shift(contexts=1, candidates=1))
    assert together.x.tokens.equal(again.x.tokens)
    assert together.x.tokens[1:, 1:].equal(apart.x.tokens)
    seeds = [sorted(body["seed"] for body in asked(address, f"legacy-name{name}")) for name in "ab"]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == len(seeds[0])
    assert remote(address).sample(contexts, 3, space, Rng(10)).x.tokens.ne(together.x.tokens).any()


def test_every_request_rests_the_knobs_that_bend_the_law(address):
    lm = remote(address, "legacy-nameknobs", model="tiny", api_key=" secret \n")
    lm.sample(Sequences.from_lists([[3]]), 1, SequenceSpace(vocab_size=V, length=2), Rng(0))
    [body, *_] = asked(address, "legacy-nameknobs")
    assert body["model"] == "tiny"
    assert body["authorization"] == "Bearer secret"
    at_rest = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}
    assert {key: body[key] for key in at_rest} == at_rest
    assert body["top_k"] == V
    assert "ignore_eos" not in body


def test_a_token_inside_a_character_is_scored_by_the_whole_list(address, forward):
    x = Continuations.from_lists([[3]], [[[7, 2]]])
    got = remote(address, "chat+no-echo+partial").log_prob(x)
    assert got.item() == pytest.approx(plain_log_prob(forward, [3], [7, 2]), abs=1e-5)


def test_busy_and_reset_are_tried_again(address, monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    x = Continuations.from_lists([[3]], [[[4]]])
    want = remote(address).log_prob(x)
    assert remote(address, "legacy+busy2-nameretry").log_prob(x).equal(want)
    assert remote(address, "legacy+reset2-nameretry").log_prob(x).equal(want)
    assert waits == [0.25, 0.5, 0.25, 0.5]


def draw(lm, truncation=None, num=1, length=4):
    space = SequenceSpace(vocab_size=V, length=length, eos=EOS)
    return lm.sample(Sequences.from_lists([[3]]), num, space, Rng(0), truncation or Truncation())


def score(lm, x=(4, 5)):
    return lm.log_prob(Continuations.from_lists([[3]], [[list(x)]]))


def names(lm):
    return lm.next_log_probs(Sequences.from_lists([[3]]))


FAULTS = {
    "no-logprobs": (draw, {}, "gave no log-probabilities"),
    "html": (score, {}, "answered with text/html that is not a completion"),
    "500": (score, {}, "answered 500 (CUDA is out of memory): look at the server's own log"),
    "401": (score, {}, "answered 401 (no key): check the API key"),
    "slow": (score, {"timeout_seconds": 0.2}, "did not answer within 0.2 seconds: raise timeout_seconds"),
    "busy9": (score, {"attempts": 2}, "answered 503 (loading): it stayed so over 2 attempts"),
    "reset9": (score, {"attempts": 2}, "hung up 2 times"),
    "lose-a-token": (draw, {}, "gave log-probabilities of"),
    "chat+partial": (lambda lm: draw(lm, num=50), {}, "leaves out tokens that end inside a character"),
    "lose-an-answer": (score, {}, "1 prompts were sent and the server at {url} gave 0 answers: set batch to 1"),
    "omit-eos": (lambda lm: draw(lm, num=50), {}, "which is not EOS (0): name it in stops"),
    "bad-ids": (draw, {}, "is not in the vocabulary of 11"),
    "bos": (score, {}, "read token 0 where 3 was sent, place 0: it adds or changes tokens"),
    "text": (draw, {}, "spells tokens as text and gives no ids"),
    "nan": (score, {}, "gave nan as the log-probability of token 4"),
    "short-lists": (names, {}, "all 11 tokens were asked for and the server at {url} gave"),
    "max5": (names, {}, "refused (Requested sample logprobs of 11, more than 5): start vLLM with --max-logprobs 11"),
    "chat+short-lists": (lambda lm: draw(lm, Truncation(top_k=4)), {}, "4 log-probabilities per token were requested"),
    "ignore-truncation": (lambda lm: draw(lm, Truncation(top_k=2), 50), {}, "it ignores top_k or top_p"),
    "processed": (lambda lm: draw(lm, Truncation(top_k=4), 50), {}, "always sum to one, so its log-probabilities are"),
    "chat+no-echo+processed": (score, {}, "neither scores prompts (echo) nor gives the raw log-probability"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_sentence_with_the_address_and_no_credentials(address, fault):
    act, settings, sentence = FAULTS[fault]
    lm = remote(address.replace("//", "//alice:hunter2@"), fault, api_key="s3cr3t", **settings)
    with pytest.raises(UserError) as caught:
        act(lm)
    words = str(caught.value)
    url = f"{address}/{fault}/v1/completions"
    assert sentence.format(url=url) in words
    assert url in words
    for secret in ("hunter2", "alice", "s3cr3t"):
        assert secret not in words + repr(lm) + repr(lm.server)
    assert "\n" not in words


def test_nobody_at_the_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=r"no server answers at .*: start it, or correct the address"):
        score(RemoteLM(url=address, vocab_size=V, eos=EOS))


@pytest.mark.parametrize(
    ("truncation", "settings", "sentence"),
    [
        (Truncation(temperature=0.8), {"most_log_probs": 5}, "temperature 0.8 alone needs"),
        (Truncation(temperature=0.8, top_p=0.9), {}, "servers apply them in different orders"),
        (Truncation(temperature=0.8, top_p=0.9, top_k=3), {}, "servers apply them in different orders"),
        (Truncation(top_p=0.999), {"most_log_probs": 2}, "likeliest tokens hold"),
    ],
    ids=str,
)
def test_what_a_list_cannot_tell_is_refused(address, truncation, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        draw(remote(address, **settings), truncation)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: RemoteLM(url="ftp://host", vocab_size=V, eos=EOS), "is not the address of a server"),
        (lambda: RemoteLM(url="localhost:8000", vocab_size=V, eos=EOS), "is not the address of a server"),
        (lambda: RemoteLM(url="http://host:port", vocab_size=V, eos=EOS), "address cannot be read"),
        (lambda: RemoteLM(url="http://host", vocab_size=V, eos=V), "EOS is 11 in a vocabulary of 11"),
        (lambda: RemoteLM(url="http://host", vocab_size=V, eos=EOS, batch=0), "batch is 0: set it above 0"),
        (lambda: score(RemoteLM(url="http://host", vocab_size=V, eos=EOS), (V,)), "token 11 is not in the vocabulary"),
        (lambda: score(RemoteLM(url="http://host", vocab_size=V, eos=EOS, max_length=2)), "do not fit"),
        (lambda: draw(RemoteLM(url="http://host", vocab_size=V, eos=EOS), num=0), "ask for at least one"),
        (lambda: draw(RemoteLM(url="http://host", vocab_size=V + 1, eos=EOS)), "give both the same tokenizer"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_sent(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://u:p@h:1/v1/completions?key=3"])
def test_the_address_is_completed_and_shown_without_secrets(url):
    assert Completions(url=url).shown == "http://h:1/v1/completions"


@given(
    st.lists(st.floats(-6, 0), min_size=3, max_size=9, unique=True),
    st.integers(1, 9),
    st.sampled_from([None, 0.3, 0.9]),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_a_list_gives_the_same_proposal_as_the_whole_vocabulary(logits, top_k, top_p, temperature):
    """Against ``Truncation`` on the whole law, for every token that it keeps."""
    log_p = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
    truncation = Truncation(temperature=temperature if top_p is None else 1.0, top_k=top_k, top_p=top_p)
    size = min(top_k, len(logits))
    top = {int(i): float(log_p[i]) for i in log_p.argsort(descending=True)[:size]}
    for token, want in enumerate(truncation(log_p).tolist()):
        if want > -torch.inf:
            got = log_proposal(top, float(log_p[token]), truncation, size, "nowhere")
            assert got == pytest.approx(want, abs=1e-9) or _on_the_edge(log_p, truncation)


def _on_the_edge(log_p, truncation):
    """True where a sum falls on top_p or two tokens are nearly tied, within the tolerance for servers' rounding."""
    ranked = log_p.sort(descending=True).values[: truncation.top_k]
    sums = ranked.softmax(-1).cumsum(-1)
    near_ties = bool((ranked[:-1] - ranked[1:] < 1e-4).any())
    return near_ties or bool((sums - (truncation.top_p or 1.0)).abs().min() < 1e-4)
