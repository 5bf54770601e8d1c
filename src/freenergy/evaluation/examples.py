"""Continuations to look at: human, of both models, and the draws that the energy likes most and least."""

from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel
from freenergy.core.scored import Scored
from freenergy.core.sequences import Continuations
from freenergy.corpus import Corpus, Windows
from freenergy.training.contrastive_batches import StoredContrast

_BATCH_SIZE = 1 << 15  # candidates in memory


@final
class Chooser:
    """Chooses the candidates that are ``base`` text (any draw) and ``joint`` text (by weight, as in Algorithm 1).

    Base draws of a window differ from one another; the others are chosen again each time among all draws. The streams
    continue from chunk to chunk, so that the chunks do not matter.
    """

    def __init__(self, versions: int, rng: Rng) -> None:
        self._base = rng.child("base")
        self._joint = [rng.child("joint", r) for r in range(versions)]

    def __call__(self, scores: Scored) -> dict[str, Int[Tensor, "W versions"]]:
        """Columns of ``base`` and ``joint`` text for the next W windows."""
        log_w, versions = scores.log_weight[:, 1:], len(self._joint)
        base = self._base.uniform(*log_w.shape).argsort(1)[:, :versions] + 1
        joint = torch.stack([stream.categorical(log_w) + 1 for stream in self._joint], dim=1)
        return {"base": base.clone(), "joint": joint}


def picked(contrast: StoredContrast, columns: Int[Tensor, "W R"]) -> Continuations:
    """Some candidates of every window, the true continuation being number 0."""
    parts, batch_size = [], max(1, _BATCH_SIZE // (1 + contrast.store.per_prefix))
    for chunk in torch.arange(len(contrast)).split(batch_size):
        x, rows = contrast.all(chunk), torch.arange(len(chunk)).unsqueeze(1)
        parts.append(Continuations(x.contexts, x.tokens[rows, columns[chunk]], x.lengths[rows, columns[chunk]]))
    return Continuations.cat(parts, dim=0)


def shown_window(
    scores: Scored, w: int, columns: dict[str, Int[Tensor, "W R"]], corpus: Corpus
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a ``sample`` and an ``example`` of the w-th of W windows.

    A sample is text of both models next to human text, an example the best, typical and worst draw by energy.
    """
    x = scores.x[w : w + 1]
    decode, texts = corpus.tokenizer.decode, x.lists()[0]
    prefix = decode(x.contexts.lists()[0])
    base, joint = (int(columns[name][w, 0]) for name in ("base", "joint"))
    shown = {"prefix": prefix, "human": decode(texts[0]), "base": decode(texts[base])}
    sample = {**shown, "joint": decode(texts[joint]), "log_base": scores.log_base[w, base].item()}
    order = scores.energy[w, 1:].argsort(stable=True) + 1
    places = {"human": 0, "best": int(order[0]), "typical": int(order[len(order) // 2]), "worst": int(order[-1])}
    example = {
        name: {"text": decode(texts[i]), "energy": scores.energy[w, i].item(), "log_base": scores.log_base[w, i].item()}
        for name, i in places.items()
    }
    return sample, {"prefix": prefix, **example}


def base_samples(
    lm: LanguageModel, corpus: Corpus, windows: Windows, num: int, rng: Rng, progress: Progress
) -> list[dict[str, Any]]:
    """One draw of the base for each of some prefixes, where there is no residual model."""
    chosen, decode = rng.child("samples").permutation(len(windows))[:num], corpus.tokenizer.decode
    found = []
    with progress.track("samples", len(chosen), "windows") as advance:
        for b, row in enumerate(chosen.tolist()):
            x = windows.continuations([row])
            draws = lm.sample(x.contexts, 1, corpus.space, rng.child("draws").shift(contexts=b))
            shown = {"prefix": decode(x.contexts.lists()[0]), "human": decode(x.lists()[0][0])}
            found.append({**shown, "base": decode(draws.x.lists()[0][0]), "log_base": draws.log_base[0, 0].item()})
            advance(1)
    return found
