"""The stages of the family ``tagging``: sentences, a tagger, what it is worth.

corpus       read, rewrite tags in the scheme, hold out what has no file of its own
tagger       fit, count or train
evaluation   tag the test sentences: rates with intervals over sentences, confusions, marginals of some sentences
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.recipes.load import load_run
from freenergy.recipes.stages.evaluation import EvaluationRequest
from freenergy.runs.run import Plan, Run, Stage
from freenergy.runs.run import run as run_stages
from freenergy.tagging.features import fit_features
from freenergy.tagging.formats import Columns, read_sentences, write_sentences
from freenergy.tagging.hmm import HiddenMarkovModel
from freenergy.tagging.network import fresh
from freenergy.tagging.reading import Vocabulary
from freenergy.tagging.scores import SentenceCounts, confusions, count, intervals
from freenergy.tagging.sentences import Sentence, TagSet
from freenergy.tagging.settings import FeatureTagger, HiddenMarkov, NeuralTagger
from freenergy.tagging.spans import Scheme, has_spans, in_scheme
from freenergy.tagging.tagger import NeuralModel, Tagger, TagModel, allowed_by, open_encoder
from freenergy.tagging.task import TaggingTask, batches
from freenergy.training.loop import fit_watched

SPLITS = ("train", "validation", "test")
EVALUATION, PREDICTED, _TAGS = "evaluation.json", "predicted.txt", "tags.json"
_SHORT_LIVED = ("checkpoint.safetensors", "best.safetensors")


def _plan_corpus(run: Run[Any], progress: Progress) -> Plan:
    data = run.recipe.data
    files = {name: Path(getattr(data, name)) for name in SPLITS if getattr(data, name)}
    for path in files.values():
        if not path.is_file():
            raise UserError(f"there is no file {path}: check data.train, data.validation and data.test")
    inputs = {"data": data, "files": {name: file_hash(path) for name, path in files.items()}}
    return Plan(inputs, partial(_prepare, run, files))


def _prepare(run: Run[Any], files: dict[str, Path], folder: Path, progress: Progress) -> dict[str, Any]:
    data = run.recipe.data
    parts = {name: read_sentences(path, data.format, data.layout) for name, path in files.items()}
    for name in ("test", "validation"):
        if name not in parts:
            parts["train"], parts[name] = _split(parts["train"], data.held_out_share, Rng(0).child("split", name))
    tags = [tag for one in parts["train"] for tag in one.tags]
    scheme: Scheme = ("bio" if has_spans(tags) else "none") if data.scheme == "auto" else data.scheme
    if not data.partial:
        parts = {name: [one.tagged(in_scheme(one.tags, scheme)) for one in part] for name, part in parts.items()}
    tag_set = TagSet.of([*parts["train"], *parts["validation"]], partial=data.partial)
    for name, part in parts.items():
        write_sentences(folder / f"{name}.jsonl", part, [one.tags for one in part])
    write_json(folder / _TAGS, {"tags": list(tag_set.names), "scheme": scheme})
    unseen = {tag for one in parts["test"] for tag in one.tags} - set(tag_set.names)
    return {
        "sentences": {name: len(parts[name]) for name in SPLITS},
        "words": {name: sum(map(len, parts[name])) for name in SPLITS},
        "tags": len(tag_set),
        "scheme": scheme,
        "tags_only_in_test": sorted(unseen) if not data.partial else [],
    }


def _split(sentences: list[Sentence], share: float, rng: Rng) -> tuple[list[Sentence], list[Sentence]]:
    """Returns what is left and what is held out, each in the order of the file."""
    held = set(rng.permutation(len(sentences))[: max(1, round(share * len(sentences)))].tolist())
    if len(held) >= len(sentences):
        raise UserError(f"{len(sentences)} sentences are too few to hold some out: give data.validation and data.test")
    kept = [one for i, one in enumerate(sentences) if i not in held]
    return kept, [one for i, one in enumerate(sentences) if i in held]


def read_split(run: Run[Any], name: str) -> list[Sentence]:
    """Returns the sentences of a prepared split."""
    return read_sentences(run.stage("corpus") / f"{name}.jsonl")


def _tags(run: Run[Any]) -> tuple[TagSet, Scheme]:
    record = read_json(run.stage("corpus") / _TAGS)
    return TagSet(tuple(record["tags"])), record["scheme"]


def _plan_tagger(run: Run[Any], progress: Progress) -> Plan:
    settings = run.recipe.tagger
    inputs: dict[str, Any] = {"tagger": settings, "partial": run.recipe.data.partial}
    if isinstance(settings, NeuralTagger):
        inputs["seed"] = run.recipe.seed
        if settings.encoder:
            from freenergy.lm.checkpoints import checkpoint_fingerprint
            from freenergy.lm.load import locate_model

            inputs["encoder"] = checkpoint_fingerprint(locate_model(settings.encoder, progress))
    return Plan(inputs, partial(_train, run))


def _train(run: Run[Any], folder: Path, progress: Progress) -> dict[str, Any]:
    settings, is_partial = run.recipe.tagger, run.recipe.data.partial
    tags, scheme = _tags(run)
    train = read_split(run, "train")
    if getattr(settings, "with_validation", False):
        train += read_split(run, "validation")
    allowed = allowed_by(settings, tags, scheme)
    found: dict[str, Any] = {}
    model: TagModel
    match settings:
        case FeatureTagger():
            model, found = fit_features(settings, train, tags, allowed, progress, partial=is_partial)
        case HiddenMarkov():
            model = HiddenMarkovModel.count(settings, train, tags, allowed, partial=is_partial)
            found = {"symbols": len(model.symbols)}
        case _:
            model, found = _train_network(run, train, tags, scheme, folder / "training", progress)
    columns = len(train[0].columns[0]) if train[0].columns else 0
    Tagger(settings, tags, scheme, columns, model).save(folder)
    for name in _SHORT_LIVED:
        (folder / "training" / name).unlink(missing_ok=True)
    return {"kind": settings.kind, **found}


def _train_network(
    run: Run[Any], train: list[Sentence], tags: TagSet, scheme: Scheme, folder: Path, progress: Progress
) -> tuple[NeuralModel, dict[str, Any]]:
    settings, rng = run.recipe.tagger, Rng(run.recipe.seed).child("tagging")
    vocabulary = Vocabulary.of(train, min_count=settings.min_count, buckets=settings.buckets)
    encoder = open_encoder(settings, progress)
    network = fresh(settings, vocabulary, len(tags), allowed_by(settings, tags, scheme), encoder, rng.child("weights"))
    task = TaggingTask(
        network, vocabulary, tags, train, read_split(run, "validation"), settings.optimisation, rng.child("data"),
        partial=run.recipe.data.partial,
    )  # fmt: skip
    label = f"{run.recipe.name}, {settings.law}, seed {run.recipe.seed}"
    fit_watched(task, settings.optimisation, folder, rng.child("steps"), progress, label)
    parameters = sum(each.numel() for each in network.parameters())
    return NeuralModel(network, vocabulary), {"law": settings.law, "parameters": parameters}


def _plan_evaluation(run: Run[Any], progress: Progress) -> Plan:
    return Plan({"settings": run.recipe.evaluation}, partial(_evaluate, run))


def _evaluate(run: Run[Any], folder: Path, progress: Progress) -> dict[str, Any]:
    found = measure(Tagger.load(run.stage("tagger")), read_split(run, "test"), folder, progress, run.recipe.evaluation)
    write_json(folder / EVALUATION, found)
    return found


def measure(
    tagger: Tagger, sentences: list[Sentence], folder: Path | None, progress: Progress, settings: Any
) -> dict[str, Any]:
    """Tag sentences whose tags are known; returns what the report shows. ``folder`` gets the predicted tags."""
    predicted = list[list[str]]()
    with progress.track("tagging", len(sentences), "sentences") as advance:
        for some in batches(sentences):
            predicted += tagger.tag(some)
            advance(len(some))
    gold = [one.tags for one in sentences]
    if folder is not None:
        with_truth = [Sentence(one.words, columns=tuple((tag,) for tag in one.tags)) for one in sentences]
        write_sentences(folder / PREDICTED, with_truth, predicted)
    counts = count(gold, predicted)
    measured = intervals(counts, Rng(0).child("intervals"))
    return {
        "sentences": len(sentences),
        "words": int(counts.words.sum()),
        "spans": int(counts.true.sum()),
        "rates": [[name, each.to_json()] for name, each in measured.items()],
        **_nats(tagger, sentences),
        "confusions": confusions(gold, predicted, settings.confusions),
        "transitions": _transitions(tagger),
        "examples": _examples(tagger, sentences[: settings.examples], predicted),
    }


def evaluate_tagger(folder: str | Path, request: EvaluationRequest, progress: Progress) -> dict[str, Any]:
    """Measure a run's tagger: on its test sentences, on other tagged files, or on its validation sentences."""
    if request.windows or request.candidates or request.baselines:
        raise UserError("a tagger has no windows, candidates or baselines: measure it with --text or --split alone")
    this = load_run(folder)
    this.finished("tagger")
    if not request.texts and request.split in (None, "test"):
        for _ in run_stages(this.recipe, this.folder, progress=progress):
            pass
        return dict(this.finished("evaluation")["summary"])
    tagger, data = Tagger.load(this.stage("tagger")), this.recipe.data
    sentences = [one for path in request.texts for one in read_sentences(path, data.format, data.layout)]
    if request.texts:
        sentences = [one.tagged(in_scheme(one.tags, tagger.scheme)) for one in sentences]
    elif request.split == "validation":
        sentences = read_split(this, "validation")
    else:
        raise UserError(f"there is no split {request.split!r}: choose test or validation")
    return measure(tagger, sentences, None, progress, this.recipe.evaluation)


