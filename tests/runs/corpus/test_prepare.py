import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest

from freenergy.core.errors import UserError
from freenergy.core.files import file_hash
from freenergy.core.progress import Silent
from freenergy.corpus import (
    BytePairTokenizer,
    Corpus,
    CorpusReport,
    CorpusSettings,
    PretrainedTokenizer,
    Tokenizer,
    WordTokenizer,
    prepare,
)

SMALL = {"prefix": 6, "continuation": 4, "deduplicate": 0}
BPE = BytePairTokenizer(vocab_size=280)


def hashes(folder):
    return {str(path.relative_to(folder)): file_hash(path) for path in folder.rglob("*") if path.is_file()}


def run(folder, sources, tokenizer=BPE, seed=0, shard_bytes=1 << 20, **settings):
    named = {"source": "x"} if "all" in sources else {"train": "x", "validation": "y"}
    return prepare(
        CorpusSettings(**{**SMALL, **named, **settings}),
        tokenizer,
        sources,
        folder,
        seed,
        Silent(),
        shard_bytes=shard_bytes,
    )


@pytest.fixture
def lines_of_text(make_text):
    return [make_text(i, 20).replace("\n", " ") for i in range(200)]


def decoded(corpus, split):
    stream, bounds = corpus.stream(split), corpus.documents(split)
    assert all(stream[bounds[1:] - 1] == corpus.tokenizer.eos)
    rows = [stream[a : b - 1].tolist() for a, b in pairwise(bounds)]
    assert all(corpus.tokenizer.eos not in row for row in rows)
    return [corpus.tokenizer.decode(row) for row in rows]


def test_every_document_is_in_one_split(tmp_path, write, lines_of_text):
    path = write(tmp_path / "a.jsonl.gz", lines_of_text + lines_of_text[:50])
    report = run(tmp_path / "out", {"all": [path]}, validation_share=0.1, test_share=0.2)
    corpus = Corpus.open(tmp_path / "out")
    parts = {split: decoded(corpus, split) for split in corpus.splits}
    assert sorted(text for part in parts.values() for text in part) == sorted(lines_of_text + lines_of_text[:50])
    for split, part in parts.items():
        others = {text for other in parts if other != split for text in parts[other]}
        assert others.isdisjoint(part)
        assert report.splits[split].documents == len(part)
        assert report.splits[split].bytes == sum(len(text.encode()) for text in part)
        assert report.splits[split].tokens == len(corpus.stream(split))
    distinct = len(set(lines_of_text))
    assert (len(set(parts["validation"])), len(set(parts["test"]))) == (round(0.1 * distinct), round(0.2 * distinct))


