"""Family ``known-law``: a network learns from few strings of a law that is known, so that overfitting can be measured.

    base → measurement

    the law      P(x) = Π_t table[x_{t−k}, …, x_{t−1}][x_t],  normal logits; every seed has its own law and strings
    nats above the law                KL(P ‖ q) / L  = E_P [log P(x) − log q(x)] / L
    of samples                        KL(q ‖ P) / L  = E_q [log q(x) − log P(x)] / L
    samples' surprise                 (E_q [−log P(x)] − E_P [−log P(x)]) / L, negative where q repeats what is likely

Each mean is over strings, the same ones for all rows of a seed. The weights are those that did best on validation
strings; ``at the end`` is KL(P ‖ q) / L on the validation strings with the last weights of the training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.numpy import save_file
from torch import Tensor

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, read_arrays
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.evaluation.perplexity import Measurement, measured_rate
from freenergy.lm.networks.causal import inference
from freenergy.lm.networks.gru import GRUNetwork
from freenergy.lm.networks.protocol import Batch, Network
from freenergy.lm.tabular import TabularLM
from freenergy.recipes.families.network import BASE, TRAINING, Domain, NetworkRecipe, learning, measuring
from freenergy.runs.run import Run, Stage
from freenergy.training.loop import read_records
from freenergy.training.settings import TrainedNetwork

_STRINGS = "strings.safetensors"
_LARGEST_TABLE = 2**22


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LawSettings:
    """The law, and how many of its strings are seen."""

    MEASURING: ClassVar[tuple[str, ...]] = ("test", "samples")

    vocab_size: int = 8
    order: int = 2  # k, tokens that decide about the next
    spread: float = 1.5  # standard deviation of the logits
    length: int = 16  # L, tokens of a string
    train: int = 60
    validation: int = 200
    test: int = 4000
    samples: int = 2000  # strings drawn from the network

    def __post_init__(self) -> None:
        check_range(self, "vocab_size", at_least=2, section="law.")
        check_range(self, "length", "train", "validation", "test", "samples", at_least=1, section="law.")
        check_range(self, "order", at_least=0, section="law.")
        check_range(self, "spread", above=0, section="law.")
        if self.vocab_size ** (self.order + 1) > _LARGEST_TABLE:
            raise UserError(
                f"law.vocab_size {self.vocab_size} with law.order {self.order} is a table of over "
                f"{_LARGEST_TABLE:,} numbers: lower one of them"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GRUBase(TrainedNetwork):
    """The size of the network, and how it is taught."""

    width: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        TrainedNetwork.__post_init__(self)
        check_range(self, "width", at_least=1, section="base.")
        check_range(self, "dropout", at_least=0, below=1, section="base.")


@final
class StringData:
    """Strings of the law: every epoch in another order, the last part of one that fills no batch is left out."""

    def __init__(
        self, train: Int[Tensor, "n L"], held_out: Int[Tensor, "m L"], batch_size: int, accumulate: int, rng: Rng
    ) -> None:
        self.train, self.validation, self.rng = train, held_out, rng
        self.batch_size, self.accumulate = min(batch_size, len(train)), accumulate

    @property
    def epoch_steps(self) -> int:
        """Returns the steps in which every string is read about once."""
        return len(self.train) // self.batch_size

    def batch(self, step: int, micro: int) -> Batch:
        """Returns the strings of a micro-batch."""
        epoch, place = divmod(step - 1, self.epoch_steps)
        order = self.rng.child("epoch", epoch).permutation(len(self.train))
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size].chunk(self.accumulate)[micro]
        return _batch(self.train[chosen])

    def held_out(self) -> Iterator[Batch]:
        """Returns the validation strings."""
        yield _batch(self.validation)


def _batch(rows: Int[Tensor, "n L"]) -> Batch:
    return Batch(None, rows, torch.ones_like(rows, dtype=torch.bool))


@final
class KnownLaw(Domain):
    """A law that is a table, its strings, and a network that learns from them."""

    def __init__(self, settings: LawSettings, base: GRUBase, seed: int) -> None:
        self.settings, self.base = settings, base
        rng = Rng(seed).child("known-law")
        V, order = settings.vocab_size, settings.order
        self.law = TabularLM.random(rng.child("law"), vocab_size=V, order=order, spread=settings.spread)
        self.space = SequenceSpace(vocab_size=V, length=settings.length)
        counts = {"train": settings.train, "validation": settings.validation, "test": settings.test}
        self.strings = {name: self._drawn(num, rng.child(name)) for name, num in counts.items()}

    def network(self, rng: Rng) -> GRUNetwork:
        """Returns a network with fresh weights."""
        return GRUNetwork(self.settings.vocab_size, width=self.base.width, dropout=self.base.dropout, rng=rng)

    def data(self, *, batch_size: int, accumulate: int, rng: Rng) -> StringData:
        """Returns the strings of training and validation."""
        return StringData(self.strings["train"], self.strings["validation"], batch_size, accumulate, rng)

    def log_law(self, strings: Int[Tensor, "n L"]) -> Float[Tensor, " n"]:
        """Returns log P(x)."""
        x = Continuations(self._nothing, strings.unsqueeze(0), torch.full((1, len(strings)), strings.shape[1]))
        return self.law.log_prob(x)[0]

    def measure(self, network: Network, folder: Path, rng: Rng, progress: Progress) -> dict[str, float]:
        """Nats per token above the law, of its strings and of the network's own; keeps those of every test string."""
        test, L = self.strings["test"], self.settings.length
        own = network.draw(None, test.new_zeros(self.settings.samples, 0), L, rng.child("samples"))[0]
        above, below = ((self.log_law(x) - log_q(network, x)) / L for x in (test, own))
        with atomic_write(folder / _STRINGS) as aside:
            save_file({"above": above.numpy()}, aside)
        surprise = (self.log_law(test).mean() - self.log_law(own).mean()).item() / L
        return {
            "nats above the law": above.mean().item(),
            "at the end": self._at_the_end(folder.parent / BASE / TRAINING),
            "KL(q ‖ law) of samples": -below.mean().item(),
            "samples' surprise": surprise,
        }

    def compare(self, ours: Sequence[Path], others: Sequence[Path], rng: Rng) -> dict[str, Measurement]:
        """Nats per token, ours − others, over the test strings of all seeds."""
        a, b = (np.concatenate([read_arrays(folder / _STRINGS)["above"] for folder in side]) for side in (ours, others))
        return {"nats above the law": measured_rate(a - b, np.ones(len(a)))}

    def _at_the_end(self, training: Path) -> float:
        """Of the validation strings, by the last validation of the training."""
        if not training.is_dir():
            return float("nan")
        last = [record["validation"] for record in read_records(training) if record["validation"] is not None][-1]
        return float(last + self.log_law(self.strings["validation"]).mean().item() / self.settings.length)

    def _drawn(self, num: int, rng: Rng) -> Int[Tensor, "num L"]:
        return self.law.sample(self._nothing, num, self.space, rng).x.tokens[0]

    @property
    def _nothing(self) -> Sequences:
        return Sequences.from_lists([[]])


