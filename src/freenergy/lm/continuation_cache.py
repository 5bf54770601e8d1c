"""The keys and values of continuations while they are written, in memory that is allocated once.

It is one of transformers' ``Cache`` classes, so any model that takes a cache can use it.
"""

from typing import Any, final

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@final
class ContinuationLayer(CacheLayerMixin):
    """Keys and values of the continuations in one layer, in memory that is allocated once."""

    is_sliding = False

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for the whole continuation."""
        R, K, _, _ = key_states.shape
        self.keys = key_states.new_empty(R, K, self.length, key_states.shape[-1])
        self.values = value_states.new_empty(R, K, self.length, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all so far as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.filled + key_states.shape[2]
        self.keys[:, :, self.filled : end] = key_states
        self.values[:, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a query of this length will meet, and the first one's place."""
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.filled

    def get_max_length(self) -> int:
        """Return the number of tokens that fit."""
        return self.length


def continuation_cache(num_layers: int, length: int) -> Cache:
    """Return an empty cache for continuations of at most ``length`` tokens."""
    return Cache(layers=[ContinuationLayer(length) for _ in range(num_layers)])