def test_the_seed_moves_the_split_and_nothing_else_does(tmp_path, write, lines_of_text):
    path = write(tmp_path / "a.jsonl", lines_of_text)
    runs = [run(tmp_path / name, {"all": [path]}, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert runs[0] == runs[1] != runs[2]
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_windows_and_report(tmp_path, write, make_text):
    sources = {
        split: [write(tmp_path / f"{split}.txt", [make_text(i, 300)])]
        for i, split in enumerate(["train", "validation", "test"])
    }
    report = run(tmp_path / "out", sources)
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.splits == ("train", "validation", "test")
    assert report == corpus.report == CorpusReport.from_json(json.loads(json.dumps(asdict(report))))
    assert report.tokenizer == corpus.tokenizer.fingerprint
    assert (corpus.prefix, corpus.continuation, corpus.ending) == (6, 4, "fixed")
    assert corpus.space.eos is None
    assert corpus.space.length == 4
    windows, stream = corpus.windows("validation"), corpus.stream("validation")
    assert len(windows) == report.splits["validation"].windows == (len(stream) - 1 - 6) // 4
    x = windows.continuations([0, 2])
    assert x.contexts.lists() == [stream[0:6].tolist(), stream[8:14].tolist()]
    assert x.lists() == [[stream[6:10].tolist()], [stream[14:18].tolist()]]
    assert report.examples[0].prefix == corpus.tokenizer.decode(stream[:6].tolist())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "corpus.json",
        "tokenizer",
        *(f"{split}.{kind}" for split in corpus.splits for kind in ("bin", "documents.npy", "windows.npy")),
    }


def test_continuations_that_end_with_their_document(tmp_path, write):
    sources = {
        "train": [write(tmp_path / "a.jsonl", ["a b c d e f g", "a b"])],
        "validation": [write(tmp_path / "b.jsonl", ["a b c d e"])],
    }
    run(tmp_path / "out", sources, WordTokenizer(), prefix=1, continuation=4, ending="eos")
    corpus = Corpus.open(tmp_path / "out")
    eos = corpus.tokenizer.eos
    assert corpus.splits == ("train", "validation")
    assert corpus.space.eos == eos
    x = corpus.windows("train").continuations(slice(None))
    decode = corpus.tokenizer.decode
    texts = [(decode(c), decode(r[0])) for c, r in zip(x.contexts.lists(), x.lists(), strict=True)]
    assert texts == [("a", "b c d e"), ("e", "f g"), ("a", "b")]
    assert [row[0][-1] == eos for row in x.lists()] == [False, True, True]
    assert x.tokens.shape == (3, 1, 4)
    with pytest.raises(UserError, match="no split 'test': it has train, validation"):
        corpus.windows("test")


def test_no_prefix(tmp_path, write, lines_of_text):
    path = write(tmp_path / "a.txt", lines_of_text)
    run(tmp_path / "out", {"all": [path]}, documents="line", prefix=0)
    x = Corpus.open(tmp_path / "out").windows("train").continuations(slice(0, 3))
    assert x.contexts.tokens.shape == (3, 0)
    assert x.lengths.tolist() == [[4]] * 3


def test_overlap_is_dropped_and_reported(tmp_path, write, make_text):
    planted = make_text(9, 40)
    sources = {
        "train": [write(tmp_path / "a.txt", [make_text(1, 300) + " " + planted + " end"])],
        "validation": [write(tmp_path / "b.txt", [make_text(2, 200) + " " + planted + " " + make_text(3, 200)])],
        "test": [write(tmp_path / "c.txt", [make_text(4, 100) + " " + make_text(3, 200)])],
    }
    kept = run(tmp_path / "kept", sources).splits
    report = run(tmp_path / "out", sources, deduplicate=12, prefix=20, continuation=10)
    for split in ("validation", "test"):
        assert report.splits[split].windows_dropped > 0
        assert 0.05 < report.splits[split].ngrams_shared < 0.9
        assert kept[split].windows_dropped == 0
        assert kept[split].ngrams_shared is None
    train = Corpus.open(tmp_path / "out").stream("train").tolist()
    known = {tuple(train[i : i + 12]) for i in range(len(train))}
    for row in Corpus.open(tmp_path / "out").windows("validation").continuations(slice(None)).joined().lists():
        assert not any(tuple(row[i : i + 12]) in known for i in range(len(row) - 11))


def test_nothing_left_after_deduplication(tmp_path, write, make_text):
    text = make_text(1, 300)
    sources = {split: [write(tmp_path / f"{split}.txt", [text])] for split in ("train", "validation")}
    with pytest.raises(UserError, match=r"all .* validation windows share an n-gram of 10 tokens.*deduplicate to 0"):
        run(tmp_path / "out", sources, deduplicate=10)
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_corpora_that_cannot_be_prepared(tmp_path, write):
    one = write(tmp_path / "one.txt", ["only one document"])
    with pytest.raises(UserError, match=r'1 distinct document, too few.*documents = "paragraph"'):
        run(tmp_path / "a", {"all": [one]})
    blank = write(tmp_path / "blank.txt", [" \n "])
    with pytest.raises(UserError, match=r"blank.txt contains no text"):
        run(tmp_path / "b", {"all": [blank]})
    with pytest.raises(UserError, match=r"no train document is long enough.*\(the longest has"):
        run(tmp_path / "c", {"train": [one], "validation": [one]}, prefix=500)


def test_few_documents_still_give_every_split_one(tmp_path, write, make_text):
    path = write(tmp_path / "a.jsonl", [make_text(i, 30) for i in range(3)])
    report = run(tmp_path / "out", {"all": [path]})
    assert [split.documents for split in report.splits.values()] == [1, 1, 1]
    assert set(run(tmp_path / "two", {"all": [path]}, test_share=0.0).splits) == {"train", "validation"}


def test_pretrained_tokenizers_and_wide_tokens(tmp_path, write, lines_of_text):
    import tokenizers
    from tokenizers import models, pre_tokenizers

    words = sorted({word for line in lines_of_text for word in line.split()})
    vocabulary = {"<unk>": 0, "</s>": 70_000} | {word: 69_000 + i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer(inner, 70_000).save(tmp_path / "model")
    path = write(tmp_path / "a.jsonl", lines_of_text)
    report = run(tmp_path / "out", {"all": [path]}, PretrainedTokenizer(path=str(tmp_path / "model")))
    corpus = Corpus.open(tmp_path / "out")
    assert report.vocab_size == 70_001
    assert corpus.stream("train").dtype == np.dtype("<u4")
    assert {" ".join(text.split()) for text in lines_of_text}.issuperset(decoded(corpus, "train"))


def test_long_documents_in_pieces_give_the_tokens_of_the_whole(tmp_path, write, make_text, tokenizer):
    text = make_text(5, 10_000) * 26
    assert len(text) > 1 << 20
    tokenizer.save(tmp_path / "model")
    sources = {
        "train": [write(tmp_path / "a.txt", [text])],
        "validation": [write(tmp_path / "b.txt", [make_text(6, 100)])],
    }
    run(tmp_path / "out", sources, PretrainedTokenizer(path=str(tmp_path / "model")), shard_bytes=1 << 19)
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.report.splits["train"].documents == 1
    assert corpus.stream("train")[:-1].tolist() == tokenizer.encode(text)


class Recorder:
    """Someone who adds up what was reported."""

    def __init__(self):
        self.done = {}
        self.totals = {}

    @contextmanager
    def track(self, label, total=None, unit=""):
        self.done[label], self.totals[label] = 0, total

        def advance(amount, note=""):
            self.done[label] += amount

        yield advance

    def say(self, message):
        raise AssertionError(f"nothing to say, but: {message}")


def test_progress_reaches_its_end(tmp_path, write, lines_of_text):
    sources = {"all": [write(tmp_path / "a.txt.gz", lines_of_text), write(tmp_path / "b.parquet", lines_of_text[:9])]}
    recorder = Recorder()
    settings = CorpusSettings(source="x", documents="line", prefix=3, continuation=5)
    prepare(settings, BPE, sources, tmp_path / "out", 0, recorder)
    assert {"reading the text", "training the tokenizer", "encoding", "de-duplicating test"} <= set(recorder.done)
    assert recorder.done == pytest.approx(recorder.totals)


def test_a_finished_corpus_is_not_made_again(tmp_path, write, lines_of_text):
    path = write(tmp_path / "a.jsonl", lines_of_text)
    report = run(tmp_path / "out", {"all": [path]})
    path.unlink()
    assert run(tmp_path / "out", {"all": [path]}) == report


KILLED = """
import json, sys
from pathlib import Path
from freenergy.corpus import BytePairTokenizer, CorpusSettings, prepare
from freenergy.core.progress import Silent
settings = CorpusSettings(source="x", prefix=6, continuation=4)
path, folder = map(Path, sys.argv[1:])
prepare(settings, BytePairTokenizer(vocab_size=280), {"all": [path]}, folder, 0, Silent(), shard_bytes=4000)
"""


def encoded_batches(monkeypatch, *arguments, **settings):
    """Run the stage and count how often it encoded."""
    calls, original = [], Tokenizer.encode_batch
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_batch", lambda self, texts: calls.append(1) or original(self, texts))
        run(*arguments, **settings)
    return len(calls)


def test_killed_in_the_middle_it_ends_with_the_same_bits(tmp_path, write, lines_of_text, monkeypatch):
    path = write(tmp_path / "a.jsonl.gz", [f"{i} {text}" for i in range(20) for text in lines_of_text])
    how = {"shard_bytes": 4000, "deduplicate": 24}
    calm = encoded_batches(monkeypatch, tmp_path / "calm", {"all": [path]}, **how)
    folder = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path), str(folder)])
    shards = folder / "shards"
    while process.poll() is None and len(list(shards.glob("0*"))) < 5:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    finished = len(list(shards.glob("0*")))
    assert 5 <= finished < calm
    assert not (folder / "corpus.json").exists()
    (shards / ".000099.safetensors.1.part").write_text("torn")
    again = encoded_batches(monkeypatch, folder, {"all": [path]}, **how)
    assert again == calm - finished, "each shard is encoded once"
    assert hashes(folder) == hashes(tmp_path / "calm")


