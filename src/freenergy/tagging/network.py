"""The network of a neural tagger: words to a state of each word, then a law of tags.

    z_t = [ word ; characters ; shape ; columns ; encoder ],      h = BiLSTM(z),      p(y | x) = law(h)

Characters: a convolution over the letters and the largest value of each filter, or the sum of embeddings of hashed
n-grams. The encoder is any Hugging Face network: the state of a word is the mean of the states of its pieces.
"""

from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from freenergy.core.rng import Rng
from freenergy.structured import Allowed
from freenergy.tagging.laws import ChainHead, TagLaw
from freenergy.tagging.reading import Vocabulary, Words, to_device
from freenergy.tagging.settings import NeuralTagger
from freenergy.tagging.transducers import TransducerHead

if TYPE_CHECKING:
    from freenergy.tagging.encoder import WordEncoder

_SHAPES = 16  # width of the embedding of shapes


@final
class BothWays(nn.Module):
    """A BiLSTM as two LSTMs, the second on sentences turned round within their lengths, so that padding stays behind.

    Without packed sequences torch has a faster kernel; the result is the same.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.ahead, self.back = (nn.LSTM(width, hidden, batch_first=True) for _ in range(2))

    def forward(self, x: Float[Tensor, "B T Z"], lengths: Int[Tensor, " B"]) -> Float[Tensor, "B T H"]:
        """Returns the states of both directions, one after the other."""
        place = torch.arange(x.shape[1], device=x.device)
        turned = torch.where(place < lengths.unsqueeze(1), lengths.unsqueeze(1) - 1 - place, place).unsqueeze(2)
        back = self.back(x.gather(1, turned.expand_as(x)))[0]
        return torch.cat([self.ahead(x)[0], back.gather(1, turned.expand_as(back))], 2)


@final
class TaggerNetwork(nn.Module):
    """A neural tagger of K tags."""

    def __init__(
        self, settings: NeuralTagger, vocabulary: Vocabulary, num_tags: int, allowed: Allowed | None,
        encoder: "WordEncoder | None" = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.settings, self.num_tags = settings, num_tags
        self._frozen = [encoder] if encoder is not None and settings.frozen else []  # hidden from parameters()
        self.encoder = encoder if encoder is not None and not settings.frozen else None
        s, v = settings, vocabulary
        self.words = nn.Embedding(len(v.words) + 1, s.words) if s.words else None
        self.shapes = nn.Embedding(len(v.shapes) + 1, _SHAPES) if s.words else None
        self.columns = nn.ModuleList(nn.Embedding(len(each) + 1, s.columns) for each in v.columns)
        self.grams = nn.EmbeddingBag(s.buckets, s.character_width, mode="sum") if s.characters == "ngrams" else None
        self.letters = nn.Embedding(len(v.characters) + 1, 24, padding_idx=0) if s.characters == "cnn" else None
        self.convolution = nn.Conv1d(24, s.character_width, 3, padding=1) if s.characters == "cnn" else None
        width = (s.words + _SHAPES if s.words else 0) + len(v.columns) * s.columns
        width += (s.character_width if s.characters != "none" else 0) + (encoder.width if encoder is not None else 0)
        self.lstm = BothWays(width, s.hidden) if s.hidden else None
        self.dropout = nn.Dropout(s.dropout)
        out = 2 * s.hidden or width
        self.head = (
            ChainHead(s.law, out, num_tags, allowed)
            if s.law in ("softmax", "memm", "crf")
            else TransducerHead(
                s.law,
                out,
                num_tags,
                design=s.design,
                history=s.history,
                label_width=s.labels,
                beam=s.beam,
                allowed=allowed,
            )
        )
        self.noise = nn.Linear(out, num_tags) if s.loss.kind == "nce" else None
        for table in (self.words, self.shapes, self.grams, self.letters, *self.columns):
            if table is not None:
                nn.init.normal_(table.weight, std=0.1)

    def states(self, words: Words) -> tuple[Float[Tensor, "B T H"], Int[Tensor, " B"]]:
        """Returns the state of each word, and the lengths."""
        words = to_device(words, next(self.parameters()).device)
        z = self.dropout(self._inputs(words))
        rows = pad_sequence(list(z.split(words.lengths.tolist())), batch_first=True)
        if self.lstm is not None:
            rows = self.dropout(self.lstm(rows, words.lengths))
        return rows, words.lengths

    def forward(self, words: Words) -> TagLaw:
        """Returns the law of the tags of a batch."""
        return self.head(*self.states(words))  # type: ignore[no-any-return]

    def _inputs(self, words: Words) -> Float[Tensor, "N Z"]:
        parts = list[Tensor]()
        if self.words is not None and self.shapes is not None:
            numbers = words.words
            if self.training:
                numbers = torch.where(
                    torch.rand(len(numbers), device=numbers.device) < self.settings.word_dropout, 0, numbers
                )
            parts += [self.words(numbers), self.shapes(words.shapes)]
        if self.grams is not None:
            parts.append(self.grams(words.grams, words.offsets)[words.which])
        if self.letters is not None and self.convolution is not None:
            letters = self.convolution(self.letters(words.characters).transpose(1, 2))
            parts.append(letters.amax(2)[words.which])
        parts += [table(words.columns[:, i]) for i, table in enumerate(self.columns)]
        for encoder in (*self._frozen, *([] if self.encoder is None else [self.encoder])):
            parts.append(encoder.states(words.sentences).to(words.which.device))
        return torch.cat(parts, 1)


def fresh(
    settings: NeuralTagger, vocabulary: Vocabulary, num_tags: int, allowed: Allowed | None,
    encoder: "WordEncoder | None", rng: Rng,
) -> TaggerNetwork:  # fmt: skip
    """Returns a network with fresh weights."""
    with torch.random.fork_rng():
        torch.manual_seed(rng.integer())
        return TaggerNetwork(settings, vocabulary, num_tags, allowed, encoder)
