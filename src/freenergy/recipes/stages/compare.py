"""Runs of residual models as rows of a table: compared window by window, with an interval over documents.

    percent lower perplexity = 100 · (1 − exp(−Σ_w (log P_ours − log P_other)_w / Σ_w tokens_w))      log P certified

log P is summed over the chunks of a window where it was measured chunk by chunk.
"""

from collections.abc import Sequence

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
    """Returns by how much our perplexity is lower, where both sides have an energy and a base with probabilities."""
    if any(run.recipe.energy is None or isinstance(run.recipe.base, SamplesBase) for run in (*ours, *others)):
        return {}
    a, b = ([_scored(run) for run in side] for side in (ours, others))
    _, tokens, documents = a[0]
    if not all(np.array_equal(of_run, tokens) for _, of_run, _ in (*a, *b)):
        raise UserError(
            f"{ours[0].folder} and {others[0].folder} were measured on other windows: give all rows the same corpus "
            "and evaluation, and the same seeds"
        )
    log_a, log_b = (np.mean([log_prob for log_prob, _, _ in side], axis=0) for side in (a, b))
    return {"percent lower perplexity": paired_bootstrap(log_a, log_b, tokens, documents, rng)}


def _scored(run: ResidualRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the certified log-probabilities of a run's windows, their tokens and their documents."""
    parts = [read_tensors(path) for path in sorted((run.stage("evaluation") / "scores").glob("*.safetensors"))]
    log_base, energy, lengths = (
        torch.cat([part[name] for part in parts]) for name in ("log_base", "energy", "lengths")
    )
    corpus = open_corpus(run)
    rows, windows = open_candidates(run, corpus).rows.numpy(), corpus.windows(run.recipe.evaluation.split)
    log_prob = (log_base[:, 0] + certified_gain(energy[:, 0], energy[:, 1:])).numpy()
    tokens, documents, chunks = lengths[:, 0].numpy(), windows.documents[rows], ChunkRows.of(windows, rows)
    if chunks is None:
        return log_prob, tokens, documents
    return chunks.summed(log_prob), chunks.summed(tokens), documents[chunks.are_first]
