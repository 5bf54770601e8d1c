"""Learning to fill masks: the corruption, the loss, and a network that comes to see both ways."""

import math

import numpy as np
import pytest
import tokenizers
import torch
from torch.nn.functional import cross_entropy

from freenergy import Rng, UserError
from freenergy.core.progress import Silent
from freenergy.corpus import Corpus, CorpusReport, Tokenizer
from freenergy.corpus.store import SplitReport
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.lm.networks.blocks import BlockData
from freenergy.lm.presets import build, preset
from freenergy.training.settings import Optimisation
from freenergy.training.tasks.language_model import MaskedLanguageModelTask, hide, train_masked_trunk

V, BLOCK = 9, 8


def runs(count, seed):
    """Runs that count up by one, each from another start: a hidden token follows from its neighbours on either side."""
    starts = np.random.default_rng(seed).integers(0, V - 1, size=(count, 1))
    return ((starts + np.arange(4 * BLOCK)) % (V - 1) + 1).ravel()


def task(share=0.3, **optimisation):
    model = build(preset("tiny").config(vocab_size=V + 1, eos=0), Rng(0))
    settings = Optimisation(**{"batch_size": 4, "accumulate": 2} | optimisation)
    streams = runs(50, 0), runs(20, 1)
    return MaskedLanguageModelTask(model, blocks(*streams, settings, Rng(1)), mask_share=share, rng=Rng(1))


def blocks(train, validation, steps, rng):
    sizes = {"batch_size": steps.batch_size, "accumulate": steps.accumulate}
    return BlockData(train, validation, block=BLOCK, **sizes, known=0, validation_tokens=50_000, rng=rng)


@pytest.mark.statistical
@pytest.mark.parametrize("fault", [None, "kept too often"])
def test_the_shares_of_what_is_hidden(fault):
    """Chosen 0.15; of these 0.8 masks, 0.1 any token, 0.1 kept.

    Three z-scores of 400,000 places below 5.5: a false-failure rate of 3·4e-8 = 1.2e-7.
    """
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, V, size=(400, 1000)))
    hidden, chosen = hide(tokens, share=0.15, mask=V, rng=Rng(2))
    if fault:
        hidden = torch.where(chosen & (Rng(3).uniform(400, 1000) < 0.03), tokens, hidden)
    assert torch.equal(hidden[~chosen], tokens[~chosen])
    assert int(hidden.min()) >= 0
    assert int(hidden.max()) == V
    n, k = tokens.numel(), int(chosen.sum())
    masks, kept = int((hidden == V).sum()), int((hidden == tokens)[chosen].sum())
    kept_share = 0.1 + 0.1 / V  # any token may be the same token
    z = [
        (k - 0.15 * n) / math.sqrt(n * 0.15 * 0.85),
        (masks - 0.8 * k) / math.sqrt(k * 0.8 * 0.2),
        (kept - kept_share * k) / math.sqrt(k * kept_share * (1 - kept_share)),
    ]
    assert (max(map(abs, z)) > 5.5) == bool(fault)


def test_the_loss_is_cross_entropy_at_chosen_places_without_a_causal_mask():
    learning, rng = task(), Rng(5)
    model = learning.module.eval()
    found = learning.loss(3, 1, rng)
    rows = learning.data.train.rows(((3 - 1) * 2 + 1) * 2, 2)[:, :-1]
    hidden, chosen = hide(rows, share=0.3, mask=V, rng=Rng(5))
    with torch.no_grad():
        logits, causal = model(hidden, attention_mask=torch.zeros(2, 1, BLOCK, BLOCK)).logits, model(hidden).logits
    torch.testing.assert_close(found.value.detach(), cross_entropy(logits[chosen], rows[chosen]))
    assert (cross_entropy(causal[chosen], rows[chosen]) - found.value.detach()).abs().item() > 1e-4


def test_no_chosen_place_is_no_loss():
    loss = task(share=1e-9).loss(1, 0, Rng(0))
    assert loss.value.item() == 0
    loss.value.backward()


def test_validation_is_the_same_each_time():
    learning = task()
    learning.module.eval()
    with torch.no_grad():
        assert learning.validate() == learning.validate()


def corpus(tmp_path, continuation=4):
    """What training asks of a corpus."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(V)}, unk_token="1"))
    sizes = {"prefix": 4, "continuation": continuation, "vocab_size": V, "eos": 0, "ngram": 0, "ending": "fixed"}
    report = CorpusReport(**sizes, fingerprint="", tokenizer="", splits={}, examples=())
    made = Corpus(tmp_path, report, Tokenizer(words, eos=0))
    for name, seed in (("train", 0), ("validation", 1)):
        stream = runs(100, seed).astype(np.uint16)
        stream.tofile(tmp_path / f"{name}.bin")
        made.report.splits[name] = SplitReport(documents=1, tokens=len(stream), bytes=0, windows=0)
    return made


def test_it_learns_and_begins_an_energy(tmp_path):
    settings = BitEnergy(start="scratch", preset="tiny", mask_share=0.2)
    steps = Optimisation(steps=50, batch_size=32, learning_rate=1e-3, warmup=10, validate_every=25)
    (tmp_path / "run").mkdir()
    made = corpus(tmp_path)
    model = train_masked_trunk("tiny", made, steps, tmp_path / "run", Rng(0), Silent(), mask_share=0.2)
    assert model.config.vocab_size == V + 1
    held_out = blocks(made.stream("train"), made.stream("validation"), steps, Rng(0))
    learning = MaskedLanguageModelTask(model.eval(), held_out, mask_share=0.2, rng=Rng(0))
    with torch.no_grad():
        assert learning.validate().value < 0.5 * math.log(V - 1)  # half that of any guess without context
    energy = Bit.from_trunk(settings, model)
    assert torch.equal(next(energy.trunk.network.parameters()), next(model.base_model.parameters()))


def test_windows_beyond_the_preset_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"windows of 4 \+ 300 tokens do not fit the 256 of the preset 'tiny'"):
        train_masked_trunk("tiny", corpus(tmp_path, 300), Optimisation(), tmp_path, Rng(0), Silent(), mask_share=0.15)
