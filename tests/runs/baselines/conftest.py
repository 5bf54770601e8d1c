"""Tiny bases of both sorts, and corrections that say something."""

import numpy as np
import pytest
import torch
import transformers

from freenergy import HuggingFaceLM, NgramLM, Rng
from freenergy.training.baselines.local_ngram import LocalNgram
from freenergy.training.baselines.local_probe import LocalProbe
from freenergy.training.baselines.ralm import Ralm
from freenergy.training.baselines.residual import ResidualLM

V = 5


@pytest.fixture(scope="session")
def network():
    """Makes a base with a network, of any family."""

    def make(name="GPTNeoX", vocab_size=V, dtype=torch.float32, **options):
        sizes = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
        depth = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "max_position_embeddings": 24}
        options = {"intermediate_size": 16, **options} if name != "GPT2" else options
        config = getattr(transformers, f"{name}Config")(**sizes, **depth, **options)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.normal_(0, 0.4)
        return HuggingFaceLM(model, eos=0)

    return make


@pytest.fixture(scope="session")
def stream():
    return np.array([1, 2, 3, 0, 1, 4, 1, 2, 3, 3, 0, 2, 0, 1, 1, 0] * 3)


@pytest.fixture(scope="session")
def make_model(network, stream):
    """A ResidualLM of a kind, with weights that are far from 0, or at 0."""

    def make(kind, base=None, at_zero=False):
        base = base or (network() if "on counts" not in kind else counts(stream, 2))
        parts, layers = [], ()
        if kind == "ralm":
            parts = [Ralm.from_base(base.model)]
        if kind in ("probe", "both"):
            layers = (1, 2)
            probe = LocalProbe(layers=2, width=base.width, rank=3, vocab_size=base.vocab_size).to(base.model.dtype)
            probe.start(Rng(4))
            parts.append(probe)
        if kind in ("ngram", "both", "ngram on counts"):
            parts.append(LocalNgram([counts(stream, k) for k in (1, 2, 3)]))
        for i, part in enumerate(parts if not at_zero else []):
            with torch.no_grad():
                for j, weight in enumerate(part.parameters()):
                    weight.add_(0.3 * Rng(5).child(i, j).normal(*weight.shape).to(weight))
        for part in parts:
            part.eval()
        return ResidualLM(base, parts, layers=layers)

    return make


def counts(stream, order):
    return NgramLM.fit(stream, vocab_size=V, eos=0, order=order)