@torch.no_grad()
def log_q(network: Network, strings: Int[Tensor, "n L"]) -> Float[Tensor, " n"]:
    """Returns log q(x) of each string, float64."""
    with inference(network.module):
        log_probs = network.logits(None, strings).cpu().double().log_softmax(-1)
    return log_probs.gather(-1, strings.unsqueeze(-1)).squeeze(-1).sum(1)


_made = lru_cache(maxsize=1)(KnownLaw)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLawRecipe(NetworkRecipe[GRUBase]):
    """A recurrent network on strings of a known law."""

    main_column: ClassVar[str] = "nats above the law"

    family: Literal["known-law"] = "known-law"
    law: LawSettings = field(default_factory=LawSettings)
    base: GRUBase = field(default_factory=GRUBase)

    def __post_init__(self) -> None:
        NetworkRecipe.__post_init__(self)
        if self.base.optimisation.batch_size > self.law.train:
            raise UserError(
                f"base.optimisation.batch_size is {self.base.optimisation.batch_size}, more than the {self.law.train} "
                "training strings: set it lower, or law.train higher"
            )

    def data_stages(self) -> tuple[Stage[Any], ...]:
        """Returns nothing: strings are drawn in a second."""
        return ()

    def domain(self, run: Run[Any], progress: Progress) -> KnownLaw:
        """Returns the law of this seed."""
        return _made(self.law, self.base, self.seed)

    def learning_inputs(self, progress: Progress) -> Any:
        """Returns the law and the number of its strings."""
        return learning(self.law)

    def measuring_inputs(self) -> Any:
        """Returns what is measured."""
        return measuring(self.law)
