"""Stage ``base``: the language model, trained, counted, found, reached or listened to."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, read_json, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.sequences import Sequences, SequenceSpace
from freenergy.corpus import Corpus
from freenergy.lm.load import RECORD, load_lm, locate_model, save_lm
from freenergy.lm.settings import NgramBase, RemoteBase
from freenergy.lm.sources.load import load_source, source_files
from freenergy.lm.sources.settings import SamplesBase
from freenergy.recipes.families.residual import ResidualRun
from freenergy.runs.run import Plan, Stage
from freenergy.training.distributed.ranks import Ranks
from freenergy.training.settings import PretrainedBase, TrainedBase

AnyBase = TrainedBase | NgramBase | PretrainedBase | RemoteBase | SamplesBase


def _plan(run: ResidualRun, progress: Progress) -> Plan:
    settings = run.recipe.base
    if isinstance(settings, TrainedBase):
        _check_ranks(settings)
    checkpoint, made_of = base_inputs(settings, progress)
    inputs = {"seed": run.recipe.seed, "settings": _without_rungs(settings), **made_of}
    return Plan(inputs, partial(_work, run, checkpoint, made_of), is_shared=isinstance(settings, TrainedBase))


def _without_rungs(settings: AnyBase) -> AnyBase:
    """Leave out the sections of stages that come after this one."""
    match settings:
        case TrainedBase() | PretrainedBase():
            return replace(settings, tune=None, local=None)
        case NgramBase():
            return replace(settings, local=None)
    return settings


def base_inputs(settings: AnyBase, progress: Progress) -> tuple[Path | None, dict[str, Any]]:
    """Returns the checkpoint that a base begins as, and what a stage's key needs to know of that or of the preset."""
    match settings:
        case TrainedBase(start=name) | PretrainedBase(path=name) if name:
            from freenergy.lm.checkpoints import checkpoint_fingerprint, is_padded

            path = locate_model(name, progress).resolve()
            padded = {"is_padded": True} if is_padded(path) else {}
            return path, {"checkpoint": checkpoint_fingerprint(path)} | padded
        case TrainedBase(preset=name):
            from freenergy.lm.presets import preset

            return None, {"preset": asdict(preset(name))}
        case SamplesBase(source=source):
            return None, {"files": source_files(source)}
    return None, {}


def _check_ranks(settings: TrainedBase) -> None:
    """Refuse before anything is done what the ranks cannot share."""
    ranks = Ranks.found()
    if settings.memory and ranks.count > 1:
        raise UserError(
            f"a memory continues from step to step in one place, and {ranks.count} ranks were started: set base.memory "
            "to 0, or train on one rank"
        )
    ranks.share(settings.optimisation.accumulate, "base.optimisation")


def _work(
    run: ResidualRun, checkpoint: Path | None, made_of: dict[str, Any], folder: Path, progress: Progress
) -> dict[str, Any]:
    corpus = Corpus.open(run.stage("corpus"))
    match run.recipe.base:
        case TrainedBase() as settings:
            summary = _train(settings, checkpoint, corpus, folder, Rng(run.recipe.seed).child("base"), progress)
        case NgramBase(order=order):
            summary = _count(order, corpus, folder, progress)
        case PretrainedBase():
            assert checkpoint is not None, "planned above"
            summary = _find(checkpoint, made_of["checkpoint"], corpus, folder)
        case RemoteBase() as remote:
            summary = _reach(remote, corpus, folder)
        case SamplesBase() as box:
            summary = _listen(box, corpus, folder)
    return {"kind": run.recipe.base.kind, "tokenizer": corpus.tokenizer.fingerprint, **summary}


def _train(
    settings: TrainedBase, start: Path | None, corpus: Corpus, folder: Path, rng: Rng, progress: Progress
) -> dict[str, Any]:
    from freenergy.training.tasks.language_model import train_language_model, training_summary

    def train(training: Path) -> "Trained":
        return train_language_model(settings, corpus, start, training, rng, progress), {}

    found = trained_base(folder, corpus, train)
    return found | training_summary(folder / "training") if found else {}


Trained = tuple[Any, dict[str, Any]]  # a network of transformers, and what to record about it


