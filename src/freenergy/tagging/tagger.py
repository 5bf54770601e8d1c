"""``Tagger``: the public face of a model of tags.

    tag        argmax_y p(y | x)                     score      log p(y | x) of given tags
    marginals  p(y_t = k | x)                        sample     y ~ p(y | x)

Whatever the model: a chain of features, a network with any law, a hidden Markov model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.device import device
from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_json
from freenergy.core.progress import SILENT, Progress
from freenergy.core.rng import Rng
from freenergy.lm.load import locate_model
from freenergy.structured import Allowed
from freenergy.tagging.features import FeatureModel
from freenergy.tagging.hmm import HiddenMarkovModel
from freenergy.tagging.laws import TagLaw, constraints
from freenergy.tagging.network import TaggerNetwork
from freenergy.tagging.reading import Vocabulary, labels_of
from freenergy.tagging.sentences import Sentence, TagSet
from freenergy.tagging.settings import (
    ContrastiveLoss,
    FeatureTagger,
    HiddenMarkov,
    Likelihood,
    MinimumRisk,
    Model,
    NeuralTagger,
)
from freenergy.tagging.spans import Scheme
from freenergy.tagging.task import batches
from freenergy.training.checkpoint import restore_weights, save_weights
from freenergy.training.settings import Optimisation

RECORD = "tagger.json"
_WEIGHTS, _VOCABULARY = "weights.safetensors", "vocabulary.json"
Given = Sequence[Sentence] | Sequence[Sequence[str]]


@runtime_checkable
class TagModel(Protocol):
    """What gives a law of tags."""

    def law(self, sentences: Sequence[Sentence]) -> TagLaw:
        """Returns the law of the tags of a batch."""

    def save(self, folder: Path) -> None:
        """Write it."""


@final
@dataclass(frozen=True, slots=True)
class NeuralModel:
    """A trained network with its vocabulary."""

    network: TaggerNetwork
    vocabulary: Vocabulary

    def law(self, sentences: Sequence[Sentence]) -> TagLaw:
        """Returns the law of the tags of a batch."""
        with _inference(self.network):
            return self.network(self.vocabulary.read(sentences))  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Write the vocabulary and the weights."""
        write_json(folder / _VOCABULARY, self.vocabulary.to_json())
        save_weights(folder / _WEIGHTS, self.network)

    @classmethod
    def load(cls, folder: Path, settings: NeuralTagger, tags: TagSet, allowed: Allowed | None) -> "NeuralModel":
        """Read what ``save`` has written."""
        vocabulary = Vocabulary.from_json(read_json(folder / _VOCABULARY))
        network = TaggerNetwork(settings, vocabulary, len(tags), allowed, open_encoder(settings))
        restore_weights(folder / _WEIGHTS, network)
        return cls(network.to(device()), vocabulary)


def open_encoder(settings: NeuralTagger, progress: Progress = SILENT) -> Any:
    """Returns the encoder that the settings name, if any."""
    if not settings.encoder:
        return None
    from freenergy.tagging.encoder import WordEncoder

    return WordEncoder(locate_model(settings.encoder, progress), frozen=settings.frozen)


@contextmanager
def _inference(network: TaggerNetwork) -> Iterator[None]:
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        network.train(was_training)


class TagScore(NamedTuple):
    """How likely given tags are; where the law is not exact this is an upper bound."""

    log_prob: float
    is_exact: bool


