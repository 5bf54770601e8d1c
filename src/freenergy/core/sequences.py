"""What a text is to a model: contexts, continuations, and the set that Z sums over.

    c = a context of P tokens,   x = a continuation of L tokens,   x in a SequenceSpace

A ``Continuations`` holds B contexts and, for each, N continuations. That the N rows share their context is in the
shape, so a model can read the context once and callers never arrange it by hand. Everything is padded on the right: a
causal model never sees padding before a real token, so padding is inert.

Legend: B contexts, N continuations of each, P context length, L continuation length, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError

_MOST_STRINGS = 1_000_000
_LONGEST = 1_000_000


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    tokens = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return tokens, lengths


def _mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


@final
@dataclass(frozen=True, slots=True)
class Sequences:
    """A batch of token strings, padded on the right; lengths count EOS where it is present."""

    tokens: Int[Tensor, "batch length"]
    lengths: Int[Tensor, " batch"]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> "Sequences":
        """Pad lists of token ids.

        >>> Sequences.from_lists([[5, 6], [7]]).tokens.tolist()
        [[5, 6], [7, 0]]
        """
        return cls(*_padded(rows))

    @staticmethod
    def cat(parts: "Sequence[Sequences]") -> "Sequences":
        """Return all the strings, padded to the longest."""
        width = max(part.tokens.shape[1] for part in parts)
        tokens = [pad(part.tokens, (0, width - part.tokens.shape[1])) for part in parts]
        return Sequences(torch.cat(tokens), torch.cat([part.lengths for part in parts]))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> "Sequences":
        return Sequences(self.tokens[rows], self.lengths[rows])

    @property
    def mask(self) -> Bool[Tensor, "batch length"]:
        """True at real tokens."""
        return _mask(self.lengths, self.tokens.shape[1])

    def trimmed(self) -> "Sequences":
        """Without columns that are padding in every row."""
        width = int(self.lengths.max()) if len(self) else 0
        return Sequences(self.tokens[:, :width], self.lengths)

    def lists(self) -> list[list[int]]:
        """Token ids without padding."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]

    def to(self, device: torch.device | str) -> "Sequences":
        """Return the same strings on another device."""
        return Sequences(self.tokens.to(device), self.lengths.to(device))


