"""What an experiment is about: rows to learn from, a network that learns, and what is worth knowing of it afterwards.

Text, translations and images play this role; the engine (``running``) knows nothing else of them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.evaluation.perplexity import Measurement
from freenergy.lm.networks.protocol import Data, Network


@runtime_checkable
class Subject(Protocol):
    """What is learned, and how it is judged.

    A subject that reads files may have a ``fingerprint`` of them: then rows that were made of other data are made anew.
    Its settings may name, as ``MEASURING``, the fields that only ``measure`` reads: a change of these trains nothing.
    """

    @property
    def main_column(self) -> str:
        """The number that a study plots."""
        ...

    def network(self, rng: Rng) -> Network:
        """A network with fresh weights."""
        ...

    def data(self, *, batch_size: int, accumulate: int, rng: Rng) -> Data:
        """The rows of training and validation."""
        ...

    def measure(self, network: Network, folder: Path, rng: Rng, progress: Progress) -> dict[str, float]:
        """The numbers of a table row, by column, on the test split; ``folder`` gets what ``compare`` needs."""
        ...

    def compare(self, ours: Sequence[Path], others: Sequence[Path], rng: Rng) -> dict[str, Measurement]:
        """The differences ours − others with 95 % intervals, paired, over the folders of the same seeds."""
        ...
