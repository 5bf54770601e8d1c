"""What training a neural tagger makes small, in nats or errors per word of a batch.

likelihood   − log p(y | x);  of partial labels − log Σ_{y agrees} p(y | x);  of a transducer the beam's bound
nce          tell y from draws of q(y | x) = Π_t softmax(v_t)(y_t), with log-score u(y) and log-noise log q(y);  and q's
own − log q(y), so that the noise follows the data
risk         Σ_{y' ∈ k best} p̃(y') cost(y', y),   p̃ ∝ exp u among the k best;  and likelihood, weighted
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.roles import Loss, Scores
from freenergy.objectives import BinaryNCE, RankingNCE
from freenergy.tagging.laws import TagLaw, mask_of
from freenergy.tagging.network import TaggerNetwork
from freenergy.tagging.reading import Labels, Words
from freenergy.tagging.settings import ContrastiveLoss, MinimumRisk
from freenergy.tagging.spans import spans_of
from freenergy.tagging.transducers import HistoryLaw

_INF = float("inf")


def batch_loss(network: TaggerNetwork, words: Words, labels: Labels, names: Sequence[str], rng: Rng) -> Loss:
    """Returns the loss of a batch, per word."""
    settings = network.settings
    h, lengths = network.states(words)
    law, total = network.head(h, lengths), int(lengths.sum())
    device = h.device
    y = labels.y.to(device)
    match settings.loss:
        case ContrastiveLoss():
            _check_whole(labels)
            assert network.noise is not None, "the network of this loss has it"
            return _contrastive(law, network.noise(h.detach()), y, lengths, settings.loss, rng)
        case MinimumRisk():
            _check_whole(labels)
            nats = negative_log_prob(law, labels, settings.early_update).sum() / total
            risk = expected_cost(law, y, lengths, settings.loss, names) / total
            return Loss(risk + settings.loss.likelihood * nats, {"risk": risk.item(), "nats": nats.item()})
        case _:
            return Loss(negative_log_prob(law, labels, settings.early_update).sum() / total, {})


def negative_log_prob(law: TagLaw, labels: Labels, early_update: bool) -> Float[Tensor, " B"]:
    """Returns − log p of each sentence's labels."""
    if isinstance(law, HistoryLaw) and labels.sets is None:
        return law.loss(labels.y.to(law.f.device), early_update=early_update)
    if labels.sets is None:
        return -law.log_prob(labels.y)
    return -law.partial_log_prob(labels.sets)


def _check_whole(labels: Labels) -> None:
    if labels.sets is not None:
        raise UserError('this loss needs a tag for every word: set tagger.loss.kind = "likelihood" for partial labels')


def _contrastive(
    law: TagLaw, v: Float[Tensor, "B T K"], y: Int[Tensor, "B T"], lengths: Int[Tensor, " B"],
    settings: ContrastiveLoss, rng: Rng,
) -> Loss:  # fmt: skip
    log_q = v.log_softmax(2)
    mask = mask_of(lengths, y.shape[1])
    drawn = rng.categorical(log_q.detach().unsqueeze(1).expand(-1, settings.negatives, -1, -1))
    every = torch.cat([y.clamp(min=0).unsqueeze(1), drawn], 1)  # [B, 1 + negatives, T]
    log_noise = (
        log_q.unsqueeze(1).expand(-1, every.shape[1], -1, -1).gather(3, every.unsqueeze(3)).squeeze(3)
        * mask.unsqueeze(1)
    ).sum(2)
    score, noise = law.log_score(every), log_noise.detach()
    objective = RankingNCE() if settings.objective == "ranking" else BinaryNCE(kind="conditional")
    found = objective(Scores(score[:, :1], noise[:, :1]), Scores(score[:, 1:], noise[:, 1:]))
    total = lengths.sum()
    nats = -log_noise[:, 0].sum() / total
    value = found.value * len(y) / total + nats
    return Loss(value, {"accuracy": found.metrics["accuracy_data"], "noise_nats": nats.item()})


def expected_cost(
    law: TagLaw, y: Int[Tensor, "B T"], lengths: Int[Tensor, " B"], settings: MinimumRisk, names: Sequence[str]
) -> Float[Tensor, ""]:
    """Returns Σ over sentences of the expected cost over their k best taggings."""
    with torch.no_grad():
        best = law.top_k(settings.k)
    exists = best.log_score > -_INF
    labels = best.labels.clamp(min=0)
    p = torch.where(exists, law.log_score(labels), -_INF).softmax(1)
    mask = mask_of(lengths, y.shape[1])
    if settings.cost == "words":
        cost = ((labels != y.unsqueeze(1)) & mask.unsqueeze(1)).sum(2).to(p)
    else:
        cost = _span_costs(labels, y, lengths, names).to(p)
    return (p * cost).sum()


def _span_costs(
    labels: Int[Tensor, "B k T"], y: Int[Tensor, "B T"], lengths: Int[Tensor, " B"], names: Sequence[str]
) -> Float[Tensor, "B k"]:
    """Returns (1 − F1) · words of each tagging, so that a sentence counts by its length; 0 where neither has a span."""
    found = torch.zeros(labels.shape[:2])
    for row, length in enumerate(lengths.tolist()):
        true = set(spans_of([names[k] for k in y[row, :length].tolist()]))
        for n, own in enumerate(labels[row, :, :length].tolist()):
            spans = set(spans_of([names[k] for k in own]))
            either = len(true) + len(spans)
            found[row, n] = length * (1 - 2 * len(true & spans) / either) if either else 0.0
    return found
