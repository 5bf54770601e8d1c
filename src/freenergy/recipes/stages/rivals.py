"""Stage ``rivals``: language models of the same text that a random field is compared with."""

from functools import partial
from pathlib import Path
from typing import Any

from freenergy.core.files import fingerprint, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.lm.load import RECORD
from freenergy.lm.ngram import NgramLM
from freenergy.recipes.families.random_field import NetworkRival, NgramRival, RandomFieldRun, rival_name
from freenergy.recipes.stages.base import trained_base
from freenergy.runs.run import Plan, Stage


def _plan(run: RandomFieldRun, progress: Progress) -> Plan:
    return Plan({"seed": run.recipe.seed, "rivals": run.recipe.rivals}, partial(_work, run))


def _work(run: RandomFieldRun, folder: Path, progress: Progress) -> dict[str, Any]:
    corpus = Corpus.open(run.stage("corpus"))
    return {rival_name(each): _make(each, run, corpus, folder, progress) for each in run.recipe.rivals}


def _make(
    rival: NgramRival | NetworkRival, run: RandomFieldRun, corpus: Corpus, folder: Path, progress: Progress
) -> dict[str, Any]:
    own, tokenizer = rival_folder(folder, rival_name(rival)), corpus.tokenizer
    if isinstance(rival, NgramRival):
        lm = NgramLM.fit(
            corpus.stream("train"),
            vocab_size=tokenizer.vocab_size,
            eos=tokenizer.eos,
            order=rival.order,
            tokenizer=tokenizer.fingerprint,
        )
        lm.save_pretrained(own / "model")
        write_json(own / RECORD, {"kind": "ngram", "path": "model", "fingerprint": lm.fingerprint})
        return {"kind": rival.kind, "order": rival.order}
    from freenergy.training.tasks.language_model import train_language_model, training_summary

    rng = Rng(run.recipe.seed).child("rivals", rival_name(rival))

    def train(training: Path) -> tuple[Any, dict[str, Any]]:
        return train_language_model(rival.train, corpus, None, training, rng, progress), {}

    return {"kind": rival.kind} | trained_base(own, corpus, train) | training_summary(own / "training")


def rival_folder(folder: Path, name: str) -> Path:
    """Returns where a rival is kept; a name may have any characters."""
    return folder / fingerprint(name)[:12]


STAGE = Stage("rivals", _plan, after=("corpus",))
