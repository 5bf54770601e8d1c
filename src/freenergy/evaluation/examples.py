"""Continuations to look at: human, the base's, the joint's, and the draws that the energy likes most and least."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from freenergy.corpus import Corpus, Windows
from freenergy.evaluation.scores import WindowScores
from freenergy.progress import Progress
from freenergy.protocols import LanguageModel
from freenergy.randomness import Rng
from freenergy.sequences import Continuations
from freenergy.training.contrast import StoredContrast

_AT_ONCE = 32  # windows


def choose_texts(scores: WindowScores, versions: int, rng: Rng) -> dict[str, Int[Tensor, "W versions"]]:
    """Which candidates of each window are base text (any draw) and joint text (by weight: Algorithm 1 of the paper).

    Base draws of a window differ from one another; the joint's are chosen anew each time among all draws.
    """
    W, N = len(scores.counts), scores.draws
    base = rng.child("base").uniform(W, N).argsort(1)[:, :versions] + 1
    log_w = scores.log_weight[:, 1:]
    joint = torch.stack([rng.child("joint", r).categorical(log_w) + 1 for r in range(versions)], dim=1)
    return {"base": base, "joint": joint}


def picked(contrast: StoredContrast, columns: Int[Tensor, "W R"]) -> Continuations:
    """Some candidates of every window, the true continuation being number 0."""
    parts = []
    for chunk in torch.arange(len(contrast)).split(_AT_ONCE):
        x, rows = contrast.all(chunk), torch.arange(len(chunk)).unsqueeze(1)
        parts.append(Continuations(x.contexts, x.tokens[rows, columns[chunk]], x.lengths[rows, columns[chunk]]))
    return Continuations.cat(parts, dim=0)


def shown_windows(
    contrast: StoredContrast, scores: WindowScores, columns: dict[str, Int[Tensor, "W R"]], corpus: Corpus, num: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``samples`` (base and joint text beside human text) and ``examples`` (best, typical and worst draw by energy)."""
    decode, samples, examples = corpus.tokenizer.decode, [], []
    for w in range(min(num, len(contrast))):
        x = contrast.all(torch.tensor([w]))
        texts, prefix = x.lists()[0], decode(x.contexts.lists()[0])
        base, joint = (int(columns[name][w, 0]) for name in ("base", "joint"))
        shown = {"prefix": prefix, "human": decode(texts[0]), "base": decode(texts[base])}
        samples.append({**shown, "joint": decode(texts[joint]), "log_base": scores.log_base[w, base].item()})
        order = scores.energy[w, 1:].argsort(stable=True) + 1
        places = {"human": 0, "best": int(order[0]), "typical": int(order[len(order) // 2]), "worst": int(order[-1])}
        told = {name: _told(scores, w, i, decode(texts[i])) for name, i in places.items()}
        examples.append({"prefix": prefix, **told})
    return samples, examples


def _told(scores: WindowScores, w: int, i: int, text: str) -> dict[str, Any]:
    return {"text": text, "energy": scores.energy[w, i].item(), "log_base": scores.log_base[w, i].item()}


def base_samples(
    lm: LanguageModel, corpus: Corpus, windows: Windows, num: int, rng: Rng, progress: Progress
) -> list[dict[str, Any]]:
    """One draw of the base for each of some prefixes, where there is no joint model."""
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
