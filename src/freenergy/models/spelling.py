"""The log-linear model of spelling: words as strings of letters, with exact normalisers.

    U(x) = Σ_{t=1}^{l+1} Σ_{k=1}^{n} θ_k(x_{t−k+1} … x_t),        x_0 = x_{−1} = … = x_{l+1} = 0, the boundary
    Z_l = Σ_{x of l letters} e^{U(x)},        Z = Σ_{l=1}^{m} Z_l
    log p(x) = U(x) − log Z                   normaliser "global": one model of all lengths (GN-ELM, WSME)
    log p(x) = log π_l + U(x) − log Z_l       normaliser "length": trans-dimensional, with a law π of lengths (TRF)

θ_k are weights of letter k-grams, tied over positions; those that are not features are 0. The sums are exact at full
size by a transfer matrix over the last n − 1 letters (26³ states for 4-grams):

    α_0 = 1 at (0 … 0),    α_t(s_2 … s_n) = Σ_{s_1} α_{t−1}(s_1 … s_{n−1}) ψ(s_1 … s_n),    Z_l = Σ_s α_l(s) ψ(s, 0)

so likelihood, gradient, moments and draws of real words have no error but rounding: the oracle of every estimator.
Token 0 is the boundary and EOS, letters are 1 … A; a word is its letters followed by EOS.

Legend: A letters, n order, m longest word, S = (A+1)^(n−1) states, F features.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace

EOS = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Normaliser = Literal["global", "length"]
_MAX_CELLS = 2_000_000


@final
class SpellingModel(nn.Module):
    """p(word) ∝ exp(Σ weights of its letter n-grams), as a ``Model`` on ``space``; its sums are exact.

    >>> model = SpellingModel.of_words(["abba", "bab"], order=2, letters="ab")
    >>> round(model.log_prob(model.encode(["a", "b", "abba"])).exp().sum().item(), 3)  # 3 of 30 words of 1 … 4 letters
    0.1
    """

    weights: nn.Parameter
    features: Int[Tensor, " F"]
    log_lengths: Float[Tensor, " m"]

    def __init__(
        self,
        features: Sequence[Bool[Tensor, "..."]],
        *,
        letters: str = LETTERS,
        log_lengths: Float[Tensor, " m"],
        normaliser: Normaliser = "global",
    ) -> None:
        super().__init__()
        self.letters, self.order, self.normaliser = letters, len(features), normaliser
        self.max_length = len(log_lengths)
        A = len(letters) + 1
        if A**self.order > _MAX_CELLS:
            raise UserError(
                f"order {self.order} with {len(letters)} letters has {A**self.order:.1e} n-grams: lower the order"
            )
        if normaliser not in ("global", "length"):
            raise UserError(f"normaliser is {normaliser!r}: set it to 'global' or 'length'")
        # features are cells of the tables of all orders, laid end to end
        self.register_buffer("features", torch.cat([own.flatten() for own in features]).nonzero().flatten())
        self.register_buffer("log_lengths", log_lengths.double())
        self.weights = nn.Parameter(torch.zeros(len(self.features), dtype=torch.float64))

    @classmethod
    def of_words(
        cls,
        words: Iterable[str],
        *,
        order: int = 4,
        min_count: int = 1,
        letters: str = LETTERS,
        max_length: int | None = None,
        normaliser: Normaliser = "global",
    ) -> "SpellingModel":
        """Make the model of all letter n-grams seen ``min_count`` times in the words; its weights are 0.

        π is the law of the words' lengths, with half a word added per length.
        """
        if order < 1:
            raise UserError(f"order is {order}: set it to 1 or more")
        known = list(words)
        longest = max_length or max(map(len, known), default=0)
        x = encode_words(known, letters, longest)
        masks = [count_cells(x, k, len(letters) + 1) >= max(1, min_count) for k in range(1, order + 1)]
        counts = torch.bincount(x.lengths[0] - 1, minlength=longest + 1)[1:].double() + 0.5
        return cls(masks, letters=letters, log_lengths=(counts / counts.sum()).log(), normaliser=normaliser)

    @property
    def space(self) -> SequenceSpace:
        """Words of 1 … m letters and EOS; what is empty or cut has log_score −inf."""
        return SequenceSpace(vocab_size=len(self.letters) + 1, length=self.max_length + 1, eos=EOS)

    def encode(self, words: Sequence[str]) -> Continuations:
        """Return words as continuations [1, N] of the start of a document."""
        return encode_words(words, self.letters, self.max_length)

    def decode(self, x: Continuations) -> list[str]:
        """Return the words of the first context."""
        return ["".join(self.letters[token - 1] for token in word if token != EOS) for word in x.lists()[0]]

    def tables(self) -> list[Float[Tensor, "..."]]:
        """Return θ_1 … θ_n, each with one number per k-gram."""
        A, n = len(self.letters) + 1, self.order
        sizes = [A**k for k in range(1, n + 1)]
        flat = torch.zeros(sum(sizes), dtype=self.weights.dtype, device=self.weights.device)
        flat = flat.index_put((self.features,), self.weights)
        return [own.view((A,) * k) for k, own in enumerate(flat.split(sizes), 1)]

    def log_potentials(self) -> Float[Tensor, "..."]:
        """Return log ψ(s_1 … s_n), one number per n-gram: the weights of it and of its endings."""
        total = self.tables()[0]
        for table in self.tables()[1:]:
            total = table + total  # broadcasts over what stands before
        return total

    def log_score(self, x: Continuations) -> Float[Tensor, "B N"]:
        """U(x), with gradients; −inf where x is not a word of 1 … m letters."""
        (B, N), A, n = x.shape, len(self.letters) + 1, self.order
        tokens = torch.nn.functional.pad(x.tokens.masked_fill(~x.mask, EOS), (n - 1, 0))
        index = torch.zeros_like(x.tokens)
        for k in range(n):
            index = index * A + tokens[:, :, k : k + x.tokens.shape[2]]
        U = torch.where(x.mask, self.log_potentials().flatten()[index], 0.0).sum(-1)
        last = x.tokens.gather(2, (x.lengths - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
        inner = ((x.tokens == EOS) & x.mask).sum(-1) == 1
        is_word = (last == EOS) & inner & (x.lengths > 1) & (x.lengths <= self.max_length + 1)
        return torch.where(is_word, U, -torch.inf).view(B, N)

    def log_partitions(self) -> Float[Tensor, " m"]:
        """log Z_1 … log Z_m, exact, with gradients: d log Z_l / dθ_k is the expected count at length l."""
        A = len(self.letters) + 1
        log_psi = self._transfer()
        scale = log_psi.detach().max()
        psi = (log_psi - scale).exp()
        inner = psi * (torch.arange(A, device=psi.device) != EOS)  # a word goes on with a letter
        blocks = inner.view(A, -1, A).transpose(0, 1).contiguous()  # [all but first and last, first, last]
        alpha = torch.nn.functional.one_hot(torch.zeros((), dtype=torch.long), len(psi)).to(psi)
        log_z, log_scale = [], torch.zeros((), dtype=psi.dtype, device=psi.device)
        for _ in range(self.max_length):
            alpha = torch.bmm(alpha.view(A, -1).T.unsqueeze(1), blocks).flatten()
            total = alpha.sum()
            alpha, log_scale = alpha / total, log_scale + total.log() + scale
            log_z.append((alpha @ psi[:, EOS]).log() + log_scale + scale)
        return torch.stack(log_z)

    def _transfer(self) -> Float[Tensor, "S A"]:
        """Return log ψ by state and next token; a model of single letters gets a state all the same."""
        A, log_psi = len(self.letters) + 1, self.log_potentials()
        return log_psi.reshape(-1, A) if self.order > 1 else log_psi.expand(A, A)

    @property
    def _memory(self) -> int:
        """Return how many tokens a state holds."""
        return max(1, self.order - 1)

    def log_partition(self) -> Float[Tensor, ""]:
        """log Z of all words of 1 … m letters."""
        return self.log_partitions().logsumexp(0)

    def log_prob_of_lengths(self) -> Float[Tensor, " m"]:
        """log P(length = l): Z_l / Z, or π where the normaliser is per length."""
        log_z = self.log_partitions()
        return self.log_lengths if self.normaliser == "length" else log_z - log_z.logsumexp(0)

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """log p(word), exact, with gradients; −inf where x is not a word of 1 … m letters."""
        log_z = self.log_partitions()
        shift = self.log_lengths - log_z if self.normaliser == "length" else -log_z.logsumexp(0).expand(len(log_z))
        place = (x.lengths - 2).clamp(min=0, max=self.max_length - 1)
        return self.log_score(x) + shift[place]

    def counts(self, x: Continuations) -> Float[Tensor, " F"]:
        """Return how often each feature occurs in all the words together."""
        cells = [count_cells(x, k, len(self.letters) + 1).flatten() for k in range(1, self.order + 1)]
        return torch.cat(cells)[self.features].double()

    def expected_counts(self) -> Float[Tensor, " F"]:
        """E_p of the count of each feature: the gradient of log Z, or of Σ_l π_l log Z_l."""
        log_z = self.log_partitions()
        value = (self.log_lengths.exp() * log_z).sum() if self.normaliser == "length" else log_z.logsumexp(0)
        return torch.autograd.grad(value, self.weights)[0]

    @torch.no_grad()
    def sample(self, num: int, rng: Rng) -> Continuations:
        """Draw words exactly: the length first, then each letter given what may follow it."""
        if num < 1:
            raise UserError(f"{num} words were asked for: ask for at least one")
        A, rows = len(self.letters) + 1, rng.rows(1, num, self.max_length + 1)
        psi, ahead = self._ahead()
        lengths = rows.categorical(self.log_prob_of_lengths().expand(1, num, -1))[0] + 1
        state = torch.zeros(num, dtype=torch.long)
        tokens = torch.zeros(num, self.max_length + 1, dtype=torch.long)
        for t in range(self.max_length):
            left = (lengths - t).clamp(min=0)  # letters still to come
            after = (state.unsqueeze(1) * A + torch.arange(A)) % A**self._memory
            mass = psi[state] + ahead[(left - 1).clamp(min=0).unsqueeze(1), after]
            is_end = (torch.arange(A) == EOS).expand_as(mass)
            mass = mass.masked_fill(is_end, -torch.inf).masked_fill((left == 0).unsqueeze(1), 0.0)
            mass = mass.masked_fill((left == 0).unsqueeze(1) & ~is_end, -torch.inf)  # a word that is whole stays so
            token = rows.categorical(mass.unsqueeze(0))[0]
            tokens[:, t], state = token, after.gather(1, token.unsqueeze(1)).squeeze(1)
        return Continuations(Sequences.from_lists([[]]), tokens.unsqueeze(0), (lengths + 1).unsqueeze(0))

    def _ahead(self) -> tuple[Float[Tensor, "S A"], Float[Tensor, "m S"]]:
        """Return log ψ, and the log-sum over all endings of 0 … m − 1 letters after each state."""
        A = len(self.letters) + 1
        psi = self._transfer()
        inner, ahead = psi.clone(), [psi[:, EOS]]
        inner[:, EOS] = -torch.inf
        after = torch.arange(psi.numel(), device=psi.device).view(-1, A) % A**self._memory
        for _ in range(self.max_length - 1):
            ahead.append((inner + ahead[-1][after]).logsumexp(1))
        return psi, torch.stack(ahead)


def encode_words(words: Sequence[str], letters: str, max_length: int) -> Continuations:
    """Return words as tokens, each followed by EOS: continuations [1, N] of the start of a document."""
    index = {letter: i for i, letter in enumerate(letters, 1)}
    if not words:
        raise UserError("there are no words: give at least one")
    for word in words:
        if not 1 <= len(word) <= max_length:
            raise UserError(f"the word {word!r} has {len(word)} letters: the model is of 1 to {max_length}")
        if not set(word) <= set(letters):
            strange = sorted(set(word) - set(letters))[0]
            raise UserError(f"the word {word!r} has the letter {strange!r}, not one of {letters!r}: leave it out")
    return Continuations.from_lists([[]], [[[*(index[letter] for letter in word), EOS] for word in words]])


def count_cells(x: Continuations, k: int, A: int) -> Int[Tensor, "..."]:
    """Return how often each k-gram of 0 … A − 1 occurs; of those that begin in the boundary only the shortest count."""
    tokens = torch.nn.functional.pad(x.tokens.masked_fill(~x.mask, EOS), (k - 1, 0))
    index, L = torch.zeros_like(x.tokens), x.tokens.shape[2]
    for i in range(k):
        index = index * A + tokens[:, :, i : i + L]
    reaches = torch.arange(L) >= k - 2  # one boundary symbol before the word says all
    return torch.bincount(index[x.mask & reaches], minlength=A**k).view((A,) * k)
