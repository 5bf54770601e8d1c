"""Random fields of word pairs and class pairs, with exact normalisers at full vocabulary.

    U(x) = Σ_{t=1}^{l+1} u(x_t) + λ(x_{t−1}, x_t) + κ(c(x_{t−1}), x_t),        x_0 = x_{l+1} = EOS
    α_{t+1}(j) = e^{u_j} [ Σ_c A_c e^{κ(c, j)} + Σ_{i: (i,j) a feature} α_t(i) g_ij ],        A_c = Σ_{i in c} α_t(i)
    g_ij = e^{κ(c(i), j)} (e^{λ_ij} − 1),        Z_l = what reaches EOS after l words

λ is 0 but for pairs that are features, so e^λ − 1 is sparse and a step costs O(C·V + pairs) and not V². All log Z_1 …
Z_m and the exact gradient of Σ_l n_l log Z_l come from one pass forward and one back:

    b_t = ∂/∂v_t,    v_t = Mᵀ α_t,    ∂/∂M_ij = Σ_t α_t(i) b_t(j)

A bigram Kneser-Ney model is a member: u_j = log p_1(j) + log γ(j), λ_ij = log p(j | i) − log γ(i) p_1(j); then Z_l is
its probability of l words. So the fit starts there, and not at zero, where it would be hopeless.

Legend: V words with EOS, C classes, P pairs, m longest sentence.
"""

from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from jaxtyping import Float64, Int64
from safetensors.numpy import load_file, save_file
from scipy.sparse import csr_matrix

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, corruption_as_user_error
from freenergy.core.rng import Rng
from freenergy.core.sentences import Sentences
from freenergy.lm.ngram import NgramLM
from freenergy.models.normalisers import PerLength

Vector = Float64[np.ndarray, " _"]
_KNOWN = 2000  # cumulative sums kept while drawing: 160 MB at 10,000 words


class PairWeights(NamedTuple):
    """u, λ and κ side by side, or their gradient."""

    words: Float64[np.ndarray, " V"]
    pairs: Float64[np.ndarray, " P"]
    classes: Float64[np.ndarray, "C V"]

    def flat(self) -> Vector:
        """Return all numbers in one vector."""
        return np.concatenate([self.words, self.pairs, self.classes.ravel()])


class _Pass(NamedTuple):
    """What one pass forward leaves: scaled α_t, the scales, and log Z_l."""

    alpha: Float64[np.ndarray, "steps V"]
    log_scale: Vector  # log of what α_t was divided by, in all
    log_z: Float64[np.ndarray, " m"]
    reached: Vector  # scaled Z_l


