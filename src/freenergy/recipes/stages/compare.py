"""Runs of residual models as rows of a table: compared window by window, with an interval over documents.

    percent lower perplexity = 100 · (1 − exp(−Σ_w (log P_ours − log P_other)_w / Σ_w tokens_w))      log P certified
    … without our energy     = the same with the exact log P of our highest rung: what its CPU time buys without one

log P is summed over the chunks of a window where it was measured chunk by chunk.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from freenergy.core.errors import UserError
from freenergy.core.files import read_tensors
from freenergy.core.rng import Rng
from freenergy.evaluation.bootstrap import paired_bootstrap
from freenergy.evaluation.certified import ChunkRows
from freenergy.evaluation.perplexity import Measurement
from freenergy.lm.sources.settings import SamplesBase
from freenergy.partition import certified_gain
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.candidates import open_candidates
from freenergy.recipes.stages.chunks import open_corpus


def compare_rows(ours: Sequence[ResidualRun], others: Sequence[ResidualRun], rng: Rng) -> dict[str, Measurement]:
    """Returns by how much our perplexity is lower, where both sides have an energy and a base with probabilities.

    Where the rungs below our energy are other ones, they are compared with the other model too, without our energy:
    a base that was tuned for longer against an energy on one that was not.
    """
    if any(run.recipe.energy is None or isinstance(run.recipe.base, SamplesBase) for run in (*ours, *others)):
        return {}
    a, b = ([_scored(run) for run in side] for side in (ours, others))
    tokens, documents = a[0].tokens, a[0].documents
    if not all(np.array_equal(scored.tokens, tokens) for scored in (*a, *b)):
        raise UserError(
            f"{ours[0].folder} and {others[0].folder} were measured on other windows: give all rows the same corpus "
            "and evaluation, and the same seeds"
        )
    certified_a, certified_b, rung_a, rung_b = (
        np.mean([getattr(scored, name) for scored in side], axis=0) for name in ("certified", "rung") for side in (a, b)
    )
    found = {"percent lower perplexity": paired_bootstrap(certified_a, certified_b, tokens, documents, rng)}
    if not np.allclose(rung_a, rung_b, rtol=0, atol=1e-2):  # chunks and whole windows differ by rounding
        without = paired_bootstrap(rung_a, certified_b, tokens, documents, rng.child("without"))
        found["percent lower perplexity without our energy"] = without
    return found


class _Scored(NamedTuple):
    """The windows of a run: log P certified with the energy, and exact without it."""

    certified: np.ndarray
    rung: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray


def _scored(run: ResidualRun) -> _Scored:
    """Returns what the evaluation of a run has kept of its windows."""
    parts = [read_tensors(path) for path in sorted((run.stage("evaluation") / "scores").glob("*.safetensors"))]
    log_base, energy, lengths = (
        torch.cat([part[name] for part in parts]) for name in ("log_base", "energy", "lengths")
    )
    corpus = open_corpus(run)
    rows, windows = open_candidates(run, corpus).rows.numpy(), corpus.windows(run.recipe.evaluation.split)
    rung = log_base[:, 0].numpy()
    certified = rung + certified_gain(energy[:, 0], energy[:, 1:]).numpy()
    tokens, documents, chunks = lengths[:, 0].numpy(), windows.documents[rows], ChunkRows.of(windows, rows)
    if chunks is None:
        return _Scored(certified, rung, tokens, documents)
    certified, rung, tokens = (chunks.summed(values) for values in (certified, rung, tokens))
    return _Scored(certified, rung, tokens, documents[chunks.are_first])
