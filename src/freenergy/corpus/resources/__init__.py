"""Names for texts and models that the toolkit can fetch, check and cache by itself."""

from freenergy.corpus.resources.docstrings import docstrings_corpus
from freenergy.corpus.resources.fetch import (
    ChecksumError,
    ResourceUnavailable,
    cache_folder,
    fetch,
    is_cached,
    listing,
    locate,
    named,
)
from freenergy.corpus.resources.table import RESOURCES, File, Resource

__all__ = [
    "RESOURCES",
    "ChecksumError",
    "File",
    "Resource",
    "ResourceUnavailable",
    "cache_folder",
    "docstrings_corpus",
    "fetch",
    "is_cached",
    "listing",
    "locate",
    "named",
]
