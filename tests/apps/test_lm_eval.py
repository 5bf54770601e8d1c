"""The lm-evaluation-harness on a world of four letters, whose answers can be worked out by hand."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import torch

from freenergy import (
    Continuations,
    NgramFeatures,
    NgramLM,
    ResidualModel,
    Rng,
    TabularLM,
    Tokenizer,
    UserError,
)
from freenergy.apps import lm_eval
from freenergy.apps.lm_eval import TextModel, cut
from freenergy.energies.ngram_features import NgramEnergy
from freenergy.energies.ngram_tables import NgramTables
from freenergy.models.residual import Residual, no_energy

P = {  # P(next | last); the first row is that of a text's beginning
    "": {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25},
    "a": {"b": 0.6, "c": 0.3, "d": 0.1},
    "b": {"a": 0.7, "c": 0.2, "d": 0.1},
    "c": {"a": 0.1, "b": 0.5, "d": 0.4},
    "d": {"a": 0.05, "b": 0.9, "c": 0.05},
}
LETTERS = "abcd"
# The energy is 2 a "b". After a: 0.6 e^-2 = 0.08 < 0.3, so the joint says c where the base says b; after c it says d;
# after d: 0.9 e^-2 = 0.12 > 0.05, so both say b; after b both say a, and both are wrong.
QUESTIONS = [("a", "c"), ("c", "d"), ("d", "b"), ("b", "c")]
RIGHT = {"joint": 3 / 4, "base": 1 / 4}

TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {output_type}
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: " "
{rest}
"""
CHOICE = 'doc_to_choice: ["a", "b", "c", "d"]\nmetric_list:\n  - metric: acc\n'
WRITING = 'generation_kwargs:\n  until: ["."]\n  max_gen_toks: 1\nmetric_list:\n  - metric: exact_match\n'


def energy(x):
    return 2.0 * ((x.tokens == 2) & x.mask).double().sum(-1)


@pytest.fixture
def tokenizer():
    words = tokenizers.models.WordLevel({"<end>": 0, **{letter: i + 1 for i, letter in enumerate(LETTERS)}}, "<end>")
    inner = tokenizers.Tokenizer(words)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner, eos=0)


@pytest.fixture
def joint(tokenizer):
    rows = [[P[last].get(letter, 0.0) for letter in LETTERS] for last in P]
    table = torch.tensor(rows, dtype=torch.float64)
    logits = torch.cat([torch.full((5, 1), 1e-9, dtype=torch.float64), table], dim=1).log()
    return ResidualModel(TabularLM(logits, eos=0), energy, tokenizer)


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Writes a task file beside its data, as a user would."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write(output_type, rest):
        data = tmp_path / "letters.jsonl"
        rows = [{"context": c, "answer": answer} for c, answer in QUESTIONS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "tasks").mkdir()
        text = TASK.format(data=data, output_type=output_type, rest=rest)
        (tmp_path / "tasks" / "letters.yaml").write_text(text)
        return tmp_path / "tasks"

    return write


def test_log_scores_by_hand(joint):
    found = TextModel(joint).log_scores("d a", [" b", " c", " c d"])
    assert found == pytest.approx([math.log(0.6) - 2, math.log(0.3), math.log(0.3 * 0.4)], abs=1e-6)
    assert TextModel(joint).log_scores("d a ", ["c"]) == pytest.approx([math.log(0.3)], abs=1e-6)
    assert TextModel(joint).log_scores("", ["a"]) == pytest.approx([math.log(0.25)], abs=1e-6)


def test_a_tokenizer_that_joins_across_the_border(joint, tokenizer):
    """ "a" + "b" is one word to the tokenizer; the choices still share the context a."""
    found = TextModel(joint).log_scores("d a", ["b", " c"])
    assert found == pytest.approx([math.log(0.6) - 2, math.log(0.3)], abs=1e-6)


