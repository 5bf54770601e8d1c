"""From a recipe to what its stages will cost.

Counted are networks: training, drawing and reading, and the files of draws, features and weights. Not counted are the
corpus (a tokenizer's work), n-gram tables, the fit of linear energies, and baselines.
"""

from dataclasses import dataclass, replace
from typing import final

from freenergy.apps.cost_model.stages import (
    Cost,
    WindowCounts,
    drawing,
    keeping,
    reading,
    scoring,
    storing,
    training,
    validating,
)
from freenergy.core.errors import UserError
from freenergy.corpus.settings import BytePairTokenizer
from freenergy.energies.settings import EnergySettings
from freenergy.lm.load import locate_model
from freenergy.lm.presets import Shape, preset, shape_in, shape_of
from freenergy.noise.settings import BaseNegatives
from freenergy.recipes.families.residual import ResidualRecipe
from freenergy.training.contrastive_batches import cuts
from freenergy.training.settings import Optimisation, PretrainedBase, TrainedBase, adaptation, tuning
from freenergy.training.tasks.language_model import VALIDATION_TOKENS

_FLOAT = 4
_SHARD = 4  # windows in a file of candidates
_VERSIONS = 3  # the arrays of numbers that an evaluation keeps of each candidate


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a recipe does not say itself."""

    vocab_size: int | None = None
    train_windows: int | None = None  # of the corpus; needed where negatives.windows is 0
    ranks: int = 1


def cost_of(recipe: ResidualRecipe, known: Known | None = None) -> dict[str, Cost]:
    """Return the cost of each stage, in the order that they are done in."""
    plan = _Plan(recipe, known or Known())
    rungs = {"base": plan.base()} | ({"tuned": plan.tuned()} if tuning(recipe.base) else {})
    rungs |= {"local": plan.local()} if adaptation(recipe.base) else {}
    if recipe.energy is None:
        return rungs | {"evaluation": plan.perplexity()}
    return rungs | {
        "negatives": plan.negatives(),
        "energy": plan.energy(),
        "candidates": plan.candidates(),
        "evaluation": plan.evaluation(),
    }


@final
class _Plan:
    """The recipe's numbers under the letters of ``cost_model.stages``."""

    def __init__(self, recipe: ResidualRecipe, known: Known) -> None:
        self.recipe, self.known = recipe, known
        self.whole = WindowCounts(prefix=recipe.corpus.prefix, continuation=recipe.corpus.continuation)
        self.windows = _in_chunks(self.whole, recipe.chunks[:1])  # that are validated and certified
        self.training_windows = _in_chunks(self.whole, recipe.chunks)
        self.per_window = -(-self.whole.continuation // self.windows.continuation)  # chunks
        self.shape = _base_shape(recipe, known)
        self.parts = () if recipe.energy is None else recipe.energy.split()
        self.held_out = recipe.negatives.validation_windows, recipe.negatives.validation_per_prefix
        reads = any(part.reads_activations for part in self.parts) and recipe.training.lengths == 1
        self.keeps_traces = reads and self.shape is not None  # of what the base draws, for features
        sources = recipe.negatives.sources
        self.trains_on_traces = self.keeps_traces and len(sources) == 1 and isinstance(sources[0], BaseNegatives)

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size if self.shape else _vocab_size(self.recipe, self.known)

    @property
    def prefixes(self) -> int:
        """Return M."""
        wanted = self.recipe.negatives.windows
        if wanted or self.known.train_windows:
            return min(wanted or self.known.train_windows or 0, self.known.train_windows or wanted)
        raise UserError("negatives.windows is 0, which is all of the text: give their number with --windows")

    def base(self) -> Cost:
        """Cost the training of the base, where there is any."""
        base = self.recipe.base
        if not isinstance(base, TrainedBase) or self.shape is None:
            return Cost()
        learned = self._language_model(self.shape, base.optimisation, base.block, base.validation_tokens)
        return learned if base.earm is None else learned + self._fakes(base, self.shape)

    def _language_model(self, shape: Shape, steps: Optimisation, length: int, held_out_tokens: int) -> Cost:
        """Cost the training of a network that predicts tokens, its validations and its weights."""
        learned = training(shape, steps.steps, steps.batch_size, length, predicts=True, ranks=self.known.ranks)
        return learned + validating(shape, _validations(steps), held_out_tokens, length) + keeping(shape)

    def _fakes(self, base: TrainedBase, shape: Shape) -> Cost:
        """Cost E-ARM's draws after the start of every block and the training on them, in all steps at most."""
        assert base.earm is not None, "asked for above"
        steps, K = base.optimisation, base.earm.length
        behind = WindowCounts(prefix=max(min(self.whole.prefix, base.block - K), 0), continuation=K)
        rows = steps.steps * steps.batch_size
        learned = training(shape, steps.steps, steps.batch_size, behind.length, predicts=True)
        return drawing(shape, behind, rows, 1) + learned

    def tuned(self) -> Cost:
        """Cost the tuning of the base; the gradients of frozen weights are not computed, so LoRA takes less."""
        tune, shape = tuning(self.recipe.base), self.shape
        assert tune is not None, "asked for above"
        assert shape is not None, "a base that is tuned has a network"
        steps = tune.optimisation
        ranks = self.known.ranks if tune.method == "full" else 1
        learned = training(shape, steps.steps, steps.batch_size, tune.block, predicts=True, ranks=ranks)
        times = _validations(steps) + 1  # and the base before the first step
        return learned + validating(shape, times, tune.validation_tokens, tune.block) + keeping(shape)

    def local(self) -> Cost:
        """Cost what the base predicts for the windows that a local mix is fitted to; counting has no products."""
        local = adaptation(self.recipe.base)
        assert local is not None, "asked for above"
        return scoring(self.shape, self.whole, local.num_windows)

    def negatives(self) -> Cost:
        """Cost the draws of training and validation prefixes."""
        settings = self.recipe.negatives
        kept = [(self.windows, *self.held_out, self.keeps_traces)]
        if not settings.fresh:
            kept.append((self.training_windows, self.prefixes, settings.per_prefix, self.trains_on_traces))
        total = Cost()
        for windows, M, K, is_traced in kept:
            total += drawing(self.shape, windows, M, K)
            total += storing(windows, M, K, self.vocab_size, settings.shard)
            total += self._trace(windows, M, K + 1) if is_traced else Cost()
        return total

    def _trace(self, windows: WindowCounts, count: float | int, strings: float | int) -> Cost:
        """Cost what is kept of data and draws for features, and the reading of the data; the draws' costs nothing."""
        assert self.shape is not None, "only a network is traced"
        p, L = windows.prefix, windows.continuation
        features = max(part.num_features(self.shape) for part in self.parts if part.reads_activations)
        flops = self.shape.reading(count * L, p + L / 2) + self.shape.predicting(count * L)
        kept = count * strings * (features * _FLOAT + L * (3 * _FLOAT + 1))
        return Cost(tokens=count * L, flops=flops, bytes=kept)

    def energy(self) -> Cost:
        """Cost every part: features are read once, networks are trained."""
        total = Cost()
        for part in self.parts:
            total += self._linear(part) if part.fit == "convex" else self._network(part)
        return total

    def _linear(self, part: EnergySettings) -> Cost:
        total = Cost()
        for length in cuts(self.windows.continuation, self.recipe.training.lengths):
            windows = replace(self.windows, continuation=length)
            train, held_out = (self.prefixes, self.recipe.negatives.per_prefix), self.held_out
            for (M, K), is_kept in ((train, self.trains_on_traces), (held_out, self.keeps_traces)):
                if not (is_kept and part.reads_activations):
                    total += self._features(part, M, K + 1) + self._traced(part, M, K + 1, windows)
        return total

    def _features(self, part: EnergySettings, windows: float | int, strings: float | int) -> Cost:
        """Cost the features on disk."""
        return Cost(bytes=windows * strings * part.num_features(self.shape) * _FLOAT)

    def _traced(
        self, part: EnergySettings, count: float | int, strings: float | int, windows: WindowCounts | None = None
    ) -> Cost:
        """Return the base reads what an energy of its activations needs."""
        if not part.reads_activations:
            return Cost()
        return scoring(self.shape, windows or self.windows, count * strings, once_for=strings)

    def _network(self, part: EnergySettings) -> Cost:
        shape = self._trunk(part)
        if shape is None:
            return Cost()
        steps = self.recipe.training.optimisation
        rows = steps.batch_size * (1 + self.recipe.training.negatives)
        learned = training(
            shape,
            steps.steps,
            rows,
            self.training_windows.length,
            predicts=part.predicts_tokens,
            ranks=self.known.ranks,
        )
        M, K = self.held_out
        times = _validations(steps) + 1  # and once more when all parts are done
        total = learned + self._read(part, shape, times * M * (K + 1), K + 1) + keeping(shape, 2)
        if part.trains_masked_trunk:  # what a trunk from scratch learns first
            total += self._language_model(shape, self.recipe.training.masked, self.whole.length, VALIDATION_TOKENS)
        if self.recipe.negatives.fresh:
            drawn = steps.steps * steps.batch_size
            total += drawing(self.shape, self.training_windows, drawn, self.recipe.training.negatives)
        return total

    def _trunk(self, part: EnergySettings) -> Shape | None:
        """Return the network that an energy trains; None where it trains none."""
        return part.trunk(self.shape, lambda: self.vocab_size)

    def _scored(self, part: EnergySettings, windows: int, strings: int) -> Cost:
        """Cost E of the strings of each window."""
        found, shape = self._traced(part, windows, strings), self._trunk(part)
        return found if shape is None else found + self._read(part, shape, windows * strings, strings)

    def _read(self, part: EnergySettings, shape: Shape, strings: float | int, per_window: float | int) -> Cost:
        """Cost E of strings, ``per_window`` of which share their prefix."""
        found = reading(shape, self.windows, strings, once_for=per_window if part.shares_prefix else 1)
        if part.predicts_tokens:
            found += Cost(flops=shape.predicting(strings * self.windows.continuation))
        return found

    def candidates(self) -> Cost:
        """Cost the draws of held-out prefixes."""
        settings = self.recipe.evaluation
        W, n = settings.certified_windows * self.per_window, settings.candidates - 1
        drawn = drawing(self.shape, self.windows, W, n)
        drawn += self._trace(self.windows, W, n + 1) if self.keeps_traces else Cost()
        return drawn + storing(self.windows, W, n, self.vocab_size, _SHARD)

    def evaluation(self) -> Cost:
        """Cost the energies of all candidates, the perplexity of the base, and the gain by position."""
        settings = self.recipe.evaluation
        W, n = settings.certified_windows * self.per_window, settings.candidates
        total = self.perplexity() + Cost(bytes=_VERSIONS * W * n * 8)
        total += Cost() if self.keeps_traces else scoring(self.shape, self.windows, W)
        for part in self.parts:
            if not (self.keeps_traces and part.reads_activations):
                total += self._features(part, W, n) + self._scored(part, W, n)
        return total + self._positions() + self._sequential()

    def perplexity(self) -> Cost:
        """Cost log P of held-out windows by the base."""
        return scoring(self.shape, self.whole, self.recipe.evaluation.windows)

    def _sequential(self) -> Cost:
        """Cost the conditional runs: N particles of each window, which the energies read at every look."""
        sampler, W = self.recipe.evaluation.sequential, self.recipe.evaluation.certified_windows * self.per_window
        if sampler is None:
            return Cost()
        N, every = sampler.particles, range(sampler.check_every, self.windows.continuation, sampler.check_every)
        total = drawing(self.shape, self.windows, W, N)
        for _ in (*every, self.windows.continuation):  # at most: those before the last are of unfinished texts
            for part in self.parts:
                total += self._scored(part, W, N)
        return total

    def _positions(self) -> Cost:
        """Cost completions from every place of a few windows, and their energies."""
        settings, L = self.recipe.evaluation, self.windows.continuation
        W, n = settings.position_windows, settings.position_draws
        total = Cost()
        for t in range(L) if W else ():
            rest = WindowCounts(prefix=self.windows.prefix + t, continuation=L - t)
            total += drawing(self.shape, rest, W, n)
            total += sum((self._scored(part, W, n) for part in self.parts), Cost())
        return total


def _in_chunks(whole: WindowCounts, sizes: tuple[int, ...]) -> WindowCounts:
    """Return the average chunk window: half of the window's other chunks come before it."""
    if not sizes:
        return whole
    L = whole.continuation
    m = round(len(sizes) * L / sum(L / size for size in sizes))
    return WindowCounts(prefix=whole.prefix + (L - m) // 2, continuation=m)


def _validations(steps: Optimisation) -> int:
    return -(-steps.steps // steps.validate_every)


def _base_shape(recipe: ResidualRecipe, known: Known) -> Shape | None:
    """Return None where the base is not a local network: n-gram tables, or a server."""
    match recipe.base:
        case TrainedBase(start=name) | PretrainedBase(path=name) if name:
            return shape_in(locate_model(name))
        case TrainedBase(preset=name):
            return shape_of(preset(name).config(vocab_size=_vocab_size(recipe, known), eos=0))
    return None


def _vocab_size(recipe: ResidualRecipe, known: Known) -> int:
    if known.vocab_size:
        return known.vocab_size
    if isinstance(recipe.tokenizer, BytePairTokenizer):
        return recipe.tokenizer.vocab_size
    raise UserError("the recipe does not say how many tokens there are: give --vocab-size")
