"""From text to token streams and windows: what models are trained and measured on."""

from freenergy.corpus.counts import count_words_and_bytes as count_words_and_bytes
from freenergy.corpus.prepare import prepare as prepare
from freenergy.corpus.settings import BytePairTokenizer as BytePairTokenizer
from freenergy.corpus.settings import CorpusSettings as CorpusSettings
from freenergy.corpus.settings import PretrainedTokenizer as PretrainedTokenizer
from freenergy.corpus.settings import TokenizerSettings as TokenizerSettings
from freenergy.corpus.settings import WordTokenizer as WordTokenizer
from freenergy.corpus.store import Corpus as Corpus
from freenergy.corpus.store import CorpusReport as CorpusReport
from freenergy.corpus.store import Windows as Windows
from freenergy.corpus.tokenizer import Tokenizer as Tokenizer
