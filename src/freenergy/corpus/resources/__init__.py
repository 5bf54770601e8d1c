"""Names for texts and models that the toolkit can fetch, check and cache by itself."""

from freenergy.corpus.resources.docstrings import docstrings_corpus as docstrings_corpus
from freenergy.corpus.resources.fetch import ChecksumError as ChecksumError
from freenergy.corpus.resources.fetch import ResourceUnavailable as ResourceUnavailable
from freenergy.corpus.resources.fetch import cache_folder as cache_folder
from freenergy.corpus.resources.fetch import fetch as fetch
from freenergy.corpus.resources.fetch import is_cached as is_cached
from freenergy.corpus.resources.fetch import listing as listing
from freenergy.corpus.resources.fetch import locate as locate
from freenergy.corpus.resources.table import RESOURCES as RESOURCES
from freenergy.corpus.resources.table import File as File
from freenergy.corpus.resources.table import Resource as Resource
