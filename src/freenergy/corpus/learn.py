"""Learning a tokenizer from the training split.

    byte-pair:  begin with 256 bytes; again and again, join the most frequent pair of neighbours into a new token
    words:      the V most frequent strings between white space; all others are <unk>

Both come from the ``tokenizers`` library, read a stream, and give the same vocabulary for the same text.
"""

from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from freenergy.corpus.settings import BytePairTokenizer, WordTokenizer
from freenergy.corpus.tokenizer import Tokenizer

EOS_TOKEN = "<|endoftext|>"
UNKNOWN = "<unk>"
_FED = 1 << 16  # characters: the library gathers 256 texts before it begins to count
_EVERY_WORD = 2**31 - 1


def learn(settings: BytePairTokenizer | WordTokenizer, texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer that the settings describe."""
    if isinstance(settings, WordTokenizer):
        return _learn_words(settings, texts)
    return _learn_byte_pairs(settings, texts)


def sample(texts: Iterable[str], total: int, most: int) -> Iterator[str]:
    """Texts spread evenly over a stream of ``total`` characters, about ``most`` of them."""
    seen, kept = 0, 0
    for text in texts:
        seen += len(text)
        if kept * total < most * seen and kept < most:
            kept += len(text)
            yield text


def _learn_byte_pairs(settings: BytePairTokenizer, texts: Iterable[str]) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_small(texts), trainer)
    return Tokenizer(inner, _eos(inner))


def _learn_words(settings: WordTokenizer, texts: Iterable[str]) -> Tokenizer:
    counter = tokenizers.Tokenizer(models.WordLevel())
    counter.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=_EVERY_WORD, min_frequency=0, special_tokens=[], show_progress=False)
    counter.train_from_iterator(_small(texts), trainer)
    ranked = sorted(counter.get_vocab(), key=counter.get_vocab().__getitem__)
    words = [UNKNOWN, *(word for word in ranked if word not in (UNKNOWN, EOS_TOKEN))]
    if settings.vocab_size is not None:
        words = words[: settings.vocab_size - 1]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # outside the model's vocabulary, so that a text with this very word in it does not end there
    inner.add_special_tokens([EOS_TOKEN])
    return Tokenizer(inner, _eos(inner))


def _eos(inner: tokenizers.Tokenizer) -> int:
    eos = inner.token_to_id(EOS_TOKEN)
    assert eos is not None
    return eos


def _small(texts: Iterable[str]) -> Iterator[str]:
    """Yield the same text in parts small enough that 256 of them are nothing, cut at white space."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + _FED
            if stop < len(text):
                stop = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
                stop = stop if stop > start else start + _FED
            yield text[start:stop]
            start = stop
