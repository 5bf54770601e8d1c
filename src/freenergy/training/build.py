"""From settings to an energy at E = 0, ready to learn."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus
from freenergy.energies.module import EnergyModule
from freenergy.energies.settings import BuildInputs, EnergySettings, MaskedTrunk
from freenergy.training.contrastive_batches import Contrast, StoredContrast
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.feature_cache import PrefetchFn, no_prefetch
from freenergy.training.noise_law import NoiseLaw
from freenergy.training.settings import EnergyTraining

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    law: NoiseLaw | None = None  # of training negatives that are not the base's own, where it is known


def build_energy(
    settings: EnergySettings, training: EnergyTraining, material: Material, folder: Path, rng: Rng, progress: Progress
) -> EnergyModule:
    """Build an energy that has learned nothing yet, or load a saved one; ``folder`` is for a trunk's own training."""

    def train_masked_trunk(trunk: MaskedTrunk) -> "PreTrainedModel":
        """Train a network that fills masks, and keep it: it can infill negatives for another run."""
        from freenergy.lm.checkpoints import save_checkpoint
        from freenergy.training.tasks import masked

        place = folder / "training"
        model = masked.train_masked_trunk(trunk, material.corpus, training.masked, place, rng, progress)
        if Ranks.found().is_first:
            save_checkpoint(model, folder / "model", eos=material.base.eos)
        return model

    return settings.build(BuildInputs(material.base, material.corpus, progress, train_masked_trunk))