@final
@dataclass(frozen=True, slots=True)
class Continuations:
    """B contexts and N continuations of each."""

    contexts: Sequences
    tokens: Int[Tensor, "batch num length"]
    lengths: Int[Tensor, "batch num"]

    @classmethod
    def from_lists(
        cls, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
    ) -> "Continuations":
        """Pad lists of token ids: one context and the same number of continuations in each row."""
        if len(contexts) != len(continuations):
            raise UserError(f"{len(contexts)} contexts, {len(continuations)} lists of continuations: give one each")
        counts = {len(row) for row in continuations}
        if len(counts) > 1:
            raise UserError(f"contexts have {sorted(counts)} continuations: give each context the same number")
        num = counts.pop() if counts else 0
        tokens, lengths = _padded([x for row in continuations for x in row])
        shape = (len(contexts), num)
        return cls(Sequences.from_lists(contexts), tokens.view(*shape, -1 if num else 0), lengths.view(shape))

    @staticmethod
    def cat(parts: "Sequence[Continuations]", dim: int) -> "Continuations":
        """Join other contexts (dim 0; widths are padded to the widest) or more candidates of the same (dim 1)."""
        contexts = parts[0].contexts if dim == 1 else Sequences.cat([part.contexts for part in parts])
        width = max(part.tokens.shape[2] for part in parts)
        tokens = [pad(part.tokens, (0, width - part.tokens.shape[2])) for part in parts]
        return Continuations(contexts, torch.cat(tokens, dim), torch.cat([part.lengths for part in parts], dim))

    @property
    def shape(self) -> tuple[int, int]:
        """(B, N), the shape of everything that is computed from this."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def mask(self) -> Bool[Tensor, "batch num length"]:
        """True at real tokens of the continuations."""
        return _mask(self.lengths, self.tokens.shape[2])

    def __getitem__(self, rows: slice | Tensor) -> "Continuations":
        """Return some of the contexts, with all their continuations."""
        return Continuations(self.contexts[rows], self.tokens[rows], self.lengths[rows])

    def candidates(self, columns: slice | Tensor) -> "Continuations":
        """Return all contexts, with some of their continuations."""
        return Continuations(self.contexts, self.tokens[:, columns], self.lengths[:, columns])

    def lists(self) -> list[list[list[int]]]:
        """Token ids of the continuations without padding."""
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [[x[:n] for x, n in zip(xs, ns, strict=True)] for xs, ns in rows]

    def trimmed(self) -> "Continuations":
        """Without columns that are padding in every row."""
        width = int(self.lengths.max()) if self.lengths.numel() else 0
        return Continuations(self.contexts.trimmed(), self.tokens[:, :, :width], self.lengths)

    def flat(self) -> Sequences:
        """Return the B·N continuations alone, context-major."""
        return Sequences(self.tokens.flatten(0, 1), self.lengths.flatten())

    def joined(self) -> Sequences:
        """Return the B·N whole strings, context then continuation with no gap, padded on the right."""
        (B, N), P, L = self.shape, self.contexts.tokens.shape[1], self.tokens.shape[2]
        start = self.contexts.lengths.view(B, 1, 1)
        place = torch.arange(P + L, device=self.tokens.device).expand(B, N, P + L)
        both = torch.cat([self.contexts.tokens.unsqueeze(1).expand(B, N, P), self.tokens], dim=-1)
        source = torch.where(place < start, place, (place - start + P).clamp(max=P + L - 1))
        tokens = both.gather(-1, source).flatten(0, 1)
        lengths = (self.contexts.lengths.unsqueeze(1) + self.lengths).flatten()
        return Sequences(tokens * _mask(lengths, P + L), lengths)

    def to(self, device: torch.device | str) -> "Continuations":
        """Return the same strings on another device."""
        return Continuations(self.contexts.to(device), self.tokens.to(device), self.lengths.to(device))


@final
@dataclass(frozen=True, slots=True)
class Soft:
    """B contexts and N real-valued continuations of each, which gradients can reach.

    The embedding of place t is Σ_v p_t(v) · table[v]; p_t one-hot is the hard token. Each place holds D numbers: an
    embedding, probabilities over the vocabulary, or logits whose softmax is taken.

    >>> x = Continuations.from_lists([[1]], [[[2, 0], [3]]])
    >>> Soft.one_hot(x, vocab_size=4).values[0, 0].tolist()
    [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    """

    contexts: Sequences
    values: Float[Tensor, "batch num length D"]
    lengths: Int[Tensor, "batch num"]
    form: Literal["probabilities", "logits", "embeddings"] = "probabilities"

    @classmethod
    def one_hot(cls, x: Continuations, vocab_size: int, dtype: torch.dtype = torch.float32) -> "Soft":
        """Returns hard tokens as probabilities of 0 and 1."""
        return cls(x.contexts, torch.nn.functional.one_hot(x.tokens, vocab_size).to(dtype), x.lengths)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, N), the shape of everything that is computed from this."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def mask(self) -> Bool[Tensor, "batch num length"]:
        """True at real places of the continuations."""
        return _mask(self.lengths, self.values.shape[2])

    def embedded(self, table: Float[Tensor, "V H"]) -> Float[Tensor, "batch num length H"]:
        """Returns the embedding of each place, by a network's table of embeddings."""
        wanted = table.shape[1] if self.form == "embeddings" else table.shape[0]
        if self.values.shape[-1] != wanted:
            raise UserError(
                f"soft tokens have {self.values.shape[-1]} numbers per place, but as {self.form} this network reads "
                f"{wanted}: give its own vocabulary, or embeddings of its width"
            )
        if self.form == "embeddings":
            return self.values
        probabilities = self.values.softmax(-1) if self.form == "logits" else self.values
        return probabilities.to(table.dtype) @ table

    def to(self, device: torch.device | str) -> "Soft":
        """The same on another device."""
        moved = self.values.to(device), self.lengths.to(device)
        return replace(self, contexts=self.contexts.to(device), values=moved[0], lengths=moved[1])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpace:
    """The set of continuations that Z sums over.

    With ``eos=None``: all strings of exactly ``length`` tokens (the paper's setting). With ``eos``: all strings that
    end with EOS within ``length`` tokens, and those of ``length`` tokens that were cut before EOS came. In both no
    string is a prefix of another, and a language model's probabilities over the set sum to one.
    """

    vocab_size: int
    length: int
    eos: int | None = None

    def __post_init__(self) -> None:
        check_range(self, "length", at_least=1, at_most=_LONGEST, hint=" tokens")

    @property
    def size(self) -> int:
        """How many strings there are."""
        V, L = self.vocab_size, self.length
        return int(V**L if self.eos is None else sum((V - 1) ** t for t in range(L + 1)))

    def enumerate(self) -> Sequences:
        """Return every string of the space, shortest first.

        >>> len(SequenceSpace(vocab_size=3, length=3, eos=0).enumerate())
        15
        """
        if self.size > _MOST_STRINGS:
            raise UserError(f"the space has {self.size:.2e} strings, too many to enumerate: lower length or vocab_size")
        V, L = range(self.vocab_size), self.length
        if self.eos is None:
            return Sequences.from_lists(list(product(V, repeat=L)))
        inner = [token for token in V if token != self.eos]
        ended = [(*x, self.eos) for n in range(L) for x in product(inner, repeat=n)]
        return Sequences.from_lists(ended + list(product(inner, repeat=L)))

    def lengths(self, tokens: Int[Tensor, "*rows length"]) -> Int[Tensor, "*rows"]:
        """Return where each row of ``length`` drawn tokens stops: after its first EOS, or at the end."""
        if self.eos is None:
            return torch.full(tokens.shape[:-1], tokens.shape[-1], device=tokens.device)
        running = (tokens == self.eos).cumsum(-1).eq(0).sum(-1)
        return (running + 1).clamp(max=tokens.shape[-1])
