"""From settings to a trained baseline in a folder, and the way back.

    NAME/model   NAME/probe.safetensors   NAME/ngram/   NAME/record.json

``record.json`` is written last and holds what the baseline has cost: parameters, CPU seconds, steps, tokens seen.
"""

import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus
from freenergy.energies.probe import layers_read
from freenergy.energies.saving import copied
from freenergy.lm.activations import NetworkLM
from freenergy.lm.adapted import AdaptedLM, weight_names
from freenergy.lm.checkpoints import load_checkpoint, save_checkpoint
from freenergy.lm.huggingface import HuggingFaceLM
from freenergy.lm.local_counts import LocalCounts
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.lm.presets import Preset, build, count_parameters, preset, set_dropout
from freenergy.training.baselines.local import LocalProbe
from freenergy.training.baselines.residual import Ralm, ResidualLM
from freenergy.training.baselines.settings import (
    BalmBaseline,
    BaselineSettings,
    LocalBaseline,
    LongerBaseline,
    RalmBaseline,
)
from freenergy.training.baselines.training import TRAINING, ResidualTask, train_baseline
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.local_mix import LocalFit, fit_local_mix
from freenergy.training.settings import LanguageModelLoss
from freenergy.training.tasks.autoregressive import AutoregressiveTask

RECORD = "record.json"
_MODEL, _PROBE, _NGRAM = "model", "probe.safetensors", "ngram"
_CLOSE = 0.05
_L2 = 1e-6  # keeps the maximum unique where two terms say the same


def make_baseline(
    settings: BaselineSettings,
    base: LanguageModel,
    corpus: Corpus,
    folder: Path,
    rng: Rng,
    progress: Progress,
    *,
    base_preset: str = "",
) -> dict[str, Any]:
    """Trains, or resumes training, in ``folder``; a baseline that is done stays as it is. Its record is returned.

    Several ranks train networks together; the first counts, fits and writes.
    """
    ranks = Ranks.found()
    if not (folder / RECORD).is_file():
        inputs = (base, corpus, folder, rng, progress)
        match settings:
            case LongerBaseline() | BalmBaseline():
                record = _network(settings, *inputs, base_preset)
            case RalmBaseline():
                record = _ralm(settings, *inputs)
            case LocalBaseline():
                record = _local(settings, *inputs)
        if ranks.is_first:
            write_json(folder / RECORD, {"kind": settings.kind, **record})
    ranks.barrier()
    for moments in (folder / TRAINING).glob("*") if ranks.is_first else ():
        if moments.suffix != ".jsonl":  # weights along the way, and what a kill has left of writing them
            moments.unlink()
    return read_json(folder / RECORD)


def open_baseline(settings: BaselineSettings, base: LanguageModel, folder: Path) -> LanguageModel:
    """The baseline that ``make_baseline`` has left in ``folder``, for the base that it was made with."""
    match settings:
        case LongerBaseline() | BalmBaseline():
            return HuggingFaceLM.from_pretrained(folder / _MODEL, eos=base.eos)
        case RalmBaseline():
            ralm = Ralm(load_checkpoint(folder / _MODEL)[0])
            return ResidualLM(base, [ralm.eval().requires_grad_(False)])
        case LocalBaseline(features=features):
            below = base
            if features != "ngram":
                probe = LocalProbe.open(folder / _PROBE).requires_grad_(False)
                below = ResidualLM(base, [probe], layers=_layers(settings, base))
            return below if features == "probe" else AdaptedLM.on(below, folder / _NGRAM)


def matched(shape: Preset, *, parameters: int, vocab_size: int, eos: int) -> Preset:
    """The shape widened, heads and layers kept, to have ``parameters`` within 5 %."""
    step, ratio = 8 * shape.heads, shape.feedforward / shape.width  # a quarter of a head rotates, in pairs

    def count(candidate: Preset) -> int:
        return count_parameters(candidate.config(vocab_size=vocab_size, eos=eos))

    found, width = None, step
    while True:
        wider = replace(shape, width=width, feedforward=max(1, round(ratio * width)))
        if found is not None and count(wider) > parameters:
            break
        found, width = wider, width + step
    # widths are coarse: the feed-forward layers take what is left
    one_more = count(replace(found, feedforward=found.feedforward + 1)) - count(found)
    more = round((parameters - count(found)) / one_more)
    found = replace(found, feedforward=max(1, found.feedforward + more))
    if abs(count(found) - parameters) > _CLOSE * parameters:
        raise UserError(
            f"no width of this shape has {parameters:,} parameters with a vocabulary of {vocab_size:,} (the nearest "
            f"{count(found):,}): take a preset with fewer heads or layers, or more extra parameters"
        )
    return found