def test_killed_between_report_and_sweep(tmp_path, write, lines_of_text):
    path = write(tmp_path / "a.jsonl", lines_of_text)
    run(tmp_path / "out", {"all": [path]})
    before = hashes(tmp_path / "out")
    (tmp_path / "out" / "shards").mkdir()
    (tmp_path / "out" / "shards" / "000000.safetensors").write_bytes(b"x")
    run(tmp_path / "out", {"all": [path]})
    assert hashes(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["train.bin", "train.documents.npy", "train.windows.npy", "corpus.json"])
@pytest.mark.parametrize("harm", ["missing", "torn", "begun badly"])
def test_damaged_corpora_are_named(tmp_path, write, lines_of_text, name, harm):
    out = tmp_path / "out"
    run(out, {"all": [write(tmp_path / "a.jsonl", lines_of_text)]})
    if harm == "missing":
        (out / name).unlink()
    else:
        data = (out / name).read_bytes()
        begun_badly = data.replace(b"}", b"(", 1) if b"NUMPY" in data else b"{[(" + data
        (out / name).write_bytes(data[:100] if harm == "torn" else begun_badly)

    def use():
        corpus = Corpus.open(out)
        corpus.documents("train")
        corpus.windows("train")

    with pytest.raises(UserError, match=r"corpus|run the stage"):
        use()


def test_a_changed_tokenizer_is_noticed(tmp_path, write, lines_of_text, tokenizer):
    run(tmp_path / "out", {"all": [write(tmp_path / "a.jsonl", lines_of_text)]})
    tokenizer.save(tmp_path / "out" / "tokenizer")
    with pytest.raises(UserError, match="not the one that made the corpus"):
        Corpus.open(tmp_path / "out")
