"""Whole texts to look at, of a model that writes chunk by chunk.

    x_k ~ resampling among n draws of m tokens given c x_1 … x_{k−1},       until L tokens or EOS

The candidates of an evaluation are chunks after the true text; a reader wants what the model writes after its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.sequences import Sequences
from freenergy.corpus import Corpus, Windows
from freenergy.models.residual import Residual
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sampled import Sampler


def write_in_chunks(target: Target[Model], chunk: int, sampler: Sampler, rng: Rng) -> list[int]:
    """Write one text of the target's space, ``chunk`` tokens at a time; the last chunk may be shorter."""
    (context,), space, written = target.contexts.lists(), target.space, list[int]()
    while len(written) < space.length and (not written or written[-1] != space.eos):
        room = replace(space, length=min(chunk, space.length - len(written)))
        now = target.after(Sequences.from_lists([[*context, *written]])).within(room)
        written += sampler(now, 1, rng.child("chunk", len(written) // chunk)).x.lists()[0][0]
    return written


def written_samples(
    model: Residual,
    corpus: Corpus,
    windows: Windows,
    rows: Sequence[int],
    how: tuple[int, int],
    rng: Rng,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Write one text of base and model after each prefix; ``how`` is m and n. ``windows`` are whole."""
    (chunk, candidates), decode, space = how, corpus.tokenizer.decode, corpus.space
    found = []
    with progress.track("samples", len(rows), "windows") as advance:
        for b, row in enumerate(rows):
            x = windows.continuations([row])
            draws = model.base.sample(x.contexts, 1, space, rng.child("base").shift(contexts=b))
            target: Target[Model] = Target(model, x.contexts, space)
            written = write_in_chunks(target, chunk, Resampling(candidates=candidates), rng.child("joint", b))
            shown = {"prefix": decode(x.contexts.lists()[0]), "human": decode(x.lists()[0][0])}
            shown |= {"base": decode(draws.x.lists()[0][0]), "joint": decode(written)}
            found.append({**shown, "log_base": draws.log_base[0, 0].item()})
            advance(1)
    return found
