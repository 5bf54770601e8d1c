"""``freenergy distil``: a copy of a run's base, tuned until plain sampling comes near to the residual model.

    OUT/config.json, model.safetensors, tokenizer.json, …    a Hugging Face checkpoint
    OUT/distilled.json                                       what it is worth
    OUT/metrics.jsonl                                        the record of every step
    OUT/work/                                                what is needed to resume after a kill; removed at the end

It is measured on the windows of the run's ``candidates`` stage: by the base's draws that are stored there, and by as
many new draws of its own (``evaluation.distilled``).
"""

import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import (
    atomic_write,
    exclusive_lock,
    fingerprint,
    read_json,
    read_tensors,
    write_json,
    write_text,
)
from freenergy.core.progress import Progress, Silent
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.core.scored import Scored
from freenergy.corpus import Corpus, Windows
from freenergy.evaluation.bootstrap import Compared, compare
from freenergy.evaluation.certified import together
from freenergy.evaluation.distilled import PolicyScores, as_candidates, as_json, divergences
from freenergy.evaluation.perplexity import Counts, PerplexityReport, choose_windows
from freenergy.evaluation.scores import scored_chunks, window_log_probs
from freenergy.lm.checkpoints import save_checkpoint
from freenergy.lm.huggingface import HuggingFaceLM
from freenergy.lm.settings import NgramBase, RemoteBase
from freenergy.lm.sources.settings import SamplesBase
from freenergy.models.residual import Residual
from freenergy.noise.from_lm import FromLM
from freenergy.noise.store import NegativeShards, NegativeStore
from freenergy.partition import certified_gain
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.load import load_text_run
from freenergy.recipes.open_run import load_residual
from freenergy.recipes.stages.candidates import open_candidates
from freenergy.recipes.stages.negatives import stored_identity
from freenergy.runs.run import Plan, Stage, finish
from freenergy.text.model import ResidualModel
from freenergy.training.contrastive_batches import StoredContrast
from freenergy.training.feature_cache import FeatureCache
from freenergy.training.tasks.distil import Distilling, DistilTask, KeptPolicy, network, train_policy

RESULT = "distilled.json"
_WORK, _METRICS = "work", "metrics.jsonl"
_AFTER = ("energy", "candidates")  # the stages that it reads
_WINDOWS = 4  # whose candidates are scored at once: as in the evaluation, so that its features are found
_SILENT = Silent()


def distil(folder: str | Path, settings: Distilling, out: str | Path, progress: Progress = _SILENT) -> dict[str, Any]:
    """Tune a copy of a run's base towards its residual model; what ``distilled.json`` says is returned.

    It is a stage of the run in a folder of the user: what is done is read, and what was interrupted resumes and ends
    with the same bits.
    """
    run, out = load_text_run(Path(folder).resolve()), Path(out).resolve()
    _check_run(run)
    with exclusive_lock(run.folder):
        finish(Stage("distil", partial(_plan, settings), after=_AFTER), run, out, progress)
    return read_json(out / RESULT)


def _plan(settings: Distilling, run: ResidualRun, progress: Progress) -> Plan:
    inputs = {"windows": run.recipe.evaluation.windows, "settings": settings}
    return Plan(inputs, partial(_work, run, settings))


def _check_run(run: ResidualRun) -> None:
    if run.recipe.energy is None:
        raise UserError(
            f"the run in {run.folder} has no energy, so there is no residual model to distil: add an [energy] section "
            "to its recipe and run it again"
        )
    if isinstance(run.recipe.base, NgramBase | RemoteBase | SamplesBase):
        raise UserError(
            f"distilling tunes a copy of the base's network, and a base of kind {run.recipe.base.kind!r} has none: "
            "take a run whose base is trained or pretrained"
        )
    if run.recipe.chunks:
        raise UserError(
            f"the run in {run.folder} writes chunk by chunk, and distilling needs an energy of whole continuations: "
            "leave chunk out of its recipe and run it again"
        )
    for name in _AFTER:
        run.finished(name)


