"""Stage ``negatives``: continuations of training and validation prefixes, for the energy to learn from."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel, Noise
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.core.workers.shards import prefetch_shards
from freenergy.corpus import Corpus, Windows
from freenergy.energies.probe import ProbeEnergy
from freenergy.lm.activations import TracingLM
from freenergy.lm.load import RECORD
from freenergy.lm.sample_only import part_of
from freenergy.noise.from_lm import FromLM
from freenergy.noise.mixture import Mixture
from freenergy.noise.settings import BaseNegatives, InfilledNegatives, LearnedNegatives, NegativeSettings
from freenergy.noise.store import Identity, NegativeShards
from freenergy.noise.traces import Traced
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.chunks import corpus_of_split, open_corpus
from freenergy.recipes.stages.language_models import RUNGS, base_folder, known_documents, load_base
from freenergy.recipes.stages.workers import Opened, job
from freenergy.runs.run import Plan, Stage

BASE_ALONE = (BaseNegatives(),)  # held-out negatives are the base's own, or the gain would not be over the base
ROWS = 256  # continuations drawn at once

Sources = tuple[BaseNegatives | InfilledNegatives | LearnedNegatives, ...]


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    settings = run.recipe.negatives
    models = [_mark(source.model) for source in settings.sources if isinstance(source, InfilledNegatives)]
    inputs: dict[str, Any] = {"seed": run.recipe.seed, "settings": settings, "models": models}
    if run.recipe.chunks:
        inputs["chunks"] = run.recipe.chunks
    if not _learns(run):  # another energy in its place will want those of training
        inputs["splits"] = stored_splits(run)
    return Plan(inputs, partial(_work, run))


def _mark(model: str) -> str:
    from freenergy.lm.checkpoints import checkpoint_fingerprint

    return checkpoint_fingerprint(Path(model))


def _work(run: ResidualRun, folder: Path, progress: Progress) -> dict[str, Any]:
    settings, corpus = run.recipe.negatives, open_corpus(run)
    lm = load_base(run, corpus)
    summary: dict[str, Any] = {"relative_to_another_law": settings.is_relative}
    if known := known_documents(run.recipe, corpus.report.splits["train"].documents):
        summary["documents_left_out"] = known  # no training window is chosen from them
    if settings.is_relative:
        progress.say(
            "the law of the negatives is unknown (infilled) or zero on some text (truncated): the energy's optimum is "
            "then relative to that law, and its gain over the base is measured but is not what training optimises"
        )
    for split in stored_splits(run):
        shards = _shards(Opened(run, corpus, lm), split)
        work = job(run, _shards, (), split)
        prefetch_shards(run.workers, work, shards.missing(), shards.folder, f"draws for {split} prefixes", progress)
        shards.write(progress)
        summary[split] = {"windows": len(shards.rows), "per_prefix": shards.identity.per_prefix}
    return summary


def _shards(opened: Opened, split: str) -> NegativeShards:
    """The shards of a split; of held-out text they are the base's own draws."""
    run, lm = opened.run, opened.lm
    settings, identity = run.recipe.negatives, stored_identity(run, opened.corpus, split)
    corpus = corpus_of_split(run, opened.corpus, split)
    return NegativeShards(
        run.stage("negatives") / split,
        chosen_windows(run, opened.corpus, split),
        corpus.windows(split),
        make_noise(settings, lm, corpus) if split == "train" else from_base(part_of(lm, split), corpus, ANCESTRAL),
        identity,
        Rng(run.recipe.seed).child("negatives", split),
        shard=settings.shard,
        batch=max(1, ROWS // identity.per_prefix),
        traced=traced(run, lm),
    )


def traced(run: ResidualRun, lm: LanguageModel) -> Traced | None:
    """What the energy will read of draws, which is kept as they are drawn; None: it reads whole texts."""
    if run.recipe.energy is None or run.recipe.training.lengths > 1 or not isinstance(lm, TracingLM):
        return None
    parts = [part for part in run.recipe.energy.split() if isinstance(part, ProbeEnergy)]
    layers = {layer for part in parts if part.after == parts[0].after for layer in part.layers_of(lm.num_layers)}
    return Traced(tuple(sorted(layers)), parts[0].after) if parts else None


def identify(run: ResidualRun, corpus: Corpus, split: str, per_prefix: int, sources: Sources) -> Identity:
    """What negatives of a split are made of."""
    return Identity(
        lm=str(read_json(base_folder(run) / RECORD)["fingerprint"]),
        tokenizer=corpus.tokenizer.fingerprint,
        corpus=corpus.fingerprint,
        split=split,
        seed=run.recipe.seed,
        per_prefix=per_prefix,
        sources=fingerprint([asdict(source) for source in sources]),
        space=corpus.space,
    )


def stored_splits(run: ResidualRun) -> tuple[str, ...]:
    """The splits whose negatives are kept: where nothing is learned, or from fresh ones, none of training."""
    learns_from_store = not run.recipe.negatives.fresh and _learns(run)
    return ("validation", "train") if learns_from_store else ("validation",)


def _learns(run: ResidualRun) -> bool:
    return run.recipe.energy is None or run.recipe.energy.learns


def stored_identity(run: ResidualRun, corpus: Corpus, split: str) -> Identity:
    """What the stored negatives of the train or the validation split are made of."""
    settings, corpus = run.recipe.negatives, corpus_of_split(run, corpus, split)
    if split == "train":
        return identify(run, corpus, split, settings.per_prefix, settings.sources)
    return identify(run, corpus, split, settings.validation_per_prefix, BASE_ALONE)


def chosen_windows(run: ResidualRun, corpus: Corpus, split: str) -> torch.Tensor:
    """The windows of a split that negatives are drawn for, in random order."""
    settings, windows = run.recipe.negatives, corpus_of_split(run, corpus, split).windows(split)
    wanted = settings.windows if split == "train" else settings.validation_windows
    order = Rng(run.recipe.seed).child("negatives", split, "windows").permutation(len(windows))
    if split == "train" and (known := known_documents(run.recipe, corpus.report.splits[split].documents)):
        order = _unknown(order, windows, known)
    return order[: wanted or len(order)]


def _unknown(order: torch.Tensor, windows: Windows, known: int) -> torch.Tensor:
    """Keep the windows of documents that no rung of the base has read: it knows the others by heart."""
    kept = order[torch.from_numpy(windows.documents[order.numpy()] >= known)]
    if not len(kept):
        raise UserError(
            f"the base was tuned or adapted on the first {known} training documents, and no window of the others is "
            "left for the energy to learn from: set base.local.documents lower, and base.tune.documents where it is set"
        )
    return kept


def make_noise(settings: NegativeSettings, lm: LanguageModel, corpus: Corpus) -> Noise:
    """Returns the noise that the settings describe, for windows of the training split."""
    lm = part_of(lm, "train")
    parts = [_part(source, lm, corpus) for source in settings.sources]
    return parts[0] if len(parts) == 1 else Mixture(list(zip(parts, settings.counts, strict=True)))


def from_base(lm: LanguageModel, corpus: Corpus, truncation: Truncation) -> FromLM:
    """Return draws of the base; a server draws by one seed per request, networks and tables many windows at a time."""
    return FromLM(lm, corpus.space, truncation, together=lm.draws_here)


def _part(settings: BaseNegatives | InfilledNegatives | LearnedNegatives, lm: LanguageModel, corpus: Corpus) -> Noise:
    if isinstance(settings, BaseNegatives):
        return from_base(lm, corpus, settings.truncation)
    if isinstance(settings, LearnedNegatives):
        return _learned(settings, lm, corpus)
    from freenergy.lm.checkpoints import load_checkpoint
    from freenergy.noise.infill import Infilling

    model, _ = load_checkpoint(Path(settings.model))
    if model.config.vocab_size != lm.vocab_size + 1:
        raise UserError(
            f"{settings.model} knows {model.config.vocab_size} tokens, not the base's {lm.vocab_size} and a mask: give "
            'the trunk that a bit with start = "scratch" has left in its run (energy/trunk-0/model)'
        )
    return Infilling(model, mask_token=lm.vocab_size, share=settings.mask_share, lm=lm)


def _learned(settings: LearnedNegatives, lm: LanguageModel, corpus: Corpus) -> Noise:
    """A copy of the base's network, without dropout: what is drawn must have the law that is scored."""
    from freenergy.energies.saving import copied
    from freenergy.lm.activations import NetworkLM
    from freenergy.lm.huggingface import HuggingFaceLM
    from freenergy.lm.presets import set_dropout
    from freenergy.noise.from_lm import Learned

    if not isinstance(lm, NetworkLM):
        raise UserError(
            f"a learned noise starts as a copy of the base's network, but the base is {type(lm).__name__}: take a base "
            "that is a transformer, or other negatives"
        )
    policy = HuggingFaceLM(copied(lm.model), eos=lm.eos)
    set_dropout(policy.model, 0.0)
    return Learned(policy, policy.model, lm, corpus.space, rate=settings.rate)


STAGE = Stage("negatives", _plan, after=RUNGS)
