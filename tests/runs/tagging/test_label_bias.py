"""The lesson on label bias, and the same fork for transducers."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from freenergy.tagging.transducers import TransducerHead

EXAMPLE = Path(__file__).parents[3] / "examples" / "label_bias.py"


def test_the_lesson_shows_what_it_says(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--json", "--plot", str(picture)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    found = json.loads(capsys.readouterr().out)
    assert picture.is_file()
    for a, b in found["sentences"]["local"].values():
        assert a == b  # for every eps
    a, b = found["sentences"]["near"]
    assert (round(a, 2), round(b, 2)) == (-7.06, -7.78)
    assert found["sentences"]["gap"] == pytest.approx(0.722, abs=5e-4)
    assert all(a > b for a, b in found["sentences"]["path"][1:])  # the order holds all along
    for row in found["fork"]:
        assert row["global"]["is_right"]
        assert row["local"]["right"] == pytest.approx(1 - row["share"], abs=0.002)
        assert row["local"]["is_right"] == (row["share"] < 0.5) or row["share"] == 0.5
        given_rib, given_rob = row["local"]["first_tag"]
        assert given_rib == pytest.approx(given_rob, abs=1e-12)  # later letters cannot change it
        assert row["global"]["first_tag"][0] - row["global"]["first_tag"][1] > 0.9


def test_a_transducer_resolves_the_fork_that_an_rnnt_does_not():
    """f sees one letter, g the last tag; tags follow each other only as in rib (0·1·4) and rob (2·3·4)."""
    y = torch.tensor([[0, 1, 4], [2, 3, 4]])
    letters = torch.eye(4, dtype=torch.float64)[torch.tensor([[0, 1, 3], [0, 2, 3]])]
    share = torch.tensor([0.8, 0.2], dtype=torch.float64)
    best = {}
    for law in ("rnnt", "transducer"):
        torch.manual_seed(0)
        made = TransducerHead(law, 4, 5, design=1, history="last", label_width=4, beam=125).double()
        with torch.no_grad():
            made.predict.table.weight.fill_(-50)
            for before, after in ((5, 0), (5, 2), (0, 1), (1, 4), (2, 3), (3, 4)):
                made.predict.table.weight[before, after] = 0
            made.predict.table.weight[4] = 0  # nothing follows the last tag
        made.predict.table.weight.requires_grad_(False)
        optimiser = torch.optim.LBFGS(made.emit.parameters(), max_iter=60, line_search_fn="strong_wolfe")

        def loss(made=made, optimiser=optimiser):
            optimiser.zero_grad()
            nats = made(letters, torch.tensor([3, 3])).loss(y, early_update=True)
            value = (share * nats).sum() + 5e-4 * sum(each.square().sum() for each in made.emit.parameters())
            value.backward()
            return value

        optimiser.step(loss)
        best[law] = made(letters, torch.tensor([3, 3])).argmax().labels.tolist()
    assert best["rnnt"] == [[0, 1, 4], [0, 1, 4]]
    assert best["transducer"] == y.tolist()
