"""Strangers' files: caches, checkpoints, patterns, pipes, names; all are refused in bounded time or change nothing."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from freenergy import HuggingFaceLM, Rng, Sequences, SequenceSpace, UserError, load_recipe
from freenergy.core.progress import SILENT
from freenergy.core.sequences import Continuations
from freenergy.core.trusted_library import is_trusted, loaded_library
from freenergy.corpus.documents import split_documents
from freenergy.corpus.read import find, read
from freenergy.corpus.resources import table
from freenergy.corpus.resources.fetch import ChecksumError, locate
from freenergy.corpus.settings import CorpusSettings
from freenergy.energies.call import check_energies
from freenergy.lm.checkpoints import load_checkpoint
from freenergy.recipes.load import is_code

V, PADDED = 40, 48
fetching = importlib.import_module("freenergy.corpus.resources.fetch")  # the package exports a function of this name


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = GPTNeoXConfig(vocab_size=PADDED, max_position_embeddings=64, eos_token_id=0, bos_token_id=0, **sizes)
    return GPTNeoXForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def checkpoint(network, tmp_path):
    network.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


# checkpoints


@pytest.mark.parametrize(
    ("name", "value"), [("num_hidden_layers", 10**9), ("hidden_size", 2**40), ("vocab_size", 10**12)]
)
def test_a_config_that_would_take_any_memory(checkpoint, name, value):
    """D13: a billion layers took minutes before."""
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {name: value}))
    start = time.monotonic()
    with pytest.raises(UserError, match=f"has {name} = {value}"):
        load_checkpoint(checkpoint)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", ["../../../x.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_that_names_files_elsewhere(checkpoint, name):
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="outside of its folder"):
        load_checkpoint(checkpoint)


def test_a_weight_that_is_not_a_number_is_named(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    name = next(name for name in weights if "dense" in name and name.endswith("weight"))
    weights[name][0, 0] = torch.nan
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"the weight .*dense.* has a NaN"):
        load_checkpoint(checkpoint)


# padded vocabularies (D9)


def test_rows_beyond_the_tokenizer_are_left_out(checkpoint, network):
    """P(v | c) = e^{l_v} / Σ_{u < V} e^{l_u}: draws, scores and spaces agree on V, and the mass left out is known."""
    lm = HuggingFaceLM.from_pretrained(checkpoint, eos=0, vocab_size=V)
    assert lm.vocab_size == V
    contexts = Sequences.from_lists([[0, 5, 7]])
    logits = network.eval()(torch.tensor([[0, 5, 7]])).logits[0, -1].double()
    wanted = logits[:V].log_softmax(0)
    torch.testing.assert_close(lm.next_log_probs(contexts)[0].double(), wanted, atol=1e-5, rtol=0)
    x = Continuations.from_lists([[0, 5, 7]], [[[v] for v in range(V)]])
    torch.testing.assert_close(lm.log_prob(x)[0].double(), wanted, atol=1e-5, rtol=0)
    assert float(lm.log_prob(x).double().exp().sum()) == pytest.approx(1, abs=1e-5)
    mass = float(network(torch.tensor([[0]])).logits[0, -1].double().softmax(0)[V:].sum())
    assert (lm.padding.rows, lm.padding.mass) == (PADDED - V, pytest.approx(mass, abs=1e-6))
    draws = lm.sample(contexts, 300, SequenceSpace(vocab_size=V, length=4), Rng(1))
    assert int(draws.x.tokens.max()) < V
    torch.testing.assert_close(draws.log_base, lm.log_prob(draws.x), atol=1e-4, rtol=0)
    mutant = HuggingFaceLM.from_pretrained(checkpoint, eos=0)  # as it was: a seventh of the draws is no token
    assert int(mutant.sample(contexts, 300, SequenceSpace(vocab_size=PADDED, length=4), Rng(1)).x.tokens.max()) >= V


# compiled code (D11)


@pytest.fixture
def compiled(tmp_path):
    """A library of one function, the way to compile it, and how often that was done."""
    if shutil.which("cc") is None:
        pytest.skip("no compiler here")
    source, calls = tmp_path / "own.c", []
    source.write_text("int answer(void) { return 42; }")

    def compile_to(aside):
        calls.append(aside)
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(aside)], check=True)

    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path / "cache" / "own.so", compile_to, calls


def test_a_library_is_compiled_once(compiled):
    path, compile_to, calls = compiled
    assert loaded_library(path, ["answer"], compile_to).answer() == 42
    assert loaded_library(path, ["answer"], compile_to).answer() == 42
    assert len(calls) == 1


@pytest.mark.parametrize("how", ["content", "mode", "folder", "link", "no hash", "owner"])
def test_a_library_of_others_is_not_loaded(compiled, tmp_path, monkeypatch, how):
    path, compile_to, calls = compiled
    loaded_library(path, ["answer"], compile_to)
    evil = tmp_path / "evil.so"
    (tmp_path / "evil.c").write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void run(void) {{ fopen("{tmp_path}/PWNED", "w"); }}'
    )
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "evil.c"), "-o", str(evil)], check=True)
    if how == "owner":
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        assert not is_trusted(path)
        with pytest.raises(OSError, match="can be written by others"):
            loaded_library(path, ["answer"], compile_to)
        return
    path.unlink()
    shutil.copy(evil, path)
    if how == "mode":
        path.chmod(0o777)
    if how == "folder":
        path.parent.chmod(0o777)
    if how == "link":
        path.unlink()
        path.symlink_to(evil)
    if how == "no hash":
        path.with_suffix(".json").unlink()
    assert not is_trusted(path)
    if how == "folder":
        with pytest.raises(OSError, match="can be written by others"):
            loaded_library(path, ["answer"], compile_to)
    else:
        assert loaded_library(path, ["answer"], compile_to).answer() == 42
        assert len(calls) == 2
    assert not (tmp_path / "PWNED").exists()


def test_a_library_without_its_functions_is_compiled_again(compiled):
    path, compile_to, calls = compiled
    loaded_library(path, ["answer"], compile_to)
    with pytest.raises(OSError, match="not compiled as it should be"):
        loaded_library(path, ["other"], compile_to)
    assert len(calls) == 2


# cached resources


@pytest.fixture
def resource(tmp_path, monkeypatch):
    """A resource of one file, in the cache."""
    import hashlib

    monkeypatch.setenv("FREENERGY_CACHE", str(tmp_path / "cache"))
    data = b"once upon a time\n" * 50
    one = next(iter(table.RESOURCES.values()))
    file = table.File("text.txt", len(data), hashlib.sha256(data).hexdigest())
    own = replace(one, name="own-text", files=(file,), routes=())
    monkeypatch.setattr(fetching, "RESOURCES", {**table.RESOURCES, "own-text": own})
    place = tmp_path / "cache" / "resources" / "own-text"
    place.mkdir(parents=True)
    (place / "text.txt").write_bytes(data)
    return place


def test_a_turned_bit_in_a_cached_resource_is_found(resource):
    assert fetching.fetch("own-text") == resource
    assert fetching.fetch("own-text") == resource
    data = bytearray((resource / "text.txt").read_bytes())
    data[7] ^= 1
    (resource / "text.txt").write_bytes(data)
    with pytest.raises(ChecksumError, match="checksum of own-text"):
        fetching.fetch("own-text")


def test_a_resource_is_hashed_once(resource, monkeypatch):
    fetching.fetch("own-text")
    monkeypatch.setattr(fetching, "file_hash", lambda path: pytest.fail("hashed again"))
    fetching.fetch("own-text")


def test_a_folder_here_does_not_shadow_a_resource(resource, tmp_path, monkeypatch):
    said = []

    class Saying:
        def track(self, label, total=None, unit=""):
            return SILENT.track(label, total, unit)

        def say(self, message):
            said.append(message)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own-text").mkdir()
    assert locate("own-text", Saying()) == resource
    assert "write ./own-text" in said[0]
    assert locate("./own-text").resolve() == (tmp_path / "own-text").resolve()


# texts and recipes


def test_a_pattern_that_takes_for_ever_is_refused():
    settings = CorpusSettings(source="x", document_start="^(a+)+$")
    start = time.process_time()
    assert list(split_documents(["a" * 40 + "!\n"], settings)).count(None) == 1  # took minutes
    with pytest.raises(UserError, match="without nested repetitions"):
        list(split_documents(["a" * 60 + "!\n"], replace(settings, document_start="^(a|aa)+$")))
    assert time.process_time() - start < 5
    found = list(split_documents(["= One =\ntext\n= Two =\nmore\n"], replace(settings, document_start="^= ")))
    assert found.count(None) == 3


def test_a_pipe_is_not_a_corpus(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="is a pipe or a device"):
        find(tmp_path / "pipe.txt")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_called_so(tmp_path, encoding):
    mark = b"\xfe\xff" if encoding.endswith("be") else b""
    (tmp_path / "a.txt").write_bytes(mark + "abc".encode(encoding))
    with pytest.raises(UserError, match="is UTF-16"):
        list(read([tmp_path / "a.txt"], CorpusSettings(source="x"), lambda amount, note="": None))


def test_only_a_name_that_ends_so_is_code(tmp_path, monkeypatch, call):
    """D12: evil.py:x.toml ran evil.py although such a TOML file was there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('PWNED').touch()\n")
    (tmp_path / "evil.py:x.toml").write_text("name = 'mine'\n")
    with pytest.raises(UserError):
        load_recipe("evil.py:x.toml")
    assert not (tmp_path / "PWNED").exists()
    assert not is_code("evil.py:x.toml")
    status, _, err = call("run", "evil.py:recipe")
    assert status == 2
    assert err.startswith("running the code of evil.py")