@final
class PairField:
    """A random field of pairs: features, weights, and sums without error.

    >>> lm = NgramLM.fit(np.array([1, 2, 0, 1, 1, 0]), vocab_size=3, eos=0, order=2)
    >>> field = PairField.from_ngram(lm, longest=50)
    >>> round(float(np.exp(field.log_z()).sum()), 6)  # the probability of 1 … 50 words
    0.816667
    """

    def __init__(
        self,
        pairs: Int64[np.ndarray, "P 2"],
        classes: Int64[np.ndarray, " V"],
        weights: PairWeights,
        *,
        eos: int,
        longest: int,
    ) -> None:
        V = len(classes)
        if longest < 1:
            raise UserError(f"longest is {longest}: sentences have one word or more")
        if len(weights.words) != V or len(weights.pairs) != len(pairs):
            raise UserError("weights and features of pairs do not match: give one number for each")
        order = np.lexsort((pairs[:, 0], pairs[:, 1]))
        self.pairs, self.classes, self.eos, self.longest, self.vocab_size = pairs[order], classes, eos, longest, V
        self.weights = weights._replace(pairs=weights.pairs[order])
        self.num_classes = int(classes.max(initial=0)) + 1
        self._keys = self.pairs[:, 1] * V + self.pairs[:, 0]  # ascending
        self._members = csr_matrix((np.ones(V), (classes, np.arange(V))), shape=(self.num_classes, V))

    def save(self, path: Path) -> None:
        """Write features and weights, completely or not at all."""
        arrays = dict(zip(PairWeights._fields, self.weights, strict=True))
        sizes = np.array([self.eos, self.longest])
        with atomic_write(path) as aside:
            save_file({"features": self.pairs, "class_of": self.classes, "sizes": sizes, **arrays}, aside)

    @classmethod
    def load(cls, path: Path) -> "PairField":
        """Read what ``save`` wrote."""
        with corruption_as_user_error(path, "fit the field again"):
            arrays = load_file(path)
            weights = PairWeights(*(arrays[name] for name in PairWeights._fields))
            eos, longest = map(int, arrays["sizes"])
            return cls(arrays["features"], arrays["class_of"], weights, eos=eos, longest=longest)

    @classmethod
    def from_ngram(cls, lm: NgramLM, *, longest: int, classes: Int64[np.ndarray, " V"] | None = None) -> "PairField":
        """Return the field that is a bigram model, with weights of classes that are 0."""
        if lm.order != 2:
            raise UserError(f"the model has order {lm.order}, and a field of pairs can be one of order 2: fit that one")
        V, table = lm.vocab_size, lm.tables[1]
        contexts = lm.counts.levels[0].keys.astype(np.int64)
        gamma = np.ones(V)
        gamma[contexts] = table.rest[: len(contexts)]
        i, j = contexts[table.keys // V], (table.keys % V).astype(np.int64)
        backed_off = gamma[i] * lm.p1[j]
        pairs = np.log1p(table.direct[:-1] / backed_off)
        found = np.zeros(V, dtype=np.int64) if classes is None else classes
        C = int(found.max(initial=0)) + 1
        weights = PairWeights(np.log(lm.p1) + np.log(gamma), pairs, np.zeros((C, V)))
        return cls(np.stack([i, j], 1), found, weights, eos=lm.eos, longest=longest)

    def with_weights(self, weights: PairWeights) -> "PairField":
        """Return the same features with other weights."""
        return PairField(self.pairs, self.classes, weights, eos=self.eos, longest=self.longest)

    def unflat(self, at: Vector) -> PairWeights:
        """Return the weights of one vector."""
        V, P = self.vocab_size, len(self.pairs)
        return PairWeights(at[:V], at[V : V + P], at[V + P :].reshape(self.num_classes, V))

    def potential(self, text: Sentences) -> Float64[np.ndarray, " R"]:
        """Return U of each sentence."""
        before, now = self._steps(text)
        found = self.weights.words[now] + self.weights.classes[self.classes[before], now]
        at = self._find(before, now)
        found = found + np.append(self.weights.pairs, 0.0)[at]
        return np.add.reduceat(found, text.bounds[:-1]) if text.num else np.zeros(0)

    def counts(self, text: Sentences) -> PairWeights:
        """Return how often each feature occurs in a text: the data's side of the gradient."""
        before, now = self._steps(text)
        V, C, at = self.vocab_size, self.num_classes, self._find(before, now)
        words = np.bincount(now, minlength=V).astype(np.float64)
        pairs = np.bincount(at[at >= 0], minlength=len(self.pairs)).astype(np.float64)
        classes = np.bincount(self.classes[before] * V + now, minlength=C * V).astype(np.float64)
        return PairWeights(words, pairs, classes.reshape(C, V))

    def log_z(self) -> Float64[np.ndarray, " m"]:
        """Return log Z_1 … log Z_m, exactly."""
        return self._forward(*self._matrices()).log_z

    def normaliser(self) -> PerLength:
        """Return the exact normaliser by length."""
        return PerLength(values=self.log_z(), is_exact=True)

    def expected(self, num: Float64[np.ndarray, " m"]) -> tuple[float, PairWeights]:
        """Return Σ_l n_l log Z_l and its gradient: the expected features of n_l sentences of each length."""
        K, G, e = self._matrices()
        done = self._forward(K, G, e)
        V, C = self.vocab_size, self.num_classes
        b = self._backward(K, G, e, done, num) * e  # of v_t before the weights of words
        alpha = done.alpha
        A = np.asarray(self._members @ alpha.T)  # [C, steps]
        dense = (A @ b) * K  # expected pairs of class and word, without what pairs add
        i, j = self.pairs[:, 0], self.pairs[:, 1]
        joint = np.zeros(len(self.pairs))
        for t in range(len(alpha)):  # P numbers at a time: all of them would be 82 times as many
            joint += alpha[t, i] * b[t, j]
        base = K[self.classes[i], j]
        pairs = joint * base * np.exp(self.weights.pairs)
        extra = np.bincount(self.classes[i] * V + j, pairs - joint * base, C * V).reshape(C, V)
        classes = dense + extra
        return float(num @ done.log_z), PairWeights(classes.sum(0), pairs, classes)

    def sample(self, lengths: Int64[np.ndarray, " n"], rng: Rng) -> Sentences:
        """Draw one sentence of each of these lengths, exactly: words from the last one back."""
        K, G, e = self._matrices()
        alpha = self._forward(K, G, e).alpha
        u = rng.uniform(len(lengths), self.longest).numpy()
        rows, known = [], dict[tuple[int, int], np.ndarray]()
        for row, length in enumerate(lengths):
            after, words = self.eos, list[int]()
            for t in range(int(length), 0, -1):
                if (mass := known.get((t, after))) is None:
                    mass = np.cumsum(alpha[t] * self._into(K, after))
                    if len(known) < _KNOWN:
                        known[t, after] = mass
                after = int(min(np.searchsorted(mass, u[row, t - 1] * mass[-1], side="right"), self.vocab_size - 1))
                words.append(after)
            rows.append([*words[::-1], self.eos])
        return Sentences.from_lists(rows)

    def _into(self, K: np.ndarray, after: int) -> Float64[np.ndarray, " V"]:
        """Return the column of M for one word, without its own weight."""
        into: Float64[np.ndarray, " V"] = K[self.classes, after].copy()
        span = slice(*np.searchsorted(self._keys, [after * self.vocab_size, (after + 1) * self.vocab_size]))
        into[self.pairs[span, 0]] *= np.exp(self.weights.pairs[span])
        return into

    def _steps(self, text: Sentences) -> tuple[Int64[np.ndarray, " T"], Int64[np.ndarray, " T"]]:
        """Return every token with the one before it; the first word stands after EOS."""
        now = text.tokens.astype(np.int64)
        before = np.concatenate([[self.eos], now[:-1]])
        return before, now

    def _find(self, before: np.ndarray, now: np.ndarray) -> Int64[np.ndarray, " T"]:
        asked = now * self.vocab_size + before
        at = np.minimum(np.searchsorted(self._keys, asked), max(len(self._keys) - 1, 0))
        found: Int64[np.ndarray, " T"] = np.where(self._keys[at] == asked, at, -1) if len(self._keys) else at * 0 - 1
        return found

    def _matrices(self) -> tuple[Float64[np.ndarray, "C V"], csr_matrix, Float64[np.ndarray, " V"]]:
        """Return e^κ, the sparse part of M turned, and e^u."""
        K = np.exp(self.weights.classes)
        i, j, V = self.pairs[:, 0], self.pairs[:, 1], self.vocab_size
        g = K[self.classes[i], j] * np.expm1(self.weights.pairs)
        return K, csr_matrix((g, (j, i)), shape=(V, V)), np.exp(self.weights.words)

    def _forward(self, K: np.ndarray, G: csr_matrix, e: np.ndarray) -> _Pass:
        alpha = np.zeros((self.longest + 1, self.vocab_size))
        alpha[0, self.eos] = 1.0
        log_scale, reached = np.zeros(self.longest + 1), np.zeros(self.longest + 1)
        for t in range(self.longest + 1):
            v = e * ((self._members @ alpha[t]) @ K + G @ alpha[t])
            reached[t] = v[self.eos]
            if t < self.longest:
                v[self.eos] = 0.0
                scale = v.sum()
                if not 0 < scale < np.inf:
                    raise UserError("the sums of the field overflow: fit with a stronger penalty")
                alpha[t + 1] = v / scale
                log_scale[t + 1] = log_scale[t] + np.log(scale)
        return _Pass(alpha, log_scale, np.log(reached[1:]) + log_scale[1:], reached)

    def _backward(
        self, K: np.ndarray, G: csr_matrix, e: np.ndarray, done: _Pass, num: Vector
    ) -> Float64[np.ndarray, "steps V"]:
        """Return ∂ Σ n_l log Z_l / ∂ v_t, in the scales of α_t."""
        b, turned = np.zeros_like(done.alpha), G.T.tocsr()
        after = np.zeros(self.vocab_size)
        for t in range(self.longest, -1, -1):
            b[t] = after * np.exp(done.log_scale[t] - done.log_scale[t + 1]) if t < self.longest else 0.0
            b[t, self.eos] = num[t - 1] / done.reached[t] if t else 0.0
            weighted = e * b[t]
            after = (K @ weighted)[self.classes] + turned @ weighted
        return b
