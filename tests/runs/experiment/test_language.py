"""Text as a domain: perplexity by another road, paired differences, memory, checkpoints, re-sampling."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from freenergy import Continuations, HuggingFaceLM, Rng, UserError
from freenergy.core.progress import Silent
from freenergy.corpus import BytePairTokenizer, CorpusSettings
from freenergy.energies.logits import Logits, LogitsEnergy
from freenergy.evaluation.perplexity import choose_windows
from freenergy.evaluation.residual_perplexity import residual_perplexity
from freenergy.lm.checkpoints import save_checkpoint
from freenergy.lm.networks.blocks import LaneData
from freenergy.models.residual import Residual
from freenergy.recipes.families.language_model import LanguageModelEvaluation, LanguageModelRecipe
from freenergy.recipes.load import load_run
from freenergy.runs.run import Run, run
from freenergy.training.settings import Optimisation, TrainedBase

BLOCK = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("text") / "text.txt", np.random.default_rng(1)
    words = ["river", "sea", "boat", "night", "men", "cold", "home", "the", "a", "and"]
    path.write_text("\n\n".join(" ".join(rng.choice(words, rng.integers(30, 60))) for _ in range(60)))
    return path


@pytest.fixture(scope="module")
def settings(text):
    def make(**changes):
        corpus = CorpusSettings(
            source=str(text), documents="paragraph", deduplicate=0, prefix=6, continuation=4, validation_share=0.1,
            test_share=0.2,
        )  # fmt: skip
        measured = {name: changes.pop(name) for name in ("certified_windows", "candidates") if name in changes}
        other = {"corpus": changes.pop("corpus", corpus), "tokenizer": BytePairTokenizer(vocab_size=280)}
        base = TrainedBase(**{"block": BLOCK, **changes})
        return LanguageModelRecipe(name="text", base=base, evaluation=LanguageModelEvaluation(**measured), **other)

    return make


def opened(recipe, folder):
    """The domain, with a corpus that is prepared in the folder."""
    list(run(recipe, folder, stage="corpus"))
    return recipe.domain(Run(folder, recipe), Silent())


@pytest.fixture(scope="module")
def domain(settings, tmp_path_factory):
    made = settings(certified_windows=3, candidates=5)
    return opened(made, tmp_path_factory.mktemp("domain"))


@pytest.fixture(scope="module")
def measured(domain, tmp_path_factory):
    """Two networks, their folders and their numbers."""
    found = []
    for seed in (0, 1):
        folder, network = tmp_path_factory.mktemp("measured"), domain.network(Rng(seed))
        network.module.eval()
        found.append((network, folder, domain.measure(network, folder, Rng(5), Silent())))
    return found


def test_perplexity_is_that_of_the_stream_read_block_by_block(domain, measured):
    _, folder, numbers = measured[0]
    stream = torch.from_numpy(domain.corpus.stream("test").astype(np.int64))
    lm = HuggingFaceLM(domain.network(Rng(0)).module, eos=domain.corpus.tokenizer.eos)
    blocks = (len(stream) - 1) // BLOCK
    total = 0.0
    for b in range(blocks):
        before, x = stream[b * BLOCK], stream[b * BLOCK + 1 : (b + 1) * BLOCK + 1]
        total -= lm.log_prob(Continuations.from_lists([[int(before)]], [[x.tolist()]])).item()
    assert numbers["perplexity"] == pytest.approx(np.exp(total / (blocks * BLOCK)), rel=1e-5)
    kept = load_file(folder / "blocks.safetensors")
    assert kept["nats"].sum() == pytest.approx(total, rel=1e-5)
    assert set(kept["tokens"]) == {BLOCK}


def test_a_block_belongs_to_the_document_of_its_first_token(domain, measured):
    documents = load_file(measured[0][1] / "blocks.safetensors")["documents"]
    bounds = domain.corpus.documents("test")
    for b, document in enumerate(documents):
        assert bounds[document] <= b * BLOCK + 1 < bounds[document + 1]
    assert len(set(documents)) > 6


def test_the_difference_is_paired_and_of_the_mean_over_seeds(domain, measured):
    (_, a, _), (_, b, _) = measured
    found = domain.compare([a, b], [b, a], Rng(0))["percent lower perplexity"]
    assert (found.value, found.low, found.high) == (0, 0, 0), "over both seeds the sides are the same networks"
    found = domain.compare([a], [b], Rng(0))["percent lower perplexity"]
    ours, others = (load_file(folder / "blocks.safetensors") for folder in (a, b))
    gain = (others["nats"] - ours["nats"]).sum() / ours["tokens"].sum()
    assert found.value == pytest.approx(100 * (1 - np.exp(-gain)))
    assert found.low < found.value < found.high
    swapped = domain.compare([b], [a], Rng(0))["percent lower perplexity"]
    assert np.sign(swapped.value) == -np.sign(found.value)


def test_resampled_columns_are_those_of_the_joint_model(domain, measured):
    network, _, numbers = measured[0]
    corpus, rng = domain.corpus, Rng(5).child("resampled")
    windows = corpus.windows("test")
    rows = choose_windows(len(windows), 3, "test", rng.child("windows"))
    base = HuggingFaceLM(domain.network(Rng(0)).module, eos=corpus.tokenizer.eos)
    joint = Residual(base, Logits(LogitsEnergy(), base))
    x, draws = windows.continuations(rows), rng.child("draws")
    report = residual_perplexity(
        joint, x, 4, corpus.space, draws, tokenizer=corpus.tokenizer, documents=windows.documents[rows]
    )
    for bound in ("certified", "lower", "upper"):
        expected = report.perplexity["token"][bound].value
        assert numbers[f"perplexity resampled ({bound})"] == pytest.approx(expected, rel=1e-6)
    assert numbers["perplexity of windows"] == pytest.approx(report.base.value, rel=1e-6)
    assert all(weight.requires_grad for weight in network.module.parameters()), "measuring leaves the network as it was"


def test_the_corpus_is_prepared_once_and_again_when_the_text_changes(settings, text, tmp_path):
    first = opened(settings(), tmp_path)
    mark = (tmp_path / "corpus" / "corpus.json").stat().st_mtime_ns
    assert opened(settings(), tmp_path).corpus.fingerprint == first.corpus.fingerprint
    assert (tmp_path / "corpus" / "corpus.json").stat().st_mtime_ns == mark
    content = text.read_text()
    try:
        text.write_text(content + "\n\nand the sea came home")
        assert opened(settings(), tmp_path).corpus.fingerprint != first.corpus.fingerprint
    finally:
        text.write_text(content)


def test_fakes_begin_with_the_prefix(settings, domain, tmp_path):
    batch = domain.data(batch_size=2, accumulate=1, rng=Rng(0)).batch(1, 0)
    assert (batch.known, batch.tokens.shape) == (6, (2, BLOCK))


def test_weights_of_a_checkpoint(settings, domain, tmp_path):
    model = domain.network(Rng(3)).module
    save_checkpoint(model, tmp_path / "model", eos=domain.corpus.tokenizer.eos, tokenizer=domain.corpus.tokenizer)
    warm = opened(settings(start=str(tmp_path / "model")), tmp_path / "warm")
    for ours, stored in zip(warm.network(Rng(9)).module.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, stored)


def test_a_memory_reads_the_text_in_its_order(settings, tmp_path):
    made = settings(memory=8, optimisation=Optimisation(batch_size=2))
    domain = opened(made, tmp_path / "domain")
    data = domain.data(batch_size=2, accumulate=1, rng=Rng(0))
    assert isinstance(data, LaneData)
    stream = domain.corpus.stream("train")
    assert data.batch(2, 0).tokens[0].tolist() == stream[BLOCK + 1 : 2 * BLOCK + 1].tolist()
    network = domain.network(Rng(0))
    network.module.eval()
    with_memory = domain.measure(network, tmp_path, Rng(0), Silent())["perplexity"]
    plain = opened(settings(), tmp_path / "plain")
    network = plain.network(Rng(0))
    network.module.eval()
    without = plain.measure(network, tmp_path, Rng(0), Silent())["perplexity"]
    assert with_memory != without


def test_refusals(settings, tmp_path):
    with pytest.raises(UserError, match="must fit the network's 256"):
        opened(settings(block=300), tmp_path).network(Rng(0))
    for changes, words in (
        ({"block": 0}, "block is 0"), ({"dropout": 1.0}, "dropout is 1.0"),
        ({"candidates": 2}, "candidates is 2"), ({"memory": -1}, "memory is -1"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            settings(**changes)
    no_test = CorpusSettings(
        source=settings().corpus.source, documents="paragraph", deduplicate=0, prefix=6, continuation=4, test_share=0.0
    )
    with pytest.raises(UserError, match="the corpus has no test text"):
        opened(settings(corpus=no_test), tmp_path / "other")


def test_a_run_of_the_family_is_sampled_from_and_reported(settings, tmp_path, call):
    steps = Optimisation(steps=4, batch_size=2, validate_every=2, warmup=0)
    recipe = settings(optimisation=steps, validation_tokens=60)
    *_, last = run(recipe, tmp_path)
    assert [name for name, _ in last.summary["numbers"]] == ["perplexity"]
    assert load_run(tmp_path).recipe == recipe
    for command, *options in (["sample", "--prefix", "the sea", "--length", 3], ["verify"], ["cite"], ["report"]):
        status, _, err = call(command, tmp_path, *options)
        assert status == 0, err
