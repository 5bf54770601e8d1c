"""Log-probabilities of true words after true and own words, and how they are counted and kept."""

import numpy as np
import pytest
import torch

from freenergy.apps.translation.decoding import likelier, load_log_probs, log_probs, save_log_probs
from freenergy.apps.translation.pairs import EncodedPairs
from freenergy.core.errors import UserError
from freenergy.core.progress import Silent

EOS = 0
PAIRS = EncodedPairs(
    [[1, 2, EOS], [3, EOS], [2, 2, 1, EOS], [1, EOS]], [[3, 3, 2, EOS], [1, EOS], [2, 1, EOS], [1, 2, 3, EOS]]
)


@pytest.mark.parametrize("own", [[[3, 1, 2, 2, 1, EOS], [EOS], [1, 1, EOS], [2, EOS]], PAIRS.target])
def test_each_true_word_is_read_after_the_prefix(tiny, own):
    tiny.module.train()
    found = log_probs(tiny, PAIRS, own, 8, Silent(), "")
    assert tiny.module.training
    tiny.module.eval()
    assert [len(one) for one in found] == [min(len(x), len(y)) for x, y in zip(PAIRS.target, own, strict=True)]
    for i, values in enumerate(found):
        for t, value in enumerate(values):
            read = torch.tensor([[tiny.start, *own[i][:t]]])
            with torch.no_grad():
                logits = tiny.model(input_ids=torch.tensor([PAIRS.source[i]]), decoder_input_ids=read).logits[0, -1]
            assert value == pytest.approx(logits.log_softmax(-1)[PAIRS.target[i][t]].item(), abs=1e-6)


def test_words_are_counted_where_both_were_asked():
    ours = [[np.array([-1.0, -2.0, -3.0]), np.array([-1.0])], [np.array([-5.0]), np.array([-1.0])]]
    others = [[np.array([-2.0, -1.0]), np.array([-1.0, -1.0])], [np.array([-6.0]), np.array([-2.0])]]
    more, asked = likelier(ours, others)
    assert more.tolist() == [2.0, 1.0]  # a tie is not likelier
    assert asked.tolist() == [3.0, 2.0]


def test_they_are_kept_as_they_are(tmp_path):
    values = {"test": [np.array([-1.5, -2.0], np.float32), np.zeros(0, np.float32)], "own": [np.ones(3, np.float32)]}
    save_log_probs(tmp_path / "truth.safetensors", values)
    found = load_log_probs(tmp_path / "truth.safetensors")
    assert {name: [one.tolist() for one in each] for name, each in found.items()} == {
        name: [one.tolist() for one in each] for name, each in values.items()
    }
    (tmp_path / "truth.safetensors").write_bytes(b"half")
    for name in ("truth.safetensors", "absent.safetensors"):
        with pytest.raises(UserError, match="measure the network again"):
            load_log_probs(tmp_path / name)