def _work(run: ResidualRun, settings: Distilling, out: Path, progress: Progress) -> dict[str, Any]:
    if not (out / RESULT).is_file():
        _distil(run, settings, out, progress)
    shutil.rmtree(out / _WORK, ignore_errors=True)
    found = read_json(out / RESULT)
    return {"kl": found["kl"], "verdict": found["verdict"]}


def _distil(run: ResidualRun, settings: Distilling, out: Path, progress: Progress) -> None:
    work, rng = out / _WORK, Rng(run.recipe.seed).child("distil")
    corpus, joint = Corpus.open(run.stage("corpus")), load_residual(run.folder)
    base = network(joint.base)
    held_out = _held_out(run, corpus, joint, settings.validation_windows)
    task = DistilTask(
        joint.residual, corpus.windows("train"), held_out, corpus.space, settings, work / "proposals", rng
    )
    policy, chosen = train_policy(task, work / "training", progress)
    split = run.recipe.evaluation.split
    measured = _Measuring(
        run=run, corpus=corpus, joint=joint, policy=policy, windows=corpus.windows(split),
        store=open_candidates(run, corpus), folder=work, rng=rng.child("measuring"), progress=progress,
    )  # fmt: skip
    summary = {
        "split": split,
        "settings": asdict(settings),
        "training": {
            "steps": len((work / "training" / _METRICS).read_text().splitlines()),
            "chosen_step": chosen.step,
            "kl_before": task.proposals.first.kl,
            "kl_after": chosen.kl,
        },
        **measured.all(
            settings.measured_draws,
            fingerprint([[run.finished(name)["key"] for name in _AFTER], asdict(settings), chosen.step]),
        ),
    }
    summary["verdict"] = together(_verdict(summary, chosen), summary["verdict"])
    save_checkpoint(policy.model, work / "model", eos=base.eos, tokenizer=corpus.tokenizer)
    for path in sorted((work / "model").iterdir()):
        path.replace(out / path.name)
    write_text(out / _METRICS, (work / "training" / _METRICS).read_text())
    write_json(out / RESULT, summary)


