"""A residual model of bytes that answers at once, a server on loopback around it, and a small real run."""

import threading
import time
from contextlib import contextmanager

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from freenergy import ResidualModel, Rng, SequenceSpace, TabularLM, Tokenizer
from freenergy.corpus.tokenizer import byte_alphabet

EOS, LENGTH = 256, 6


def byte_tokenizer():
    """A token is a byte; token 256 ends a document."""
    vocabulary = {char: byte[0] for char, byte in byte_alphabet().items()} | {"<end>": EOS}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, eos=EOS)


def byte_model(eos_logit=-2.0):
    """Mostly letters; now and then an é, of two bytes, and the end of a document."""
    logits = torch.full((257, 257), -14.0, dtype=torch.float64)
    likely = [*b"abcdef .", 0xC3]
    logits[:, likely] = Rng(3).normal(257, len(likely))
    logits[:, EOS] = eos_logit
    logits[0xC3] = -14.0
    logits[0xC3, 0xA9] = 4.0
    return TabularLM(logits, eos=EOS)


def byte_energy(x):
    """Depends on every token and on the context, so that crossed answers show."""
    last = [row[-1] if row else EOS for row in x.contexts.lists()]
    tokens = x.tokens + torch.tensor(last).view(-1, 1, 1)
    return torch.where(x.mask, 0.3 * (tokens % 7).double(), 0.0).sum(-1)


@pytest.fixture(scope="session")
def make_joint():
    def make(*, eos=None, energy=byte_energy, length=LENGTH, max_context=8, base=None):
        space = SequenceSpace(vocab_size=257, length=length, eos=eos)
        return ResidualModel(
            byte_model() if base is None else base, energy, byte_tokenizer(), space=space, max_context=max_context
        )

    return make


@pytest.fixture(scope="session")
def joint(make_joint):
    return make_joint()


@pytest.fixture(scope="session")
def serving():
    """A server on a free port of loopback, in a thread of this process."""
    from freenergy.web.connections import SocketLimits
    from freenergy.web.running import LimitedServer, address, bound

    @contextmanager
    def serving(app, sockets=None, grace_seconds=2.0, proxies=()):
        listener = bound("127.0.0.1", 0)
        where = address(listener)
        server = LimitedServer(app, sockets or SocketLimits(), grace_seconds=grace_seconds, proxies=proxies)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.005)
            app.state.server = server
            yield where
        finally:
            server.should_exit = True
            thread.join()
            listener.close()

    return serving


@pytest.fixture(scope="session")
def serve(serving, joint):
    """A server of a residual model with some limits; the engine is beside it."""
    from freenergy.web.app import create_app
    from freenergy.web.model_server import ModelServer
    from freenergy.web.settings import Limits, ServerSettings

    @contextmanager
    def serve(model=joint, *, token=None, max_bytes=2**20, sockets=None, grace_seconds=2.0, **limits):
        engine = ModelServer(model, Limits(**limits))
        settings = ServerSettings(name="tiny", token=token, max_bytes=max_bytes)
        app = create_app(engine, settings)
        engine.app_server = lambda: app.state.server
        with serving(app, sockets, grace_seconds) as address:
            yield address, engine

    return serve


@pytest.fixture(scope="session")
def server(serve):
    """One for all tests that change nothing."""
    with serve() as (address, _):
        yield address