def test_a_long_context_loses_its_beginning(joint, caplog):
    """All choices lose the same, so that they keep one context."""
    joint.base.max_length = 3
    seen = []
    joint.residual = Residual(joint.base, lambda x: seen.append(x) or energy(x))
    TextModel(joint).log_scores("d d a", [" b", " c d"])
    assert seen[0].contexts.lists() == [[1]]
    assert "was cut on the left" in caplog.text
    with pytest.raises(UserError, match="a continuation of 3 tokens does not fit a model of 3"):
        TextModel(joint).log_scores("d", [" b c d"])


@pytest.mark.statistical
def test_writing_follows_the_joint_law(joint):
    """120 letters after a, each among 64 candidates: b is rare under the joint and common under the base.

    Under the joint P(b) = 0.6 e^-2 / (0.6 e^-2 + 0.4) = 0.169: 46 b or more of 120 have probability 2e-8, none 2e-10.
    The mutant, which leaves the energy out, has P(b) = 0.6, and 45 or fewer with probability 5e-7.
    """
    model, rng = TextModel(joint, n=64), Rng(3)
    texts = [model.write("a", [], 1, rng.child(i)) for i in range(120)]
    assert 1 <= texts.count("b") <= 45
    mutant = TextModel(ResidualModel(joint.base, no_energy, joint.tokenizer), n=64)
    assert [mutant.write("a", [], 1, rng.child(i)) for i in range(120)].count("b") > 45


def test_writing_stops(joint):
    model = TextModel(joint, n=8, length=6)
    texts = [model.write("a", ["d"], None, Rng(seed)) for seed in range(8)]
    assert not any("d" in text for text in texts)
    assert any("d" in model.write("a", [], None, Rng(seed)) for seed in range(8))
    assert max(len(text.split()) for text in texts) > 1
    assert texts == [model.write("a", ["d"], None, Rng(seed)) for seed in range(8)]
    assert cut("one\n\ntwo", ["\n\n", ""]) == "one"


@pytest.mark.parametrize("settings", [{"n": 0}, {"length": 0}])
def test_bad_settings(joint, settings):
    with pytest.raises(UserError, match="set both to 1 or more"):
        TextModel(joint, **settings)


