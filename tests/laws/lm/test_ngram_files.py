"""The n-gram model on disk: whole, or one sentence."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from freenergy.core.errors import UserError
from freenergy.core.files import read_json, write_json
from freenergy.core.sequences import Sequences
from freenergy.lm.ngram import NgramLM

STREAM = np.array([1, 2, 1, 2, 0, 2, 0, 1, 3, 0])
CONTEXTS = Sequences.from_lists([[], [1], [0, 2], [3, 3]])


def fitted(stream: np.ndarray = STREAM, order: int = 3, tokenizer: str | None = "abc") -> NgramLM:
    return NgramLM.fit(stream, vocab_size=4, eos=0, order=order, tokenizer=tokenizer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fitted().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("order", [1, 3, 7])
def test_round_trip(order: int, tmp_path: Path) -> None:
    lm = fitted(order=order)
    lm.save_pretrained(tmp_path / "new" / "model")
    again = NgramLM.from_pretrained(tmp_path / "new" / "model")
    assert again.next_log_probs(CONTEXTS).equal(lm.next_log_probs(CONTEXTS))
    assert (again.vocab_size, again.eos, again.order, again.tokenizer) == (4, 0, order, "abc")
    assert again.fingerprint == lm.fingerprint


def test_folder_holds_two_files_and_is_the_same_bytes_each_time(folder: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "ngram.safetensors"]
    config = read_json(folder / "config.json")
    assert config == {
        "kind": "ngram", "order": 3, "vocab_size": 4, "eos": 0, "tokenizer": "abc", "fingerprint": fitted().fingerprint,
    }  # fmt: skip
    fitted().save_pretrained(tmp_path / "again")
    for name in ("config.json", "ngram.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_save_replaces_an_older_model(folder: Path) -> None:
    newer = fitted(order=2, tokenizer=None)
    newer.save_pretrained(folder)
    again = NgramLM.from_pretrained(folder)
    assert again.fingerprint == newer.fingerprint != fitted().fingerprint
    assert again.tokenizer is None


def test_fingerprint_names_the_model() -> None:
    others = [fitted(order=2), fitted(tokenizer="xyz"), fitted(tokenizer=None), fitted(STREAM[:5])]
    assert len({fitted().fingerprint, *(lm.fingerprint for lm in others)}) == 5


@pytest.mark.parametrize("name", ["config.json", "ngram.safetensors"])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"there is no file .*{name}: "):
        NgramLM.from_pretrained(folder)


def test_cut_and_damaged_counts(folder: Path) -> None:
    path = folder / "ngram.safetensors"
    data = path.read_bytes()
    for cut in (0, 4, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"ngram.safetensors is damaged or of another version .*: fit the model"):
            NgramLM.from_pretrained(folder)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UserError, match=r"is not what config.json next to it describes: fit the model"):
        NgramLM.from_pretrained(folder)


def test_killed_between_the_two_files(folder: Path) -> None:
    config = (folder / "config.json").read_bytes()
    fitted(STREAM[:7]).save_pretrained(folder)
    (folder / "config.json").write_bytes(config)
    with pytest.raises(UserError, match=r"ngram.safetensors is not what config.json next to it describes"):
        NgramLM.from_pretrained(folder)


def test_foreign_arrays(folder: Path) -> None:
    save_file({"weight": np.zeros((2, 2), np.float32)}, folder / "ngram.safetensors")
    with pytest.raises(UserError, match=r"is damaged or of another version \(KeyError: 'keys.1'\): fit the model"):
        NgramLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "huggingface"}, "describes a model of kind 'huggingface': give the folder of an n-gram model"),
        ({"vocab_size": 5}, "is not what config.json next to it describes"),
        ({"tokenizer": "xyz"}, "is not what config.json next to it describes"),
        ({"order": "five"}, "is damaged or of another version"),
        ({"order": 4}, "is damaged or of another version"),
        ({"order": None}, "is damaged or of another version"),
    ],
    ids=str,
)
def test_edited_configuration(folder: Path, change: dict[str, object], sentence: str) -> None:
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    with pytest.raises(UserError, match=sentence):
        NgramLM.from_pretrained(folder)


@pytest.mark.parametrize("text", ["[1, 2]", "{}", "{"])
def test_configuration_of_another_shape(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(
        UserError,
        match=r"config.json (describes a model of kind None|is not valid JSON|does not contain a)",
    ):
        NgramLM.from_pretrained(folder)
