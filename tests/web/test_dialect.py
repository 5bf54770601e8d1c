"""Requests, refusals, and texts that grow."""

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.web.dialect import CompletionRequest, Refusal, as_event, is_base_name, kind_of, malformed
from freenergy.web.settings import ServerSettings
from freenergy.web.spelling import Growing, Place, Spelling, log_probs, num_kept


def request(**fields):
    return CompletionRequest(**{"model": "tiny", **fields})


@pytest.fixture(scope="module")
def tokenizer(joint):
    return joint.tokenizer


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("one", ["one"]),
        ("", [""]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], []], [[1, 2], []]),
    ],
)
def test_prompts_have_four_shapes(prompt, wanted):
    assert request(prompt=prompt).prompts() == wanted


@pytest.mark.parametrize("prompt", [[1, "a"], {"a": 1}, 3, [True], [[-1]], [1.5], [[["a"]]], [2**40]])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(ValidationError) as error:
        request(prompt=prompt)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in error.value.errors()]
    told = malformed(RequestValidationError(errors))
    assert told.param == "prompt"
    assert str(told).startswith("prompt must be a text, a list of texts")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, ANCESTRAL),
        ({"temperature": 0}, Truncation(top_k=1)),
        ({"temperature": 0, "top_p": 0.3}, Truncation(top_k=1)),
        ({"temperature": 0.5, "top_k": 7}, Truncation(temperature=0.5, top_k=7)),
        ({"top_k": -1, "top_p": 1}, ANCESTRAL),
        ({"top_k": 0}, ANCESTRAL),
        ({"top_k": 100}, ANCESTRAL),
        ({"top_p": 0.9, "temperature": None}, Truncation(top_p=0.9)),
    ],
)
def test_the_proposal(fields, wanted):
    found = request(**fields).truncation(100)
    assert found == wanted
    assert found.is_identity == wanted.is_identity


AT_REST = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
    "logit_bias": {},
    "suffix": "",
}


def test_knobs_at_rest_are_accepted():
    request(**AT_REST, user="me", best_of=2, n=2, stream_options=None).check()


@pytest.mark.parametrize(
    "fields",
    [
        *({name: {"5": 1.0} if name == "logit_bias" else "x" if name == "suffix" else 0.5} for name in AT_REST),
        {"best_of": 2},
        {"best_of": 1, "n": 2},
        {"stream_options": {"include_usage": True}},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 1, "echo": True},
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_name(fields):
    with pytest.raises(Refusal) as error:
        request(**fields).check()
    assert error.value.param == next(name for name in fields if name not in ("n", "echo"))
    assert error.value.status == 400
    assert "\n" not in str(error.value)


def test_models_have_names():
    settings = ServerSettings(name="tiny")
    assert not is_base_name("tiny", settings)
    assert is_base_name("tiny-base", settings)
    with pytest.raises(Refusal, match="use tiny or tiny-base") as error:
        is_base_name("gpt-3" * 100, settings)
    assert (error.value.status, error.value.code) == (404, "model_not_found")
    assert len(str(error.value)) < 250


def test_errors_have_types():
    assert [kind_of(status) for status in (400, 401, 404, 408, 429, 500)] == [
        "invalid_request_error",
        "authentication_error",
        "invalid_request_error",
        "timeout_error",
        "rate_limit_error",
        "server_error",
    ]
    assert as_event("[DONE]") == "data: [DONE]\n\n"
    assert as_event({"a": "é\n"}) == 'data: {"a": "\\u00e9\\n"}\n\n'


# texts that grow


def cut_at(text, stops):
    """Before the stop string that is complete first, the longest of several that end there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(
    text=st.text(alphabet="abé€ .", max_size=20),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stops=st.lists(st.text(alphabet="ab .", min_size=1, max_size=3), max_size=3),
)
def test_pieces_join_to_the_whole_text(tokenizer, text, cuts, stops):
    """However the tokens come, what is shown is never taken back, and ends before the stop string."""
    tokens = tokenizer.encode(text)
    places = sorted({min(cut, len(tokens)) for cut in cuts} | {0, len(tokens)})
    growing, shown = Growing(tokenizer, tuple(stops)), ""
    for start, end in zip(places, [*places[1:], len(tokens)], strict=True):
        shown += growing.add(tokens[start:end], is_last=False)
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
    shown += growing.add((), is_last=True)
    assert shown == cut_at(text, stops)
    assert (growing.stopped_by is None) == (not any(stop in text for stop in stops))


def test_half_a_character_waits_for_its_other_half(tokenizer):
    growing = Growing(tokenizer, ())
    assert growing.add([97, 0xC3], is_last=False) == "a"
    assert growing.add([0xA9], is_last=False) == "é"
    assert growing.add([0xC3], is_last=False) == ""
    assert growing.add((), is_last=True) == "\ufffd"


def test_a_stop_string_over_two_pieces(tokenizer):
    growing = Growing(tokenizer, ("END",))
    assert growing.add(b"one E", is_last=False) == "one "
    assert growing.add(b"NDLESS", is_last=False) == ""
    assert growing.stopped_by == "END"
    assert growing.add(b"more", is_last=True) == ""
    assert num_kept(Spelling(tokenizer).offsets(growing.tokens), growing) == 4
    other = Growing(tokenizer, ("END",))
    other.add(b"one E", is_last=False)
    assert other.add(b"at", is_last=False) == "Eat"


def test_tokens_are_spelled_so_that_none_is_lost(tokenizer):
    spelling = Spelling(tokenizer)
    assert spelling.token(97) == "a"
    assert spelling.token(97, as_id=True) == "token_id:97"
    assert spelling.token(0xC3) == "bytes:\\xc3"
    assert spelling.token(256) == "token_id:256"
    assert len({spelling.token(token) for token in range(257)}) == 257
    assert spelling.offsets(tokenizer.encode("aé€b")) == [0, 1, 1, 2, 2, 2, 3]


def test_log_probs_are_lists_side_by_side(tokenizer):
    told = [Place(97, None, ()), Place(98, -0.5, ((99, -0.1), (98, -0.5))), Place(99, -1.0, ((0, -float("inf")),))]
    found = log_probs(Spelling(tokenizer), told, [0, 1, 2], as_ids=True)
    assert found == {
        "tokens": ["token_id:97", "token_id:98", "token_id:99"],
        "token_logprobs": [None, -0.5, -1.0],
        "top_logprobs": [
            None,
            {"token_id:99": -0.1, "token_id:98": -0.5},
            {"token_id:0": -9999.0, "token_id:99": -1.0},
        ],
        "text_offset": [0, 1, 2],
    }
