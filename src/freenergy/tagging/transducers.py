"""Laws of tags that see all tags before: the aligned RNN transducer and the CRF transducer.

    f_t = W h_t + b  (transcription network, of words),      g_t = G(y_1, …, y_{t−1})  (prediction network, of tags)
    rnnt         p(y | x) = Π_t softmax(f_t + g_t)(y_t)
    transducer   p(y | x) = exp(u(y)) / Z,   u(y) = Σ_t s_t(y_t),   Z = Σ_{y'} exp(u(y'))
                 design 1: s_t = f_t + g_t;       design 2: s_t = log softmax f_t + log softmax g_t

No dynamic programme sums over all taggings. A beam of W taggings, together with the true one, gives

    log Ẑ = log Σ_{y ∈ beam} exp(u(y))  ≤  log Z,        with equality where W ≥ K^T

so u − log Ẑ is an upper bound of log p, and is called that (``is_exact`` is False). Early update: where the true prefix
falls out of the beam at word j, the loss is that of j words, −u(y*_1:j) + log Σ_{y ∈ B_j ∪ {y*}} exp(u(y_1:j)).

Legend: B sentences, T words, K tags, W taggings in a beam, R rows.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.structured import Allowed, Taggings
from freenergy.tagging.laws import mask_of

_INF = float("inf")
State = tuple[Tensor, Tensor]


@final
class PredictionNetwork(nn.Module):
    """g of a history of tags: an LSTM over all of them, or a table of the last one (tag K is the start)."""

    def __init__(self, history: str, width: int, num_tags: int) -> None:
        super().__init__()
        self.num_tags, self.width = num_tags, width
        self.table = nn.Embedding(num_tags + 1, num_tags if history == "last" else width)
        self.cell = nn.LSTM(width, width, batch_first=True) if history != "last" else None
        self.out = nn.Linear(width, num_tags) if history != "last" else None
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, y: Int[Tensor, "R T"]) -> Float[Tensor, "R T K"]:
        """Returns g at every place of some taggings."""
        start = torch.full_like(y[:, :1], self.num_tags)
        found: Tensor = self.table(torch.cat([start, y[:, :-1]], 1))
        if self.cell is not None and self.out is not None:
            found = self.out(self.cell(found)[0])
        return found

    def init(self, rows: int, like: Tensor) -> State:
        """Returns the state before any tag."""
        blank = like.new_zeros(1, rows, self.width)
        return blank, blank

    def step(self, last: Int[Tensor, " R"], state: State) -> tuple[Float[Tensor, "R K"], State]:
        """Returns g after one more tag, and the next state."""
        found: Tensor = self.table(last.unsqueeze(1))
        if self.cell is not None and self.out is not None:
            found, state = self.cell(found, state)
            found = self.out(found)
        return found.squeeze(1), state


class Beam(NamedTuple):
    """The best taggings that search has found, best first; those that do not exist have the score −inf.

    Where the true prefix has left the beam, these are the prefixes of that moment.
    """

    labels: Int[Tensor, "B W T"]
    score: Float[Tensor, "B W"]
    fell_at: Int[Tensor, " B"]  # how many words were read when the true prefix left the beam; all of them if it did not


@final
@dataclass(frozen=True, slots=True)
class HistoryLaw:
    """The law of tags of a batch of sentences given f."""

    f: Float[Tensor, "B T K"]
    lengths: Int[Tensor, " B"]
    g: PredictionNetwork
    is_exact: bool  # normalised word by word, so that scores are log-probabilities
    design: int
    width: int
    allowed: Allowed | None = None  # what search may find, and so what a transducer's beam sums over

    def _steps(self, f: Tensor, g: Tensor) -> Tensor:
        """Returns s_t(k)."""
        if self.is_exact:
            return (f + g).log_softmax(-1)
        return f + g if self.design == 1 else f.log_softmax(-1) + g.log_softmax(-1)

    def log_score(self, y: Int[Tensor, "B num T"], lengths: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B num"]:
        """Returns u of some taggings, or of their first ``lengths`` words."""
        B, num, T = y.shape
        y = y.clamp(min=0)
        g = self.g(y.reshape(B * num, T)).view(B, num, T, -1)
        chosen = self._steps(self.f.unsqueeze(1), g).gather(3, y.unsqueeze(3)).squeeze(3)
        return (chosen * mask_of(self.lengths if lengths is None else lengths, T).unsqueeze(1)).sum(2)

    def log_prob(self, y: Int[Tensor, "B T"]) -> Float[Tensor, " B"]:
        """Returns log p(y | x), or its upper bound u − log Ẑ with y itself among the taggings of Ẑ."""
        u = self.log_score(y.unsqueeze(1)).squeeze(1)
        return u if self.is_exact else u - self._log_sum(y, self.search(), self.lengths)

    def loss(self, y: Int[Tensor, "B T"], *, early_update: bool) -> Float[Tensor, " B"]:
        """Returns what training makes small: − log p(y | x), or its bound, of the words up to an early update."""
        if self.is_exact:
            return -self.log_prob(y)
        beam = self.search(y if early_update else None)
        return self._log_sum(y, beam, beam.fell_at) - self.log_score(y.unsqueeze(1), beam.fell_at).squeeze(1)

    def log_partition_bound(self) -> Float[Tensor, " B"]:
        """Returns log Ẑ ≤ log Z."""
        beam = self.search()
        return self._scored(beam.labels, beam.score, self.lengths).logsumexp(1)

    def partial_log_prob(self, labels: Bool[Tensor, "B T K"]) -> Float[Tensor, " B"]:
        """Refuses: the taggings that agree with partial labels cannot be summed."""
        raise UserError('partial labels need an exact sum over taggings: set tagger.law = "crf", or label every word')

    def argmax(self) -> Taggings:
        """Returns the best tagging that the beam has found."""
        best = self.top_k(1)
        return Taggings(best.labels[:, 0], best.log_score[:, 0])

    def top_k(self, k: int) -> Taggings:
        """Returns the k best taggings of the beam, which is widened to k."""
        beam = self.search(width=max(k, self.width))
        return Taggings(beam.labels[:, :k], self._scored(beam.labels, beam.score, self.lengths)[:, :k])

    def marginals(self, num: int = 64) -> Float[Tensor, "B T K"]:
        """Returns estimates of p(y_t = k | x): shares of ``num`` draws (rnnt), or of the beam's probability."""
        K = self.f.shape[2]
        if self.is_exact:
            y = self.sample(num, Rng(0).child("marginals"))
            weight = torch.full(y.shape[:2], 1 / num, dtype=self.f.dtype, device=y.device)
        else:
            beam = self.search(width=max(num, self.width))
            y, weight = beam.labels, beam.score.softmax(1)
        found = torch.nn.functional.one_hot(y.clamp(min=0), K) * (weight[:, :, None] * (y >= 0).to(weight))[..., None]
        return found.sum(1)

    @torch.no_grad()
    def sample(self, num: int, rng: Rng) -> Int[Tensor, "B num T"]:
        """Draws taggings word by word; of a transducer it draws from its beam, by probability."""
        B, T, K = self.f.shape
        if not self.is_exact:
            beam = self.search(width=max(num, self.width))
            chosen = rng.categorical(beam.score.unsqueeze(1).expand(-1, num, -1))
            return beam.labels.gather(1, chosen.unsqueeze(2).expand(-1, -1, T))
        rows = rng.rows(B, num, T)
        state, last = self.g.init(B * num, self.f), torch.full((B * num,), K, device=self.f.device)
        found = torch.full((B, num, T), -1, dtype=torch.long, device=self.f.device)
        for t in range(T):
            g, state = self.g.step(last, state)
            drawn = rows.categorical(self._steps(self.f[:, t].unsqueeze(1), g.view(B, num, K)))
            found[:, :, t] = torch.where((t < self.lengths).unsqueeze(1), drawn, -1)
            last = drawn.reshape(-1)
        return found

    @torch.no_grad()
    def search(self, gold: Int[Tensor, "B T"] | None = None, width: int | None = None) -> Beam:
        """Returns the beam; with ``gold`` it notes for each sentence when the true prefix has left it."""
        B, T, K = self.f.shape
        W = min(width or self.width, K**T) if T < 20 else width or self.width
        device = self.f.device
        score = torch.full((B, W), -_INF, dtype=self.f.dtype, device=device)
        score[:, 0] = 0
        labels = torch.full((B, W, T), -1, dtype=torch.long, device=device)
        is_gold = torch.zeros(B, W, dtype=torch.bool, device=device)
        is_gold[:, 0] = gold is not None
        fell_at, rows = self.lengths.clone(), torch.arange(B, device=device).unsqueeze(1)
        state, last = self.g.init(B * W, self.f), torch.full((B * W,), K, device=device)
        kept, kept_score = labels, score
        for t in range(T):
            g, state = self.g.step(last, state)
            more = self._steps(self.f[:, t].unsqueeze(1), g.view(B, W, K))
            if self.allowed is not None:
                more = more.masked_fill(~self._follows(self.allowed, last.view(B, W), t), -_INF)
            best, place = (score.unsqueeze(2) + more).flatten(1).topk(W, dim=1)
            runs = (t < self.lengths).unsqueeze(1)
            source = torch.where(runs, place // K, torch.arange(W, device=device))
            tag = torch.where(runs, place % K, -1)
            score = torch.where(runs, best, score)
            labels = labels[rows, source]
            labels[:, :, t] = tag
            flat = (rows * W + source).flatten()
            state = state[0][:, flat], state[1][:, flat]
            last = tag.clamp(min=0).flatten()
            if gold is not None:
                held = is_gold.any(1)
                is_gold = is_gold[rows, source] & (~runs | (tag == gold[:, t : t + 1])) & (score > -_INF)
                falls = held & ~is_gold.any(1)
                fell_at = torch.where(falls, t + 1, fell_at)
                kept = torch.where(falls[:, None, None], labels, kept)
                kept_score = torch.where(falls[:, None], score, kept_score)
        stays = (is_gold.any(1) if gold is not None else torch.ones_like(fell_at, dtype=torch.bool)).unsqueeze(1)
        return Beam(torch.where(stays.unsqueeze(2), labels, kept), torch.where(stays, score, kept_score), fell_at)

    def _follows(self, allowed: Allowed, last: Int[Tensor, "B W"], t: int) -> Bool[Tensor, "B W K"]:
        """Returns which tags the scheme allows at word t after these."""
        K, device = self.f.shape[2], self.f.device
        found = torch.ones(*last.shape, K, dtype=torch.bool, device=device)
        if t == 0 and allowed.start is not None:
            found = found & allowed.start.to(device)
        if t > 0 and allowed.pairs is not None:
            found = found & allowed.pairs.to(device)[last]
        if allowed.end is not None:
            found = found & (self.lengths.ne(t + 1)[:, None, None] | allowed.end.to(device))
        return found

    def _scored(self, labels: Tensor, score: Tensor, lengths: Tensor) -> Tensor:
        """Returns u of a beam's taggings, with gradients; −inf where there is none."""
        return torch.where(score > -_INF, self.log_score(labels, lengths), -_INF)

    def _log_sum(self, y: Int[Tensor, "B T"], beam: Beam, lengths: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Returns log Σ of exp u over the beam's prefixes and the true one, each prefix counted once."""
        T = y.shape[1]
        behind = ~mask_of(lengths, T).unsqueeze(1)
        prefixes = beam.labels.masked_fill(behind, -1)
        every = torch.cat([y.unsqueeze(1).masked_fill(behind, -1), prefixes], 1)  # [B, 1 + W, T]
        same = (every.unsqueeze(1) == every.unsqueeze(2)).all(3).tril(-1).any(2)  # an earlier row is the same prefix
        exists = torch.cat([torch.ones_like(same[:, :1]), beam.score > -_INF], 1) & ~same
        return torch.where(exists, self.log_score(every, lengths), -_INF).logsumexp(1)


@final
class TransducerHead(nn.Module):
    """States of words to a law that sees all tags before: rnnt or transducer."""

    def __init__(
        self, law: str, width: int, num_tags: int, *, design: int, history: str, label_width: int, beam: int,
        allowed: Allowed | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.law, self.design, self.beam, self.allowed = law, design, beam, allowed
        self.emit = nn.Linear(width, num_tags)
        self.predict = PredictionNetwork(history, label_width, num_tags)

    def forward(self, h: Float[Tensor, "B T H"], lengths: Int[Tensor, " B"]) -> HistoryLaw:
        """Returns the law of the tags of these sentences."""
        return HistoryLaw(self.emit(h), lengths, self.predict, self.law == "rnnt", self.design, self.beam, self.allowed)