def trained_base(folder: Path, corpus: Corpus, train: "Callable[[Path], Trained]") -> dict[str, Any]:
    """Train a network, or resume that, in the folder of a stage; the first rank returns its record."""
    from freenergy.lm.checkpoints import checkpoint_fingerprint, save_checkpoint

    training = folder / "training"
    if not (folder / RECORD).is_file():  # it is written last: without it, training has to go on
        model, more = train(training)
        if Ranks.found().is_first:
            save_checkpoint(model, folder / "model", eos=corpus.tokenizer.eos, tokenizer=corpus.tokenizer)
            name = checkpoint_fingerprint(folder / "model")
            parameters = sum(weight.numel() for weight in model.parameters())
            record = {"kind": "huggingface", "path": "model", "fingerprint": name, "parameters": parameters}
            write_json(folder / RECORD, record | more)
    if not Ranks.found().is_first:
        return {}
    for moments in training.glob("*.safetensors"):
        moments.unlink()
    record = read_json(folder / RECORD)
    return {key: record[key] for key in ("parameters", "fingerprint", *record) if key not in ("kind", "path")}


def _count(order: int, corpus: Corpus, folder: Path, progress: Progress) -> dict[str, Any]:
    from freenergy.lm.ngram import NgramLM

    tokenizer = corpus.tokenizer
    lm = NgramLM.fit(
        corpus.stream("train"),
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
        order=order,
        tokenizer=tokenizer.fingerprint,
        progress=progress,
    )
    lm.save_pretrained(folder / "model")
    write_json(folder / RECORD, {"kind": "ngram", "path": "model", "fingerprint": lm.fingerprint})
    return {"order": order, "fingerprint": lm.fingerprint}


def _find(path: Path, mark: str, corpus: Corpus, folder: Path) -> dict[str, Any]:
    from freenergy.lm.checkpoints import check_tokenizer
    from freenergy.lm.huggingface import HuggingFaceLM

    check_tokenizer(path, corpus.tokenizer)
    lm = HuggingFaceLM.from_pretrained(path, eos=corpus.tokenizer.eos, vocab_size=corpus.tokenizer.vocab_size)
    needed = corpus.prefix + corpus.continuation
    if lm.max_length is not None and needed > lm.max_length:
        raise UserError(
            f"windows of {corpus.prefix} + {corpus.continuation} tokens do not fit the {lm.max_length} tokens of "
            f"{path}: set corpus.prefix or corpus.continuation lower"
        )
    write_json(folder / RECORD, {"kind": "huggingface", "path": str(path), "fingerprint": mark})
    parameters = sum(weight.numel() for weight in lm.model.parameters())
    padding = {"padding": lm.padding._asdict()} if lm.padding.rows else {}
    about = {"path": str(path), "parameters": parameters, "fingerprint": mark, "shares_prefix": lm.shares_prefix}
    return about | padding


def _reach(remote: RemoteBase, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Draw one token, so that a server that is down or gives no log-probs is found out here and not hours later."""
    settings = {key: value for key, value in asdict(remote).items() if key != "kind"}
    record = {"kind": "remote", "settings": settings, "fingerprint": fingerprint(settings)}
    write_json(folder / RECORD, record)
    lm = load_lm(folder, corpus.tokenizer)
    space = SequenceSpace(vocab_size=corpus.tokenizer.vocab_size, length=1)
    draw = lm.sample(Sequences.from_lists([[corpus.tokenizer.eos]]), 1, space, Rng(0))
    lm.log_prob(draw.x)
    return {"url": remote.url, "model": remote.model, "fingerprint": record["fingerprint"]}


def _listen(settings: SamplesBase, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """Draw one text, so that a source that fails is found out here and not hours later."""
    from freenergy.lm.samples import SamplesLM

    source = load_source(settings.source)
    lm = SamplesLM(source=source, tokenizer=corpus.tokenizer, lead=settings.lead, settings=settings.source)
    save_lm(lm, folder)
    draw = lm.part("train").sample(corpus.windows("train").continuations([0]).contexts, 1, corpus.space, Rng(0))
    text = corpus.tokenizer.decode(draw.x.lists()[0][0])
    return {"source": settings.source.kind, "text": text, "fingerprint": read_json(folder / RECORD)["fingerprint"]}


STAGE = Stage("base", _plan, after=("corpus",))
