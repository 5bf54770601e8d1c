"""Settings of a tagger: which sentences, which model, which loss.

A model is one of three kinds: ``features`` (a log-linear chain on templates, L-BFGS), ``neural`` (a network with a law
of tags on top, trained by the one loop), ``hmm`` (counted).
"""

from dataclasses import dataclass, field
from typing import Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.tagging.formats import Columns, Format
from freenergy.tagging.templates import PRESETS, parse
from freenergy.training.settings import KEEP_DEFAULT, Optimisation


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaggingData:
    """Files of sentences. Without a file for validation or test a random share of the training sentences is kept."""

    train: str
    validation: str = ""
    test: str = ""
    format: Format = "auto"
    word: int = 0  # column of the word, counted from 0; from the end where negative
    tag: int = -1  # column of the tag; in CoNLL-U 3 is UPOS (the default), 4 is XPOS
    columns: tuple[int, ...] = ()  # that the model may read besides the word, such as parts of speech
    scheme: Literal["auto", "none", "bio", "bioes"] = (
        "auto"  # tags are rewritten in it; auto is bio where they mark spans
    )
    partial: bool = False  # a training tag may be "_" (any) or "A|B" (one of these)
    held_out_share: float = 0.1

    def __post_init__(self) -> None:
        if not self.train:
            raise UserError("data.train is empty: name a file of tagged sentences")
        check_range(self, "held_out_share", above=0, below=0.5, section="data.")
        if self.word == self.tag:
            raise UserError(f"data.word and data.tag are both column {self.tag}: name two columns")

    @property
    def layout(self) -> Columns:
        """Returns which column has what."""
        return Columns(word=self.word, tag=self.tag, columns=self.columns)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Conditional likelihood: − log p(y | x) per word; of partial labels − log Σ over taggings that agree."""

    kind: Literal["likelihood"] = "likelihood"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveLoss:
    """Conditional NCE: tell true tags from draws of a noise q(y | x), a softmax per word that is trained along."""

    kind: Literal["nce"] = "nce"
    objective: Literal["ranking", "conditional"] = "ranking"  # conditional wants Z(x) = 1, ranking leaves it free
    negatives: int = 16

    def __post_init__(self) -> None:
        check_range(self, "negatives", at_least=1, section="tagger.loss.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumRisk:
    """Expected cost over the k best taggings, their probabilities normalised among themselves, plus likelihood."""

    kind: Literal["risk"] = "risk"
    k: int = 8
    cost: Literal["words", "spans"] = "words"  # wrong words, or 1 − F1 of the sentence's spans
    likelihood: float = 1.0  # weight of − log p(y | x) per word

    def __post_init__(self) -> None:
        check_range(self, "k", at_least=2, section="tagger.loss.")
        check_range(self, "likelihood", at_least=0, section="tagger.loss.")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureTagger:
    """A classic CRF: weights of templates × tags and of pairs of tags, fitted by L-BFGS."""

    kind: Literal["features"] = "features"
    templates: tuple[str, ...] = ("chunking",)  # names of presets, or templates such as "w[-1]|w[0]"
    min_count: int = 1  # a feature must be seen this often
    l1: float = 0.0
    l2: float = 1.0  # the penalty is l1 · Σ |w| + l2 · Σ w² / 2, of the summed log-likelihood
    iterations: int = 100
    with_validation: bool = False  # learn from the validation sentences too: nothing is chosen on them
    constrained: bool = False

    def __post_init__(self) -> None:
        check_range(self, "min_count", "iterations", at_least=1, section="tagger.")
        check_range(self, "l1", "l2", at_least=0, section="tagger.")
        if not self.templates:
            raise UserError(f"tagger.templates is empty: take some of {', '.join(PRESETS)}, or write templates")
        parse(self.templates)  # refuses a bad one


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenMarkov:
    """A hidden Markov model, the generative partner of the chain: Π p(y_t | y_{t−1}) p(x_t | y_t), counted."""

    kind: Literal["hmm"] = "hmm"
    rare: int = 2  # words seen at most this often count as their ending and shape
    transition_smoothing: float = 0.1
    emission_smoothing: float = 0.01
    with_validation: bool = False  # count the validation sentences too: nothing is chosen on them
    constrained: bool = False

    def __post_init__(self) -> None:
        check_range(self, "rare", at_least=0, section="tagger.")
        check_range(self, "transition_smoothing", "emission_smoothing", above=0, section="tagger.")


Law = Literal["softmax", "crf", "memm", "rnnt", "transducer"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NeuralTagger:
    """Embeddings of the word, its characters, shape and columns, or an encoder's states; a BiLSTM; a law of tags.

    ``law``: softmax (each tag alone), crf (a chain), memm (a chain, normalised word by word), rnnt (aligned RNN
    transducer: all tags before, normalised word by word), transducer (all tags before, normalised over taggings).
    """

    kind: Literal["neural"] = "neural"
    law: Law = "crf"
    words: int = 64  # width of word embeddings; 0 for none
    min_count: int = 2  # rarer words share one embedding
    characters: Literal["cnn", "ngrams", "none"] = "cnn"
    character_width: int = 48
    buckets: int = 20_000  # of hashed n-grams
    columns: int = 32  # width of the embedding of each column
    encoder: str = ""  # a resource such as minilm-l6, a Hugging Face id or a folder: its states are read too
    frozen: bool = True  # the encoder's weights stay as they are
    hidden: int = 128  # of the BiLSTM, in each direction; 0 for none
    dropout: float = 0.5
    word_dropout: float = 0.1  # share of words that training reads as unseen, known by their characters alone
    constrained: bool = False  # forbid tags that break the scheme; in training too where the law is global
    design: Literal[1, 2] = 1  # of the transducer: potentials are f and g, or log softmax f and log softmax g
    history: Literal["lstm", "last"] = "lstm"  # what the prediction network sees: all tags before, or the last one
    labels: int = 32  # width of the prediction network
    beam: int = 4
    early_update: bool = True
    loss: Likelihood | ContrastiveLoss | MinimumRisk = field(default_factory=Likelihood)
    optimisation: Optimisation = field(
        default_factory=lambda: Optimisation(
            steps=1200, batch_size=32, learning_rate=4e-3, warmup=50, weight_decay=0.01, clip=5.0, beta2=0.99,
            validate_every=200, final_share=0.05,
        ),
        metadata=KEEP_DEFAULT,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_range(self, "words", "hidden", at_least=0, section="tagger.")
        check_range(
            self, "min_count", "character_width", "buckets", "columns", "labels", "beam", at_least=1, section="tagger."
        )
        check_range(self, "dropout", "word_dropout", at_least=0, below=1, section="tagger.")
        if not self.words and self.characters == "none" and not self.encoder:
            raise UserError("the tagger reads nothing of a word: set tagger.words, tagger.characters or tagger.encoder")
        if isinstance(self.loss, ContrastiveLoss) and self.law not in ("crf", "transducer"):
            raise UserError(
                f"law = {self.law!r} is normalised word by word, so NCE has nothing to estimate: take likelihood"
            )


Model = FeatureTagger | NeuralTagger | HiddenMarkov
