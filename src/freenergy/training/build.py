"""From settings to an energy at E = 0, ready to learn."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import nn
from transformers import PreTrainedModel

from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus
from freenergy.energies.bit import Bit
from freenergy.energies.load import load_energy
from freenergy.energies.log_ratio import LogRatio
from freenergy.energies.logits import Logits
from freenergy.energies.ngram_features import NgramFeatures
from freenergy.energies.ngram_tables import NgramTables
from freenergy.energies.probe import Probe
from freenergy.energies.settings import (
    BitEnergy,
    LogitsEnergy,
    LogRatioEnergy,
    NgramEnergy,
    PartEnergy,
    ProbeEnergy,
    SavedEnergy,
    UnitEnergy,
)
from freenergy.energies.unit import Unit
from freenergy.lm.checkpoints import save_checkpoint
from freenergy.lm.huggingface import HuggingFaceLM
from freenergy.lm.load import locate_model
from freenergy.training.contrastive_batches import Contrast, StoredContrast
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.feature_cache import PrefetchFn, no_prefetch
from freenergy.training.masked_language_model import train_masked_trunk
from freenergy.training.settings import EnergyTraining


@final
@dataclass(frozen=True, slots=True)
class Material:
    """What an energy is made of and learns from."""

    base: LanguageModel
    corpus: Corpus
    train: Contrast
    validation: StoredContrast
    features: Path  # the folder where features of linear energies are kept
    ahead: PrefetchFn = no_prefetch  # may have features computed before they are asked for


def build_energy(
    settings: PartEnergy, training: EnergyTraining, material: Material, folder: Path, rng: Rng, progress: Progress
) -> nn.Module:
    """An energy that has learned nothing yet, or a saved one; ``folder`` is for a trunk's own training."""
    base, corpus = material.base, material.corpus
    match settings:
        case UnitEnergy():
            return Unit(settings, network(base, settings.kind))
        case LogRatioEnergy():
            return LogRatio(settings, network(base, settings.kind))
        case LogitsEnergy():
            return Logits(settings, network(base, settings.kind))
        case ProbeEnergy():
            return Probe(settings, network(base, settings.kind))
        case NgramEnergy(order=order, skips=skips):
            stream = corpus.stream("train")
            progress.say(f"counting n-grams of {len(stream):,} tokens")
            sizes = {"vocab_size": base.vocab_size, "eos": base.eos}
            return NgramFeatures(
                settings, NgramTables.fit(stream, **sizes, order=order, skips=skips, progress=progress)
            )
        case BitEnergy(start="encoder", encoder=name):
            return Bit.from_encoder(settings, locate_model(name, progress), corpus.tokenizer)
        case BitEnergy(start="base"):
            return Bit.from_base(settings, network(base, settings.kind))
        case BitEnergy():
            return Bit.from_trunk(settings, _masked_trunk(settings, training, material, folder, rng, progress))
        case SavedEnergy(path=path):
            return load_energy(path, base=base, tokenizer=corpus.tokenizer).requires_grad_(False)


def _masked_trunk(
    settings: BitEnergy, training: EnergyTraining, material: Material, folder: Path, rng: Rng, progress: Progress
) -> PreTrainedModel:
    """A network that fills masks, kept, since it can infill negatives for another run."""
    trunk = train_masked_trunk(settings, material.corpus, training.masked, folder / "training", rng, progress)
    if Ranks.found().is_first:
        save_checkpoint(trunk, folder / "model", eos=material.base.eos)
    return trunk


def network(base: LanguageModel, kind: str) -> HuggingFaceLM:
    """The base, where it is a network whose states can be read."""
    if not isinstance(base, HuggingFaceLM):
        raise UserError(
            f"an energy of kind {kind!r} reads the states of the base, and a {type(base).__name__} has none to read: "
            'take a base with a network, or energy.kind = "ngram", or a bit with start = "encoder" or "scratch"'
        )
    return base