def _with_network(settings: BaselineSettings, base: LanguageModel) -> NetworkLM:
    if not isinstance(base, NetworkLM):
        raise UserError(
            f"the baseline {settings.name!r} of kind {settings.kind!r} needs the base's network, and a "
            f'{type(base).__name__} has none: take a base with a network, or kind = "local" with features = "ngram"'
        )
    return base


def _size(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _base_size(base: LanguageModel) -> int:
    return _size(base.model) if isinstance(base, NetworkLM) else 0


def _network(
    settings: LongerBaseline | BalmBaseline,
    base: LanguageModel,
    corpus: Corpus,
    folder: Path,
    rng: Rng,
    progress: Progress,
    base_preset: str,
) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if isinstance(settings, LongerBaseline):
        model = copied(_with_network(settings, base).model)
        set_dropout(model, settings.dropout)
    else:
        sizes = {"vocab_size": corpus.tokenizer.vocab_size, "eos": base.eos}
        shape = preset(settings.preset or base_preset)
        if settings.parameters == "match":
            own = _size(_with_network(settings, base).model)
            shape = matched(shape, parameters=own + (own if settings.extra is None else settings.extra), **sizes)
        model = build(shape.config(**sizes, dropout=settings.dropout), rng.child("weights"))
        more = {"shape": asdict(shape)}
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    task_of = partial(AutoregressiveTask, CausalNetwork(model), settings=LanguageModelLoss())
    record = train_baseline(settings, task_of, longest, corpus, folder, rng, progress)
    if Ranks.found().is_first:
        save_checkpoint(model, folder / _MODEL, eos=base.eos, tokenizer=corpus.tokenizer)
    return record | {"parameters": _size(model)} | more


def _ralm(
    settings: RalmBaseline, base: LanguageModel, corpus: Corpus, folder: Path, rng: Rng, progress: Progress
) -> dict[str, Any]:
    ralm = Ralm.from_base(_with_network(settings, base).model, dropout=settings.dropout)
    task_of = partial(ResidualTask, ResidualLM(base, [ralm]), ralm)
    record = train_baseline(settings, task_of, base.max_length, corpus, folder, rng, progress)
    if Ranks.found().is_first:
        save_checkpoint(ralm.network, folder / _MODEL, eos=base.eos)
    return record | {"parameters": _base_size(base) + _size(ralm)}


def _local(
    settings: LocalBaseline, base: LanguageModel, corpus: Corpus, folder: Path, rng: Rng, progress: Progress
) -> dict[str, Any]:
    """The probe learns first, on training text; then the n-gram weights on top of it, on validation text."""
    record: dict[str, Any] = {"cpu_seconds": 0.0, "steps": 0, "tokens": 0}
    below, weights = base, 0
    if settings.features != "ngram":
        layers = _layers(settings, base)
        width = _with_network(settings, base).width
        probe = LocalProbe(layers=len(layers), width=width, rank=settings.rank, vocab_size=base.vocab_size)
        probe.start(rng.child("weights"))
        below = corrected = ResidualLM(base, [probe], layers=layers)
        task_of = partial(ResidualTask, corrected, probe)
        record |= train_baseline(settings, task_of, base.max_length, corpus, folder, rng, progress)
        if Ranks.found().is_first:
            probe.save(folder / _PROBE)
        weights += _size(probe)
    if settings.features != "probe" and Ranks.found().is_first:
        started = time.process_time()
        mix, fit = _mix(settings, below, corpus, rng, progress)
        mix.save_mix(folder / _NGRAM)
        weights += len(mix.weights)
        record["cpu_seconds"] += time.process_time() - started
        record |= {"ngrams": sum(map(len, mix.counts.ngrams.counts.levels)), "fit": fit.summary()}
        record["tokens"] += len(corpus.stream("train")) + fit.places
    return record | {"parameters": _base_size(base) + weights}


def _mix(
    settings: LocalBaseline, below: LanguageModel, corpus: Corpus, rng: Rng, progress: Progress
) -> tuple[AdaptedLM, LocalFit]:
    """Count all of the training text, then weigh the counts on validation windows."""
    about: dict[str, Any] = {"vocab_size": below.vocab_size, "eos": below.eos, "order": settings.order}
    tokenizer = corpus.tokenizer.fingerprint
    counts = LocalCounts.of(corpus.stream("train"), tokenizer=tokenizer, progress=progress, **about)
    names = weight_names(order=settings.order, cache=True, copy=True, entropy=False)
    windows = corpus.windows("validation")
    rows = rng.child("windows").permutation(len(windows))[: settings.windows]
    fit = fit_local_mix(below, counts, names, windows.continuations(rows), l2=_L2, progress=progress)
    return AdaptedLM(below, fit.weights, counts), fit


def _layers(settings: LocalBaseline, base: LanguageModel) -> tuple[int, ...]:
    """Those of a probe energy with the same settings."""
    return layers_read(settings.layers, _with_network(settings, base).num_layers)
