import json
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from freenergy.core.errors import UserError
from freenergy.corpus import BytePairTokenizer, Tokenizer, WordTokenizer
from freenergy.corpus.tokenizer import EOS_TOKEN, UNKNOWN, byte_alphabet, learn, sample


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_byte_level_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "x"]) == [ids, tokenizer.encode("x")]
    assert b"".join(tokenizer.bytes_of_tokens[i] for i in ids) == text.encode()
    assert tokenizer.eos not in ids


def test_text_that_spells_a_special_token_is_text(tokenizer):
    text = f"a{EOS_TOKEN}b"
    assert tokenizer.eos not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos]) == ""
    words = learn(WordTokenizer(), [f"a {EOS_TOKEN} b"])
    assert words.encode(f"a {EOS_TOKEN} b") == words.encode(f"a {UNKNOWN} b")


def test_learning_is_deterministic_across_processes(make_text, tokenizer):
    code = (
        "import sys; from freenergy.corpus.tokenizer import *; from freenergy.corpus.settings import *;"
        "t = sys.stdin.read(); print(learn(BytePairTokenizer(vocab_size=300), [t]).fingerprint,"
        "learn(WordTokenizer(), [t]).fingerprint)"
    )
    text = make_text(0, 500)
    ran = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [tokenizer.fingerprint, learn(WordTokenizer(), [text]).fingerprint]


def test_words_of_the_training_text_only():
    words = learn(WordTokenizer(), ["the cat <unk> the dog", "a the"])
    assert words.vocab_size == len({"the", "cat", "dog", "a", UNKNOWN, EOS_TOKEN})
    assert words.decode(words.encode("the bird <unk>\n cat")) == "the <unk> <unk> cat"
    assert words.encode("the") == [1], "the most frequent word comes first after <unk>"
    assert words.bytes_of_tokens is None
    few = learn(WordTokenizer(vocab_size=3), ["the cat the dog the"])
    assert few.vocab_size == 3
    assert few.decode(few.encode("the cat")) == "the <unk>"


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_saved_tokenizers_load_here_and_in_transformers(tmp_path, make_text, kind):
    from transformers import AutoTokenizer

    text = make_text(1, 300)
    ours = learn(BytePairTokenizer(vocab_size=280) if kind == "bpe" else WordTokenizer(), [text])
    ours.save(tmp_path)
    again = Tokenizer.from_pretrained(tmp_path)
    assert (again.fingerprint, again.eos, again.vocab_size) == (ours.fingerprint, ours.eos, ours.vocab_size)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == ours.eos
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert len(theirs) == ours.vocab_size


def test_fingerprint_sees_the_vocabulary_and_eos(tokenizer, make_text):
    other = learn(BytePairTokenizer(vocab_size=299), [make_text(0, 500)])
    inner = tokenizers.Tokenizer.from_str(tokenizer._inner.to_str())
    same, moved = Tokenizer(inner, tokenizer.eos), Tokenizer(inner, 5)
    assert same.fingerprint == tokenizer.fingerprint
    assert len({tokenizer.fingerprint, other.fingerprint, moved.fingerprint}) == 3


def checkpoint(folder, **files):
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["</s>"])
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "</s>"}},
        {"tokenizer_config": {"eos_token": {"content": "</s>"}}},
        {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "</s>"}},
        {"config": {"eos_token_id": 2}},
        {"generation_config": {"eos_token_id": [2, 1]}},
    ],
)
def test_eos_is_found_wherever_checkpoints_put_it(tmp_path, files):
    loaded = Tokenizer.from_pretrained(checkpoint(tmp_path, **files))
    assert loaded.eos == 2
    assert loaded.encode("a b a b") == [0, 1, 0, 1], "neither cut nor padded"


def test_eos_is_no_text_even_where_it_is_not_marked_special(tokenizer):
    inner = tokenizers.Tokenizer.from_str(tokenizer._inner.to_str())
    eos = inner.token_to_id("a")
    odd = Tokenizer(inner, eos)
    assert odd.decode([eos, inner.token_to_id("b")]) == "b"
    assert odd.bytes_of_tokens[eos] == b""


def test_no_eos_no_tokenizer_and_damaged(tmp_path):
    with pytest.raises(UserError, match="does not define EOS"):
        Tokenizer.from_pretrained(checkpoint(tmp_path))
    with pytest.raises(UserError, match="no token 77"):
        Tokenizer.from_pretrained(checkpoint(tmp_path, config={"eos_token_id": 77}))
    with pytest.raises(UserError, match="there is no tokenizer at"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="transformers cannot load"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path):
    vocabulary = {token: i for i, token in enumerate([*sorted(byte_alphabet()), "th", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    loaded = Tokenizer.from_pretrained(tmp_path)
    assert loaded.eos == vocabulary["<|endoftext|>"]
    assert loaded.encode("the") == [vocabulary["th"], vocabulary["e"]]


def test_gguf_files(tmp_path):
    gguf = pytest.importorskip("gguf")
    alphabet = sorted(byte_alphabet())
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, "th", "<|endoftext|>"])
    writer.add_token_types([1] * (len(alphabet) + 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(alphabet) + 1)
    writer.add_bos_token_id(len(alphabet) + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    loaded = Tokenizer.from_pretrained(tmp_path / "tiny.gguf")
    assert loaded.eos == len(alphabet) + 1
    assert loaded.encode("the") == [len(alphabet), alphabet.index("e")]
    loaded.save(tmp_path / "saved")
    assert Tokenizer.from_pretrained(tmp_path / "saved").fingerprint == loaded.fingerprint


def test_alphabet_is_the_library_s():
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == [bytes([i]) for i in range(256)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=50), st.integers(1, 100))
def test_samples_are_spread_and_capped(lengths, most):
    texts = [chr(97 + i % 26) * n for i, n in enumerate(lengths)]
    total = sum(lengths)
    kept = list(sample(texts, total, most))
    assert sum(map(len, kept)) < most + 9
    if most >= total:
        assert kept == texts
    else:
        assert sum(map(len, kept)) >= most - 9