def test_a_terminal_of_ascii_breaks_nothing(tmp_path):
    """Texts that it cannot show become question marks."""
    code = "from freenergy.cli import main; import sys; sys.argv = ['freenergy', 'run', 'ß漢.toml']; main()"
    own = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=own, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr


def test_complex_energies_are_refused():
    with pytest.raises(UserError, match="complex"):
        check_energies(torch.zeros(1, 2, dtype=torch.complex64), object(), (1, 2))


def test_a_text_cannot_turn_the_direction_of_a_page(tmp_path):
    from freenergy.report import page_templates

    (tmp_path / "a.j2").write_text("<p>{{ text }}</p>")
    shown = page_templates(tmp_path).get_template("a.j2").render(text="a\u202eb <b> é")
    assert shown == "<p>a[U+202E]b &lt;b&gt; é</p>"


# the dialect


def test_small_things_of_the_dialect(server):
    import httpx

    found = httpx.post(f"{server}/v1/completions", json={"model": "tiny", "stop": ["a", "b", "c", "d", "e"]})
    assert found.status_code == 400
    assert "up to four" in found.json()["error"]["message"]
    chat = httpx.post(f"{server}/v1/chat/completions", json={"messages": []})
    assert chat.status_code == 404
    assert "/v1/completions" in chat.json()["error"]["message"]
