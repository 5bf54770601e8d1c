"""Stage ``local``: a few weights that adapt the base to the text, token by token.

    counts: the first documents of the training text        weights: windows of the validation text
    energies on top of it: windows of the other training documents, which the counts have not seen

Counts know by heart what they were counted on. An energy that learned from the same documents would meet a mix that is
better there than anywhere else, and would learn to undo that; so the negatives are drawn for the other documents.
"""

from functools import partial
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.lm.load import RECORD, load_lm
from freenergy.lm.settings import LocalSettings
from freenergy.recipes.families.residual import ResidualRun
from freenergy.recipes.stages.language_models import NETWORKS, first_documents, rung_names
from freenergy.runs.run import Plan, Stage
from freenergy.training.settings import adaptation

_MIX = "mix"


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    settings = adaptation(run.recipe.base)
    assert settings is not None, "the stage is left out where nothing is adapted"
    if settings.documents == 1 and run.recipe.energy is not None:
        raise UserError(
            "base.local.documents is 1, which leaves no training text that the counts have not seen for the energy to "
            "learn from: set it below 1, such as 0.85, or leave [energy] out"
        )
    return Plan({"seed": run.recipe.seed, "settings": settings}, partial(_work, run, settings))


def _work(run: ResidualRun, settings: LocalSettings, folder: Path, progress: Progress) -> dict[str, Any]:
    from freenergy.lm.adapted import AdaptedLM, weight_names
    from freenergy.lm.local_counts import LocalCounts
    from freenergy.training.local_mix import fit_local_mix

    corpus, under = Corpus.open(run.stage("corpus")), rung_names(run)[-2]
    base = load_lm(run.stage(under), corpus.tokenizer)
    documents = corpus.documents("train")
    num = first_documents(settings.documents, len(documents) - 1)
    counts = LocalCounts.of(
        corpus.stream("train")[: documents[num]],
        vocab_size=base.vocab_size,
        eos=base.eos,
        order=settings.order,
        tokenizer=corpus.tokenizer.fingerprint,
        progress=progress,
    )
    windows = corpus.windows("validation")
    rows = Rng(run.recipe.seed).child("local", "windows").permutation(len(windows))[: settings.num_windows]
    names = weight_names(order=settings.order, cache=settings.cache, copy=settings.copy, entropy=settings.entropy)
    fit = fit_local_mix(base, counts, names, windows.continuations(rows), l2=settings.l2, progress=progress)
    AdaptedLM(base, fit.weights, counts).save_mix(folder / _MIX)
    name = fingerprint([read_json(run.stage(under) / RECORD)["fingerprint"], fit.weights, counts.fingerprint])
    write_json(folder / RECORD, {"kind": "adapted", "under": f"../{under}", "path": _MIX, "fingerprint": name})
    return {
        "documents": num,
        "documents_left_for_energies": len(documents) - 1 - num,
        "windows": len(rows),
        "fingerprint": name,
        **fit.summary(),
    }


STAGE = Stage("local", _plan, after=NETWORKS)
