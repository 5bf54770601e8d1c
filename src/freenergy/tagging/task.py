"""A neural tagger for the training loop.

A step reads ``batch_size`` sentences; validation tags the held-out ones. Early stopping watches 100 − F1 where tags
mark spans, 100 − accuracy else, and nats per word where the held-out tags are known in part only.
"""

import math
from collections.abc import Iterator, Sequence
from typing import final

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss
from freenergy.tagging.losses import batch_loss, negative_log_prob
from freenergy.tagging.network import TaggerNetwork
from freenergy.tagging.reading import Vocabulary, labels_of
from freenergy.tagging.scores import ACCURACY, F1, count, rates
from freenergy.tagging.sentences import UNKNOWN, Sentence, TagSet
from freenergy.training.settings import Optimisation
from freenergy.training.task import Validation

BATCH_SIZE = 64  # sentences at a time where nothing is trained
_POOL = 16  # batches that are sorted by length together


@final
class TaggingTask:
    """Tagged sentences, and the network that learns from them."""

    def __init__(
        self, network: TaggerNetwork, vocabulary: Vocabulary, tags: TagSet, train: Sequence[Sentence],
        validation: Sequence[Sentence], steps: Optimisation, rng: Rng, *, partial: bool,
    ) -> None:  # fmt: skip
        if len(train) < steps.batch_size:
            raise UserError(
                f"there are {len(train)} training sentences for batches of {steps.batch_size}: "
                "set tagger.optimisation.batch_size lower"
            )
        self.module, self.vocabulary, self.tags = network, vocabulary, tags
        self._train, self._validation, self._partial = train, validation, partial
        self._order = _Order([len(one) for one in train], steps, rng)
        self.epoch_steps = len(train) // steps.batch_size

    def loss(self, step: int, micro: int, rng: Rng) -> Loss:
        """Returns the loss of one micro-batch."""
        some = [self._train[i] for i in self._order(step, micro)]
        labels = labels_of(some, self.tags, partial=self._partial)
        return batch_loss(self.module, self.vocabulary.read(some), labels, self.tags.names, rng)

    def validate(self) -> Validation:
        """Tags the held-out sentences."""
        gold, found, nats = list[Sequence[str]](), list[list[str]](), 0.0
        for some in batches(self._validation):
            law = self.module(self.vocabulary.read(some))
            labels = labels_of(some, self.tags, partial=self._partial)
            nats += negative_log_prob(law, labels, False).double().sum().item()
            y = law.argmax().labels.tolist()
            found += [[self.tags.names[k] for k in row[: len(one)]] for row, one in zip(y, some, strict=True)]
            gold += [one.tags for one in some]
        per_word = nats / sum(map(len, gold))
        if self._partial and any(tag == UNKNOWN or "|" in tag for tags in gold for tag in tags):
            return Validation(per_word, {"nats_per_word": per_word})
        measured = rates(count(gold, found))
        main = measured.get(F1, measured[ACCURACY])
        shown = {name.replace(" %", ""): value for name, value in measured.items()}
        return Validation(100 - main, shown | ({"nats_per_word": per_word} if math.isfinite(per_word) else {}))


@final
class _Order:
    """The sentences of each step: a new order every epoch, drawn by its number alone; a batch has similar lengths.

    Sentences are shuffled, pools of batches are sorted by length, and the batches are shuffled again: a recurrent
    network takes as many steps as the longest sentence of a batch has words.
    """

    def __init__(self, lengths: Sequence[int], steps: Optimisation, rng: Rng) -> None:
        self._lengths, self._batch, self._rng = lengths, steps.batch_size, rng
        self._size, self._epoch, self._order = steps.batch_size // steps.accumulate, -1, list[int]()

    def __call__(self, step: int, micro: int) -> list[int]:
        """Returns the numbers of a micro-batch's sentences; steps count from 1."""
        epoch, place = divmod(step - 1, len(self._lengths) // self._batch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._drawn(self._rng.child("epoch", epoch))
        first = place * self._batch + micro * self._size
        return self._order[first : first + self._size]

    def _drawn(self, rng: Rng) -> list[int]:
        batch, shuffled = self._batch, rng.permutation(len(self._lengths)).tolist()
        shuffled = shuffled[: len(shuffled) // batch * batch]
        for first in range(0, len(shuffled), _POOL * batch):
            pool = slice(first, first + _POOL * batch)
            shuffled[pool] = sorted(shuffled[pool], key=lambda i: self._lengths[i])
        places = rng.child("batches").permutation(len(shuffled) // batch).tolist()
        return [i for place in places for i in shuffled[place * batch : (place + 1) * batch]]


def batches(sentences: Sequence[Sentence], size: int = BATCH_SIZE) -> Iterator[Sequence[Sentence]]:
    """Yields the sentences in their order, some at a time."""
    for first in range(0, len(sentences), size):
        yield sentences[first : first + size]