@final
@dataclass(frozen=True, slots=True)
class Tagger:
    """A model of tags; ``columns`` is how many columns it reads besides each word."""

    settings: Model
    tags: TagSet
    scheme: Scheme
    columns: int
    model: TagModel

    def tag(self, sentences: Given) -> list[list[str]]:
        """Returns the best tags of each sentence, a list of words or a ``Sentence``."""
        found = []
        for some in batches(self._checked(sentences)):
            y = self.model.law(some).argmax().labels.tolist()
            found += [[self.tags.names[k] for k in row[: len(one)]] for row, one in zip(y, some, strict=True)]
        return found

    def score(self, sentences: Sequence[Sentence]) -> list[TagScore]:
        """Returns log p(y | x) of the sentences' own tags."""
        found = []
        for some in batches(self._checked(sentences)):
            law = self.model.law(some)
            with torch.no_grad():
                log_p = law.log_prob(labels_of(some, self.tags).y).tolist()
            found += [TagScore(each, law.is_exact) for each in log_p]
        return found

    def marginals(self, sentences: Given) -> list[Float[Tensor, "T K"]]:
        """Returns p(y_t = k | x) for each word of each sentence; estimates where the law is a transducer's."""
        found = []
        for some in batches(self._checked(sentences)):
            law = self.model.law(some)
            found += [row[: len(one)] for row, one in zip(law.marginals().detach(), some, strict=True)]
        return found

    def sample(self, sentences: Given, num: int, rng: Rng) -> list[list[list[str]]]:
        """Draws ``num`` taggings of each sentence."""
        found = []
        for place, some in enumerate(batches(self._checked(sentences))):
            drawn = self.model.law(some).sample(num, rng.child("batch", place)).tolist()
            found += [
                [[self.tags.names[k] for k in row[: len(one)]] for row in rows]
                for rows, one in zip(drawn, some, strict=True)
            ]
        return found

    def _checked(self, sentences: Given) -> list[Sentence]:
        found = [one if isinstance(one, Sentence) else Sentence(tuple(one)) for one in sentences]
        for one in found:
            if (len(one.columns[0]) if one.columns else 0) != self.columns:
                raise UserError(
                    f"the tagger reads {self.columns} columns besides each word, and {' '.join(one.words)[:40]!r} has "
                    f"{len(one.columns[0]) if one.columns else 0}: give the columns of training"
                )
        return found

    def save(self, folder: Path) -> None:
        """Write the tagger."""
        self.model.save(folder)
        record = {"settings": asdict(self.settings), "tags": list(self.tags.names), "scheme": self.scheme}
        write_json(folder / RECORD, record | {"columns": self.columns})

    @classmethod
    def load(cls, folder: str | Path) -> "Tagger":
        """Read what ``save`` has written."""
        folder = Path(folder)
        record = read_json(folder / RECORD)
        settings, tags = _settings(record["settings"]), TagSet(tuple(record["tags"]))
        allowed = allowed_by(settings, tags, record["scheme"])
        model: TagModel
        match settings:
            case FeatureTagger():
                model = FeatureModel.load(folder, settings, tags, allowed)
            case HiddenMarkov():
                model = HiddenMarkovModel.load(folder, settings, tags, allowed)
            case NeuralTagger():
                model = NeuralModel.load(folder, settings, tags, allowed)
        return cls(settings, tags, record["scheme"], record["columns"], model)


def allowed_by(settings: Model, tags: TagSet, scheme: Scheme) -> Allowed | None:
    """Returns the constraints of the scheme, where the tagger keeps to them."""
    return constraints(tags.names, scheme) if settings.constrained else None


_KINDS: dict[str, type[Any]] = {"features": FeatureTagger, "hmm": HiddenMarkov, "neural": NeuralTagger}
_LOSSES: dict[str, type[Any]] = {"likelihood": Likelihood, "nce": ContrastiveLoss, "risk": MinimumRisk}


def _settings(table: dict[str, Any]) -> Model:
    """Returns settings from JSON."""
    given = dict(table)
    if "loss" in given:
        given["loss"] = _LOSSES[given["loss"]["kind"]](**given["loss"])
    if "optimisation" in given:
        given["optimisation"] = Optimisation(**given["optimisation"])
    if "templates" in given:
        given["templates"] = tuple(given["templates"])
    found: Model = _KINDS[given["kind"]](**given)
    return found
