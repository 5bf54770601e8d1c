"""SmolLM2 behind a server that returns text only, and with its probabilities: the same certified nats per text."""

import pytest
import torch

from freenergy import Continuations, Rng, SamplesLM, Sequences, SequenceSpace, Tokenizer
from freenergy.core.scored import Scored
from freenergy.corpus.resources.fetch import is_cached
from freenergy.evaluation.certified import WindowNumbers
from freenergy.lm.huggingface import HuggingFaceLM
from freenergy.lm.load import locate_model
from freenergy.lm.sources.endpoint import FromEndpoint
from freenergy.lm.sources.settings import EndpointSource
from freenergy.models.residual import Residual
from text_server import text_server

L, N = 6, 3
TEXTS = {"The capital of France": " is Paris, on the river", "Water boils at": " one hundred degrees at sea level"}


def energy(x):
    """Reads tokens alone: rare ones, which have large numbers, cost more."""
    return torch.where(x.mask, (x.tokens.double() / 8000).clamp(max=3), 0.0).sum(-1)


def test_smollm2_behind_a_server_that_returns_text_only(monkeypatch):
    monkeypatch.delenv("FREENERGY_CACHE")  # the user's own
    if not is_cached("smollm2-135m"):
        pytest.skip("the weights of SmolLM2-135M are not in the cache: run smollm2-energy, which fetches them")
    path = locate_model("smollm2-135m")
    tokenizer = Tokenizer.from_pretrained(path)
    lm = HuggingFaceLM.from_pretrained(path, eos=tokenizer.eos)
    space = SequenceSpace(vocab_size=tokenizer.vocab_size, length=L, eos=tokenizer.eos)
    contexts = Sequences.from_lists([tokenizer.encode(prefix) for prefix in TEXTS])
    truth = Continuations.from_lists(contexts.lists(), [[tokenizer.encode(text)[:L]] for text in TEXTS.values()])
    with text_server(lm, tokenizer, 2 * L) as (url, _):
        settings = EndpointSource(url=url, chat=False, parallel=1, timeout_seconds=300.0)
        box = SamplesLM(source=FromEndpoint(settings), tokenizer=tokenizer)
        drawn = box.sample(contexts, N, space, Rng(5)).x
    gains = []
    for base in (box, lm):
        model = Residual(base, energy)
        numbers = WindowNumbers.of(Scored.cat([model.scored(truth), model.scored(drawn)], dim=1))
        gains.append(numbers.log_p["certified"] - numbers.log_base)
    torch.testing.assert_close(gains[0], gains[1], rtol=0, atol=1e-9)
    assert (gains[0] != 0).all()