def _nats(tagger: Tagger, sentences: list[Sentence]) -> dict[str, Any]:
    """Returns − log p(true tags) per word over the sentences whose tags are all known, and whether it is exact."""
    known = [one for one in sentences if set(one.tags) <= set(tagger.tags.names)]
    scores = tagger.score(known) if known else []
    finite = [
        (each.log_prob, len(one)) for each, one in zip(scores, known, strict=True) if each.log_prob > float("-inf")
    ]
    words = sum(length for _, length in finite)
    return {
        "nats_per_word": -sum(log_p for log_p, _ in finite) / words if words else None,
        "nats_are_exact": all(each.is_exact for each in scores),
        "impossible_sentences": len(sentences) - len(finite),
    }


def _transitions(tagger: Tagger) -> dict[str, Any] | None:
    """Returns the weights of pairs of tags, where the model has them."""
    weights = getattr(tagger.model, "weights", None)
    if weights is None:
        network = getattr(tagger.model, "network", None)
        table = getattr(getattr(network, "head", None), "transitions", None)
    else:
        table = weights["transitions"]
    if table is None:
        return None
    return {"tags": list(tagger.tags.names), "weights": table.detach().double().tolist()}


def _examples(tagger: Tagger, sentences: list[Sentence], predicted: list[list[str]]) -> list[dict[str, Any]]:
    """Returns some sentences with the probability of each word's predicted tag and the likeliest other one."""
    found = []
    for one, tags, p in zip(sentences, predicted, tagger.marginals(sentences) if sentences else [], strict=False):
        rows = []
        for word, true, tag, own in zip(one.words, one.tags, tags, p.double(), strict=True):
            k = tagger.tags.number(tag)
            other = int(own.index_fill(0, torch.tensor([k]), -1.0).argmax())
            rows.append([word, true, tag, own[k].item(), tagger.tags.names[other], own[other].item()])
        found.append({"words": rows})
    return found


def predicted_counts(folder: Path) -> SentenceCounts:
    """Returns the counts of what a run has predicted."""
    sentences = read_sentences(folder / PREDICTED, columns=Columns(columns=(-2,)))
    return count([[each[0] for each in one.columns] for one in sentences], [one.tags for one in sentences])


STAGES = (
    Stage("corpus", _plan_corpus),
    Stage("tagger", _plan_tagger, after=("corpus",)),
    Stage("evaluation", _plan_evaluation, after=("corpus", "tagger")),
)