class TestInTheHarness:
    """With lm_eval itself."""

    pytestmark = pytest.mark.filterwarnings("ignore")  # its warnings are not ours

    @pytest.fixture(autouse=True)
    def harness_there(self):
        pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'freenergy[eval]'")

    @staticmethod
    def evaluate(folder, **settings):
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        lm_eval.register()
        return simple_evaluate(
            model="freenergy",
            model_args={"run": "here"} | settings,
            tasks=["letters"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
        )["results"]["letters"]

    def test_multiple_choice_has_the_accuracy_worked_out_by_hand(self, joint, task, monkeypatch):
        monkeypatch.setattr(lm_eval, "load_residual", lambda run: joint)
        base = ResidualModel(joint.base, no_energy, joint.tokenizer)
        monkeypatch.setattr(lm_eval, "_base_alone", lambda run: base)
        folder = task("multiple_choice", CHOICE)
        assert self.evaluate(folder)["acc,none"] == RIGHT["joint"]
        assert self.evaluate(folder, base=True)["acc,none"] == RIGHT["base"]

    def test_perplexity_is_refused(self, joint, task, monkeypatch):
        monkeypatch.setattr(lm_eval, "load_residual", lambda run: joint)
        with pytest.raises(UserError, match="cannot measure perplexity"):
            self.evaluate(task("loglikelihood_rolling", "metric_list:\n  - metric: word_perplexity\n"))

    def test_one_continuation_alone_is_refused(self, joint, task, monkeypatch):
        monkeypatch.setattr(lm_eval, "load_residual", lambda run: joint)
        with pytest.raises(UserError, match="which needs log Z: use tasks of output_type multiple_choice"):
            self.evaluate(task("loglikelihood", "metric_list:\n  - metric: acc\n"))

    def test_generation_is_ours(self, joint, task, monkeypatch):
        monkeypatch.setattr(lm_eval, "load_residual", lambda run: joint)
        rng = Rng(5).child("text", 0)
        expected = TextModel(joint, n=16).write("a", ["d"], 3, rng)
        model = lm_eval.register()(run="here", n=16, seed=5)
        from lm_eval.api.instance import Instance

        request = Instance("generate_until", {}, ("a", {"until": ["d"], "max_gen_toks": 3}), 0, ("letters", 0, 1))
        assert model.generate_until([request]) == [expected]
        texts = [TextModel(joint).write(c, ["."], 1, Rng(1).child("text", i)) for i, (c, _) in enumerate(QUESTIONS)]
        right = [text == answer for text, (_, answer) in zip(texts, QUESTIONS, strict=True)]
        found = self.evaluate(task("generate_until", WRITING), seed=1)["exact_match,none"]
        assert 0 < found == sum(right) / 4

    def test_choices_of_different_length_are_told(self, joint, caplog):
        from lm_eval.api.instance import Instance

        pairs = [("a", " b"), ("a", " c d")]
        requests = [Instance("loglikelihood", {}, pair, i, ("letters", 0, 1)) for i, pair in enumerate(pairs)]
        scores = lm_eval._choices(TextModel(joint), requests)
        assert [score for score, _ in scores] == TextModel(joint).log_scores("a", [" b", " c d"])
        assert "1 of 1 questions have choices of different length" in caplog.text

    def test_bad_arguments(self):
        FreenergyLM = lm_eval.register()
        assert FreenergyLM is lm_eval.register()
        with pytest.raises(UserError, match="no run is named"):
            FreenergyLM()
        with pytest.raises(UserError, match="unknown model_args pretrained"):
            FreenergyLM(run="here", pretrained="gpt2")
        with pytest.raises(UserError, match="is not a run"):
            FreenergyLM(run="nowhere")

    @pytest.mark.parametrize("bad", [{"n": "many"}, {"length": 1.5}, {"seed": "x"}, {"n": True}, {"base": "no"}])
    def test_arguments_of_another_kind(self, bad):
        with pytest.raises(UserError, match=rf"the model_arg {next(iter(bad))} is .*: give (a whole|true or false)"):
            lm_eval.register()(run="here", **bad)

    def test_as_a_command_on_a_saved_pair(self, tokenizer, task, tmp_path):
        """The accuracy is that of the largest log_score, and base and joint differ."""
        stream = np.array([1, 2, 0, 1, 2, 0, 1, 3, 0, 3, 2, 0, 3, 2, 0, 3, 4, 0, 4, 2, 0, 2, 1, 0, 4, 2, 0])
        lm = NgramLM.fit(stream, vocab_size=5, eos=0, order=2, tokenizer=tokenizer.fingerprint)
        features = NgramFeatures(NgramEnergy(order=2), NgramTables.fit(stream, vocab_size=5, eos=0, order=2))
        with torch.no_grad():
            features.weight.normal_(std=3.0, generator=torch.Generator().manual_seed(4))
        pair, folder = ResidualModel(lm, features, tokenizer), task("multiple_choice", CHOICE)
        pair.save_pretrained(tmp_path / "pair")
        command = [sys.executable, "-m", "freenergy.apps.lm_eval", "--model", "freenergy", "--tasks", "letters"]
        command += ["--model_args", f"run={tmp_path / 'pair'}", "--include_path", str(folder)]
        command += ["--output_path", str(tmp_path / "out")]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-800:]
        [path] = (tmp_path / "out").rglob("results_*.json")
        found = {"joint": json.loads(path.read_text())["results"]["letters"]["acc,none"]}
        found["base"] = self.evaluate(folder, run=str(tmp_path / "pair"), base=True)["acc,none"]
        x = Continuations.from_lists([tokenizer.encode(c) for c, _ in QUESTIONS], [[[1], [2], [3], [4]]] * 4)
        answers = torch.tensor([LETTERS.index(answer) for _, answer in QUESTIONS])
        expected = {"joint": pair.log_score(x), "base": lm.log_prob(x)}
        assert found == {name: (s.argmax(1) == answers).double().mean().item() for name, s in expected.items()}
        assert found["joint"] != found["base"]


def test_without_the_harness_it_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match=r"pip install 'freenergy\[eval\]'"):
        lm_eval.register()
