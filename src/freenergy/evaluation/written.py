"""Whole texts that the models write after held-out prefixes, and how near to human text they are.

    x_k ~ resampling among n draws of m tokens given c x_1 … x_{k−1},       until L tokens or EOS

The candidates of an evaluation are chunks after the true text; a reader wants what a model writes after its own. Every
rung of the ladder writes one text per prefix. The energy writes three, each choosing among n candidates of every chunk
at equal cost: by weight (``energy``, the model), the lowest energy, and the likeliest. Each prefix is a file, so that
what was written before a crash is not written again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Integer

from freenergy.core.files import read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import LanguageModel, Model, Target
from freenergy.core.sequences import Continuations, Sequences
from freenergy.corpus import Corpus, Windows
from freenergy.evaluation.ladder import ENERGY
from freenergy.evaluation.text_distance import distances_to_human, mean_states
from freenergy.evaluation.text_statistics import (
    CountedText,
    nearer_to_human,
    shares_of_text,
    text_statistics,
    training_text,
)
from freenergy.lm.activations import TracingLM
from freenergy.lm.sample_only import has_log_prob
from freenergy.models.residual import Residual
from freenergy.samplers.best_of import BestOf
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sampled import Sampler

LOWEST, LIKELIEST = "lowest energy of n", "likeliest of n"
Written = dict[str, list[int]]  # tokens, by who wrote them


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Writers:
    """Who writes: the rungs below the energy, lowest first, and the residual model, m tokens at a time among n."""

    rungs: Mapping[str, LanguageModel]
    model: Residual
    chunk: int
    candidates: int

    @property
    def names(self) -> list[str]:
        """Whose texts there are, human text first."""
        return ["human", *self.rungs, *self._samplers]

    @property
    def _samplers(self) -> dict[str, Sampler]:
        """How the residual model writes; nobody knows the likeliest text of a base that only samples."""
        n = self.candidates
        found: dict[str, Sampler] = {ENERGY: Resampling(candidates=n), LOWEST: BestOf(candidates=n, by="energy")}
        if has_log_prob(self.model.base):
            found[LIKELIEST] = BestOf(candidates=n, by="likelihood")
        return found

    def write(self, x: Continuations, corpus: Corpus, rng: Rng) -> Written:
        """One text of each after the one prefix of ``x``."""
        found: Written = {"human": x.lists()[0][0]}
        for name, lm in self.rungs.items():
            found[name] = lm.sample(x.contexts, 1, corpus.space, rng.child(name)).x.lists()[0][0]
        target: Target[Model] = Target(self.model, x.contexts, corpus.space)
        for name, sampler in self._samplers.items():
            found[name] = write_in_chunks(target, self.chunk, sampler, rng.child(name))
        return found


def write_in_chunks(target: Target[Model], chunk: int, sampler: Sampler, rng: Rng) -> list[int]:
    """Write one text of the target's space, ``chunk`` tokens at a time; the last chunk may be shorter."""
    (context,), space, written = target.contexts.lists(), target.space, list[int]()
    while len(written) < space.length and (not written or written[-1] != space.eos):
        room = replace(space, length=min(chunk, space.length - len(written)))
        now = target.after(Sequences.from_lists([[*context, *written]])).within(room)
        written += sampler(now, 1, rng.child("chunk", len(written) // chunk)).x.lists()[0][0]
    return written


def written_path(folder: Path, row: int) -> Path:
    """Where the texts after the prefix of window ``row`` are kept."""
    return folder / "written" / f"{row:08d}.json"


def write_texts(writers: Writers, corpus: Corpus, windows: Windows, row: int, folder: Path, rng: Rng) -> None:
    """Write the texts after one prefix, unless that was done; ``windows`` are whole."""
    path = written_path(folder, row)
    if not path.is_file():
        write_json(path, writers.write(windows.continuations([row]), corpus, rng.child("written", row)))


def written_report(
    names: Sequence[str],
    windows: Windows,
    rows: Integer[np.ndarray, " W"],
    corpus: Corpus,
    lm: LanguageModel,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Statistics of what each has written, how much nearer to human text than the lowest rung, and the texts.

    ``names`` are those of ``Writers``: human text first, then the lowest rung. Distances are of states of ``lm``, where
    it shows them.
    """
    texts = [read_json(written_path(folder, row)) for row in rows.tolist()]
    x = windows.continuations(rows)
    counted = {name: _counted(x, [text[name] for text in texts], windows.documents[rows]) for name in names}
    shares = shares_of_text(counted, training_text(corpus), progress)
    distances: dict[str, Any] = {}
    if isinstance(lm, TracingLM):
        states = {name: mean_states(lm, counted[name].x) for name in names}
        distances = distances_to_human(states, names, windows.documents[rows])
    return {
        "names": list(names),
        "distances": distances,
        "statistics": text_statistics(counted, shares),
        "nearer": {name: nearer_to_human(shares, name, base=names[1]) for name in names[2:]},
        "texts": [_decoded(corpus, prefix, text) for prefix, text in zip(x.contexts.lists(), texts, strict=True)],
    }


def _counted(x: Continuations, texts: Sequence[list[int]], documents: Integer[np.ndarray, " W"]) -> CountedText:
    return CountedText(Continuations.from_lists(x.contexts.lists(), [[text] for text in texts]), documents)


def _decoded(corpus: Corpus, prefix: list[int], text: Written) -> dict[str, str]:
    decode = corpus.tokenizer.decode
    return {"prefix": decode(prefix), **{name: decode(tokens) for name, tokens in text.items()}}