def _held_out(run: ResidualRun, corpus: Corpus, joint: ResidualModel, most: int) -> Scored:
    """The stored draws of the base for validation windows, with their energies."""
    identity = stored_identity(run, corpus, "validation")
    contrast = StoredContrast(
        corpus.windows("validation"), NegativeStore.open(run.stage("negatives") / "validation", identity)
    )
    cache = FeatureCache(run.features, contrast, leave_self_out=False)
    energy = cache.all_energies(joint.energy, run.recipe.training.rows)[:most, 1:]  # type: ignore[arg-type]
    index = torch.arange(len(energy))
    draws = contrast.store.draws(index, corpus.windows("validation").continuations(contrast.store.rows[index]).contexts)
    return Scored(x=draws.x, log_base=draws.log_base, log_proposal=draws.log_proposal, energy=energy, law="model")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Measuring:
    """Base and policy on the windows that the run's residual model is measured on; everything slow is kept in files."""

    run: ResidualRun
    corpus: Corpus
    joint: ResidualModel
    policy: HuggingFaceLM
    windows: Windows
    store: NegativeStore  # the base's draws for some of the windows
    folder: Path
    rng: Rng
    progress: Progress

    def all(self, draws: int | None, mark: str) -> dict[str, Any]:
        """Every number; ``mark`` names the policy."""
        rows = self.store.rows.numpy()
        counts = Counts.of(self.windows.continuations(rows), self.windows.documents[rows], self.corpus.tokenizer)
        of_base, of_policy = self._of_base(), self._of_policy(draws or self.store.per_prefix, mark)
        return {
            **divergences(of_base, of_policy, counts),
            "candidates": as_candidates(of_base, of_policy, counts),
            "perplexity": self._perplexity(of_base, counts),
        }

    def _of_base(self) -> PolicyScores:
        """The run's candidates."""
        contrast = StoredContrast(self.windows, self.store)
        log_base, energy = self._score(self.joint.base, contrast, self.run.features, "candidates")
        return PolicyScores(log_base, self._log_probs(self.policy, contrast, "policy"), energy)

    def _of_policy(self, draws: int, mark: str) -> PolicyScores:
        """New draws of the policy for the same windows."""
        identity, folder = replace(self.store.identity, lm=mark, per_prefix=draws), self.folder / "draws"
        source, rng = FromLM(self.policy, self.corpus.space), self.rng.child("draws")
        rows = self.store.rows
        shards = NegativeShards(folder, rows, self.windows, source, identity, rng, shard=_WINDOWS, batch=1)
        shards.write(self.progress)
        contrast = StoredContrast(self.windows, NegativeStore.open(folder, identity))
        log_pi, energy = self._score(self.policy, contrast, self.folder / "features", "draws")
        return PolicyScores(self._log_probs(self.joint.base, contrast, "base"), log_pi, energy)

    def _score(self, lm: LanguageModel, contrast: StoredContrast, features: Path, name: str) -> tuple[Tensor, Tensor]:
        """Return log-probabilities under the model that the strings were drawn from, and energies."""
        cache = FeatureCache(
            features, contrast, leave_self_out=self.run.recipe.evaluation.split == "train", batch_size=_WINDOWS
        )
        folder, rows = self.folder / "scores" / name, self.run.recipe.training.rows
        chunks = scored_chunks(Residual(lm, self.joint.energy), cache, folder, self.progress, rows=rows)
        log_p, energy = zip(*((found.log_base, found.energy) for found in chunks), strict=True)
        return torch.cat(log_p), torch.cat(energy)

    def _log_probs(self, lm: LanguageModel, contrast: StoredContrast, name: str) -> Float[Tensor, "W m"]:
        """Log-probabilities under the other model."""
        found = []
        with self.progress.track(f"candidates read by the {name}", len(contrast), "windows") as advance:
            for chunk in torch.arange(len(contrast)).split(_WINDOWS):
                path = self.folder / "log-probs" / name / f"{int(chunk[0]):05d}.safetensors"
                if not path.is_file():
                    with torch.no_grad(), atomic_write(path) as aside:
                        save_file({"log_prob": lm.log_prob(contrast.all(chunk)).double().cpu()}, aside)
                found.append(read_tensors(path)["log_prob"])
                advance(len(chunk))
        return torch.cat(found)

    def _perplexity(self, of_base: PolicyScores, counts: Counts) -> dict[str, Any]:
        """Of base and policy on the windows of the evaluation, next to the residual model's certificate on its own."""
        settings, rng = self.run.recipe.evaluation, Rng(self.run.recipe.seed).child("evaluation", "windows")
        rows = choose_windows(len(self.windows), settings.windows, settings.split, rng)
        on_rows = Counts.of(self.windows.continuations(rows), self.windows.documents[rows], self.corpus.tokenizer)
        log_base, log_pi = (
            window_log_probs(lm, self.windows, rows, self.folder / "windows" / name, name, self.progress)
            for name, lm in (("the base", self.joint.base), ("the policy", self.policy))
        )
        certified = of_base.log_base[:, 0] + certified_gain(of_base.energy[:, 0], of_base.energy[:, 1:])
        against_joint = Compared(of_base.log_pi[:, 0].numpy(), certified.numpy(), counts)
        return {
            "base": PerplexityReport.of(log_base, on_rows, settings.split).to_json(),
            "distilled": compare(Compared(log_pi, log_base, on_rows), against_joint, self.rng.child("bootstrap")),
            "joint_certified": as_json(counts.perplexity(certified.numpy())),
        }


def _verdict(summary: dict[str, Any], chosen: KeptPolicy) -> str:
    """What distilling has not done."""
    if not chosen.step:
        return "no step came nearer to the model than the base: take more draws or steps, or a lower learning rate"
    low, _ = summary["kl"]["less"]["interval"]
    _, most = summary["perplexity"]["distilled"]["against_base"]["interval"]
    if low is None:
        return "the text is one document, so the KL has no interval"
    return together(
        "" if low > 0 else "the interval of the KL's fall holds 0: no gain is shown",
        "perplexity on the text itself has risen" if most is not None and most < 0 else "",
    )
