"""Training of a whole energy, part by part.

    E = Σ_saved E + Σ_linear E + Σ_networks E

Saved parts stay. Linear parts are fitted together, one convex problem. Networks follow one by one, each on what the
parts before it have left: since every part starts at E = 0, adding one never begins worse than before. What linear
parts leave is measured by fits that have not seen the window (``convex.cross_fitted``): with thousands of weights they
separate nearly all pairs that they were fitted to, and a network would find nothing left to learn there.

With ``training.lengths`` above 1 every window is read at several cuts, each a row of its own for the objective.
Choices between fits (l2, early stopping) are by the gain on whole continuations: they are the target.

Several ranks train networks together. The first fits linear parts, and it alone writes; the others read what it wrote.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, read_json, read_tensors, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.corpus import Corpus
from freenergy.energies.features import CONFIG, FeatureEnergy
from freenergy.energies.int8 import int8_error, quantised
from freenergy.energies.module import EnergyModule
from freenergy.energies.product import Product
from freenergy.energies.registry import load_energy
from freenergy.energies.settings import BuildInputs, EnergySettings
from freenergy.training.contrastive_batches import Contrast, NoiseLaw, StoredContrast, cuts
from freenergy.training.convex import choose_l2, cross_fitted
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.feature_cache import FeatureCache, Pieces, PrefetchFn
from freenergy.training.learning_curve import learning_curve
from freenergy.training.loop import fit_watched, read_records
from freenergy.training.settings import EnergyTraining
from freenergy.training.tasks.contrastive import ContrastiveTask, Offset, Watch, validation_of

_SHOWN = 32  # windows that show an energy in int8 what its layers will read, and as many that measure its error
_LEFT = "linear-energies.safetensors"  # of the training windows, by fits that have not seen them
_CURVE = "learning-curve.json"


class Material(NamedTuple):
    """What an energy is made of and learns from."""

    base: LanguageModel
    corpus: Corpus
    train: Contrast
    validation: StoredContrast
    features: Path  # the folder where features of linear energies are kept
    ahead: PrefetchFn | None = None  # has features computed before they are asked for
    law: NoiseLaw | None = None  # of training negatives that are not the base's own, where it is known


def train_energy(
    settings: EnergySettings, training: EnergyTraining, material: Material, folder: Path, rng: Rng, progress: Progress
) -> tuple[EnergyModule, dict[str, Any]]:
    """Train, or resume training, in ``folder``; return the energy and a report."""
    wanted = settings.split()
    fitting = _Fitting(wanted, training, material, folder, rng, progress)
    linear = [i for i, part in enumerate(wanted) if part.fit == "convex"]
    # linear parts are fitted together, so that they are done together or not at all
    is_fitted = all((folder / f"part-{i}" / CONFIG).is_file() for i in linear)
    fitting.linear = set(linear)
    for i in range(len(wanted)):
        fitting.take(i, from_scratch=i in linear and not is_fitted)
    if fitting.ranks.is_first:
        fitting.fit_linear()
    fitting.meet()
    for i in sorted(fitting.waiting):
        fitting.fit_network(i)
    parts = [fitting.done[i] for i in range(len(wanted))]
    energy = settings.combine(parts)
    if not fitting.ranks.is_first:
        return energy, {}
    for path in [*folder.glob("training-*/*.safetensors"), *folder.glob("trunk-*/training/*.safetensors")]:
        path.unlink()
    reports = [read_json(folder / f"part-{i}.json") for i in range(len(wanted))]
    report: dict[str, Any] = {"parts": reports, "validation": fitting.measure(energy)}
    if (folder / _CURVE).is_file():
        report["learning_curve"] = read_json(folder / _CURVE)
    return energy, report | ({"certified_gain_by_length": fitting.by_length(energy)} if training.lengths > 1 else {})


@final
class _Fitting:
    """Parts that are done, and parts that wait for their turn."""

    def __init__(
        self,
        wanted: tuple[EnergySettings, ...],
        training: EnergyTraining,
        material: Material,
        folder: Path,
        rng: Rng,
        progress: Progress,
    ) -> None:
        self.wanted = wanted
        self.training, self.material, self.folder, self.rng, self.progress = training, material, folder, rng, progress
        self.cuts = cuts(material.validation.store.identity.space.length, training.lengths)
        self.caches = {"validation": self._caches(material.validation, leave_self_out=False)}
        if isinstance(material.train, StoredContrast):
            self.caches["train"] = self._caches(material.train, leave_self_out=True)
        self.done: dict[int, EnergyModule] = {}
        self.waiting: dict[int, EnergyModule] = {}
        self.linear: set[int] = set()
        self.ranks = Ranks.found()

    def take(self, i: int, *, from_scratch: bool) -> None:
        """Load part i if it is done, or build it."""
        if (self.folder / f"part-{i}" / CONFIG).is_file() and not from_scratch:
            self.done[i] = self._read(i)
            return
        material = self.material
        inputs = BuildInputs(material.base, material.corpus, self.progress, partial(self._masked_trunk, i))
        energy = self.wanted[i].build(inputs)
        if self.wanted[i].fit == "none":
            self.keep(i, energy, self.wanted[i].report())
        else:
            self.waiting[i] = energy

    def _masked_trunk(self, i: int, preset: str, mask_share: float, dropout: float) -> Any:
        """Train a network that fills masks, and keep it: it can infill negatives for another run."""
        from freenergy.lm.checkpoints import save_checkpoint
        from freenergy.training.tasks.language_model import train_masked_trunk

        folder, rng, base = self.folder / f"trunk-{i}", self.rng.child("part", i), self.material.base
        how = (self.material.corpus, self.training.masked, folder / "training", rng, self.progress)
        model = train_masked_trunk(preset, *how, mask_share=mask_share, dropout=dropout)
        if self.ranks.is_first:
            save_checkpoint(model, folder / "model", eos=base.eos)
        return model

    def fit_linear(self) -> None:
        """Fit all linear parts together, by L-BFGS."""
        parts = {i: energy for i, energy in self.waiting.items() if isinstance(energy, FeatureEnergy)}
        if not parts:
            return
        if "train" not in self.caches:
            raise UserError("linear energies are fitted to stored negatives: set negatives.fresh = false")
        energies = list(parts.values())
        if self.material.ahead is not None:
            for energy, (label, caches) in product(energies, self.caches.items()):
                for cache in caches:
                    self.material.ahead(energy, cache, _words(label, cache), self.progress)
        learned = [self._features(energy, "train", self.caches["train"]) for energy in energies]
        held_out = [self._features(energy, "validation", self.caches["validation"][-1:]) for energy in energies]
        self.progress.say(f"fitting {sum(len(energy.names) for energy in energies)} weights by L-BFGS")
        offset, objective, grid = self._offset(), self.training.objective, self.training.l2
        offsets = self._with_law(offset.train if offset else None), offset.validation if offset else None
        scratch = self.material.features  # where there must be room for features anyway
        if self.training.curve:
            self.progress.say("fitting them to a quarter, a half and all of the windows, for the learning curve")
            every = (energies, learned, held_out, objective, grid, *offsets)
            write_json(self.folder / _CURVE, learning_curve(*every, cuts=len(self.cuts), scratch=scratch))
        chosen = choose_l2(energies, learned, held_out, objective, grid, *offsets, scratch=scratch)
        if len(self.waiting) > len(parts):  # networks follow
            self.progress.say("fitting them again without each quarter of the windows, to see what they leave")
            rest = (objective, chosen.l2, offsets[0])
            E = cross_fitted(energies, learned, *rest, cuts=len(self.cuts), scratch=scratch)
            with atomic_write(self.folder / _LEFT) as aside:
                save_file({"energy": E}, aside)
        for i, energy in parts.items():
            report = {"kind": energy.settings.kind, "weights": len(energy.names), "l2": chosen.l2}
            more = {"tried": chosen.table, "iterations": chosen.fit.iterations, "converged": chosen.fit.converged}
            self.keep(i, energy, report | more)

    def _with_law(self, offset: Tensor | None) -> Tensor | None:
        """Add log q − log P_LM to the offset of the training windows: it enters the logit as an energy does."""
        law, contrast = self.material.law, self.material.train
        if law is None or not isinstance(contrast, StoredContrast):
            return offset
        log_ratio = law.of_all(contrast, [cache.length for cache in self.caches["train"]])
        return log_ratio if offset is None else offset + log_ratio

    def meet(self) -> None:
        """Wait until all ranks have the linear parts."""
        self.ranks.barrier()
        for i in self.linear & set(self.waiting):
            self.done[i] = self._read(i)
            del self.waiting[i]

    def _read(self, i: int) -> EnergyModule:
        material = self.material
        return load_energy(self.folder / f"part-{i}", base=material.base, tokenizer=material.corpus.tokenizer)

    def fit_network(self, i: int) -> None:
        """Fit one network by gradient descent, on top of the parts that are done."""
        energy, training, material = self.waiting[i], self.training, self.material
        rng, folder, steps = self.rng.child("network", i), self.folder / f"training-{i}", training.optimisation
        offset = self._offset()
        data, law = (material.train, material.validation), material.law
        task = ContrastiveTask(energy, *data, training.objective, training, rng, offset, law)
        tokens = task.held_out.lengths[:, 0].double().mean().item()
        watch = Watch(self.progress, tokens, steps.batch_size * training.negatives)
        fit_watched(task, steps, folder, rng, self.progress, f"training {type(energy).__name__}", watch.line)
        weights = sum(weight.numel() for weight in energy.parameters())
        records = read_records(folder)  # of all steps, whatever interrupted them
        best = max(record["step"] for record in records if record["is_best"])
        report = {"kind": self.wanted[i].kind, "weights": weights, "steps": len(records), "best_step": best}
        contrast = self.material.validation
        report |= energy.diagnose(lambda: contrast.all(torch.arange(len(contrast))), self.progress)
        self.keep(i, energy, report | (self._in_int8(energy) if self.wanted[i].reads_int8 else {}))

    def _in_int8(self, energy: EnergyModule) -> dict[str, Any]:
        """Quantise the energy, for good; report how far it is from the one that was trained."""
        contrast = self.material.validation
        shown, others = (contrast.all(part) for part in torch.arange(len(contrast))[: 2 * _SHOWN].chunk(2))
        largest, typical = int8_error(quantised(energy, shown), others)
        self.progress.say(f"in int8 its energies are {typical:.3g} nats off, {largest:.3g} at most")
        return {"int8_error": {"largest": largest, "root_mean_square": typical}}

    def keep(self, i: int, energy: EnergyModule, report: dict[str, Any]) -> None:
        """Save a part that is done: it stays as it is."""
        energy.eval().requires_grad_(False)
        if self.ranks.is_first:
            write_json(self.folder / f"part-{i}.json", report)
            energy.save_pretrained(self.folder / f"part-{i}")
        self.done[i] = energy
        self.waiting.pop(i, None)

    def measure(self, energy: nn.Module, which: int = -1) -> dict[str, float]:
        """Measure the certified gain and accuracies on the validation windows, whole or at another cut."""
        E = self.caches["validation"][which].all_energies(energy, self.training.rows)
        found = validation_of(E, self.training.objective)
        return {"certified_gain": -found.value, "candidates": float(E.shape[1]), **found.metrics}

    def by_length(self, energy: nn.Module) -> dict[str, float]:
        """Measure the certified gain on validation windows at each of the lengths that the energy was fitted at."""
        return {str(t): self.measure(energy, which)["certified_gain"] for which, t in enumerate(self.cuts)}

    def _caches(self, contrast: StoredContrast, *, leave_self_out: bool) -> list[FeatureCache]:
        """Return one cache per cut; the last, of whole continuations, is shared with other fits."""
        folder, lengths = self.material.features, (*self.cuts[:-1], None)
        return [FeatureCache(folder, contrast, leave_self_out=leave_self_out, length=length) for length in lengths]

    def _features(self, energy: FeatureEnergy, label: str, caches: list[FeatureCache]) -> Pieces:
        """Return features of all windows, cut after cut."""
        return Pieces.joined([cache.pieces(energy, _words(label, cache), self.progress) for cache in caches])

    def _offset(self) -> Offset | None:
        """Return the energies of the parts that are done, on all stored windows."""
        if not self.done:
            return None
        total, rows = Product([self.done[i] for i in sorted(self.done)]), self.training.rows
        held_out = self.caches["validation"][-1].all_energies(total, rows)
        if "train" not in self.caches:
            return Offset(total, None, held_out)
        left = self.folder / _LEFT
        fitted = self.linear & set(self.done) if left.is_file() else set()
        others = [self.done[i] for i in sorted(set(self.done) - fitted)]
        parts = [torch.cat([cache.all_energies(part, rows) for cache in self.caches["train"]]) for part in others]
        parts += [read_tensors(left)["energy"]] if fitted else []
        return Offset(total, torch.stack(parts).sum(0), held_out)


def _words(label: str, cache: FeatureCache) -> str:
    return label if cache.length is None else f"{label} at {cache.length} tokens"
