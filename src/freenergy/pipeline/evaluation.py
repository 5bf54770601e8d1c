"""Stage ``evaluation``: how good base and joint model are on held-out text, and what they write."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from freenergy.base.opening import open_base
from freenergy.corpus import Corpus
from freenergy.energies.checked import energies_in_parts
from freenergy.energies.opening import load_energy
from freenergy.evaluation.certified import CertifiedReport, certify, score_windows
from freenergy.evaluation.perplexity import perplexity
from freenergy.pipeline.candidates import open_candidates
from freenergy.pipeline.energy import MODEL
from freenergy.pipeline.run import Plan, Run, Stage
from freenergy.progress import Progress
from freenergy.protocols import Energy, LanguageModel
from freenergy.randomness import Rng
from freenergy.sequences import Continuations
from freenergy.storage import write_json
from freenergy.training.contrast import StoredContrast
from freenergy.training.feature_cache import FeatureCache

_WINDOWS = 4  # whose candidates are scored at once
_SHOWN = 64  # candidates that a shown continuation of the joint model is chosen from


def _plan(run: Run, progress: Progress) -> Plan:
    inputs = {"seed": run.recipe.seed, "settings": asdict(run.recipe.evaluation)}
    return Plan(inputs, partial(_work, run))


def _work(run: Run, folder: Path, progress: Progress) -> dict[str, Any]:
    settings, rng = run.recipe.evaluation, Rng(run.recipe.seed).child("evaluation")
    corpus = Corpus.open(run.stage("corpus"))
    lm = open_base(run.stage("base"), corpus.tokenizer)
    energy: nn.Module | None = None
    summary: dict[str, Any] = {}
    if run.recipe.energy is not None:
        energy = load_energy(run.stage("energy") / MODEL, base=lm, tokenizer=corpus.tokenizer)
        summary["joint"] = _certified(run, corpus, lm, energy, folder, progress).to_json()
    report = perplexity(lm, corpus, settings.split, settings.windows, rng.child("windows"), progress)
    summary |= {"base": {"perplexity": report.to_json()}, "samples": _samples(run, corpus, lm, energy, rng, progress)}
    write_json(folder / "evaluation.json", summary)
    return summary


def _certified(
    run: Run, corpus: Corpus, lm: LanguageModel, energy: nn.Module, folder: Path, progress: Progress
) -> CertifiedReport:
    """Score the candidates of every window, and see what is gained."""
    split = run.recipe.evaluation.split
    windows, store = corpus.windows(split), open_candidates(run, corpus)
    cache = FeatureCache(run.features, StoredContrast(windows, store), is_own=split == "train", at_once=_WINDOWS)
    numbers = score_windows(lm, energy, cache, folder / "scores", progress, rows=run.recipe.training.rows)
    report = certify(**numbers, documents=windows.documents[store.rows.numpy()])
    if split == "test":
        return report
    return replace(report, note=f"measured on {split} text, which the energy was chosen by. {report.note}".strip())


def _samples(
    run: Run, corpus: Corpus, lm: LanguageModel, energy: Energy | None, rng: Rng, progress: Progress
) -> list[dict[str, Any]]:
    """Continuations of held-out prefixes: human, the base's first draw, and the joint's choice among many draws."""
    settings = run.recipe.evaluation
    windows, decode = corpus.windows(settings.split), corpus.tokenizer.decode
    chosen = rng.child("samples").permutation(len(windows))[: settings.samples]
    examples = []
    with progress.track("samples", len(chosen), "windows") as advance:
        for b, row in enumerate(chosen.tolist()):
            x = windows.continuations([row])
            stream = rng.child("draws").shift(contexts=b)
            draws = lm.sample(x.contexts, 1 if energy is None else _SHOWN, corpus.space, stream)
            texts = {"prefix": decode(x.contexts.lists()[0]), "human": decode(x.lists()[0][0])}
            texts["base"] = decode(draws.x.lists()[0][0])
            if energy is not None:
                texts["joint"] = decode(_resampled(energy, draws.x, rng.child("choice", b)))
            examples.append({**texts, "log_base": draws.log_base[0, 0].item()})
            advance(1)
    return examples


def _resampled(energy: Energy, x: Continuations, rng: Rng) -> list[int]:
    """One of the candidates, with probability proportional to exp(−E): Algorithm 1 of Deng et al. (2020)."""
    E = energies_in_parts(energy, x)
    return x.lists()[0][int(rng.categorical(-E[0:1]).item())]


STAGE = Stage("evaluation", _plan, after=("base", "energy", "candidates"))
