"""Small residual models for the playground's tests, and a server for them in a thread.

python tests/web/playground_fixtures.py [RUN]        serves the small one, or a run, for a look with a browser
"""

import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers
import torch
import uvicorn

from freenergy import ResidualModel, Rng, TabularLM, load
from freenergy.core.sequences import SequenceSpace
from freenergy.corpus import Tokenizer
from freenergy.corpus.settings import BytePairTokenizer
from freenergy.corpus.tokenizer import learn
from freenergy.lm.ngram import NgramLM
from freenergy.web.app import create_app
from freenergy.web.model_server import ModelServer
from freenergy.web.running import address, bound
from freenergy.web.settings import Limits, ServerSettings

LENGTH = 12
NASTY = [
    "<script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "\"quoted\" 'twice' & &amp; </textarea></title>",
    "W" * 400,
    "\N{HEBREW LETTER SHIN}\N{HEBREW LETTER LAMED}\N{HEBREW LETTER VAV}\N{HEBREW LETTER FINAL MEM}",
    "\N{RIGHT-TO-LEFT OVERRIDE}backwards",
    "{{7*7}}${7*7}",
]


def repeats(x):
    """An energy that dislikes tokens which stood before in the continuation, and likes some tokens more than others."""
    same = x.tokens.unsqueeze(-1) == x.tokens.unsqueeze(-2)
    seen = same.tril(-1).any(-1) & x.mask
    taste = torch.where(x.mask, torch.sin(x.tokens.double()), 0.0)
    return 0.8 * seen.sum(-1) + 0.4 * taste.sum(-1)


def small_joint(energy=repeats):
    """An n-gram model of this project's licence, with an energy."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if len(part) > 80]
    tokenizer = learn(BytePairTokenizer(vocab_size=500), paragraphs)
    stream = [token for part in paragraphs for token in [*tokenizer.encode(part), tokenizer.eos]]
    base = NgramLM.fit(np.array(stream), vocab_size=tokenizer.vocab_size, eos=tokenizer.eos, order=4)
    space = SequenceSpace(vocab_size=base.vocab_size, length=LENGTH)
    return ResidualModel(base, energy, tokenizer, space=space, max_context=40)


def nasty_joint():
    """A model that writes what a page must not run."""
    vocabulary = {word: i for i, word in enumerate(["<end>", *NASTY])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=vocabulary, unk_token="<end>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "isolated")
    base = TabularLM.random(Rng(1), vocab_size=len(vocabulary), order=1)
    space = SequenceSpace(vocab_size=base.vocab_size, length=4)
    return ResidualModel(base, repeats, Tokenizer(inner, 0), space=space)


@contextmanager
def served(joint, *, limits=None, **settings):
    """A server of a residual model at a free port of this machine: its address and its engine."""
    engine = ModelServer(joint, limits or Limits())
    app = create_app(engine, ServerSettings(**settings))
    with bound("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started)
            yield address(listener), engine
        finally:
            server.should_exit = True
            thread.join()


def until(is_true, seconds=20.0):
    """Wait for something."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


if __name__ == "__main__":
    model = load(sys.argv[1]) if len(sys.argv) > 1 else small_joint()
    with served(model, name="try", folder=Path(sys.argv[1]) if len(sys.argv) > 1 else None) as (where, _):
        print(where, flush=True)
        time.sleep(3600)
