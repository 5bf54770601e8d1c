"""From text to token streams and windows: what models are trained and measured on."""

from freenergy.corpus.counts import count_words_and_bytes
from freenergy.corpus.prepare import prepare
from freenergy.corpus.report import CorpusReport, Example, SplitReport
from freenergy.corpus.settings import (
    BytePairTokenizer,
    CorpusSettings,
    PretrainedTokenizer,
    TokenizerSettings,
    WordTokenizer,
)
from freenergy.corpus.store import Corpus, Windows
from freenergy.corpus.tokenizer import Tokenizer

__all__ = [
    "BytePairTokenizer",
    "Corpus",
    "CorpusReport",
    "CorpusSettings",
    "Example",
    "PretrainedTokenizer",
    "SplitReport",
    "Tokenizer",
    "TokenizerSettings",
    "Windows",
    "WordTokenizer",
    "count_words_and_bytes",
    "prepare",
]
