"""The Hugging Face adapter: the same numbers as a plain forward pass, one copy of the prefix, honest loading."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from freenergy import Continuations, HuggingFaceLM, Rng, Sequences, SequenceSpace, UserError
from freenergy.lm import huggingface, shared_prefix
from freenergy.lm.presets import PRESETS, build, count_parameters, preset

V = 50


def plain_log_prob(model, context, x):
    """A full forward pass over one string, as anyone would write it."""
    tokens = torch.tensor([[*context, *x]])
    with torch.no_grad():
        log_p = model(tokens).logits[0].double().log_softmax(-1)
    return sum(float(log_p[len(context) + t - 1, token]) for t, token in enumerate(x))


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = build(config, Rng(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10)  # sharp attention, as in a trained model
    return HuggingFaceLM(model, eos=0)


def test_a_real_pretrained_model_agrees_with_a_plain_forward_pass(story_model):
    lm, pieces = story_model
    assert lm.shares_prefix
    once = [1, *(pieces.index(piece) for piece in (" Once", " upon", " a", " time"))]
    contexts = [once, once[:3], [1]]
    draws = lm.sample(Sequences.from_lists(contexts), 8, SequenceSpace(vocab_size=512, length=60), Rng(0))
    log_p = lm.log_prob(draws.x)
    for b, row in enumerate(draws.x.lists()):
        for n, x in enumerate(row):
            plain = plain_log_prob(lm.model, contexts[b], x)
            assert abs(float(log_p[b, n]) - plain) < 1e-4
            assert abs(float(draws.log_base[b, n]) - plain) < 1e-4


def test_a_real_pretrained_model_writes_what_it_was_trained_on(story_model):
    """After "Once upon a time" it must prefer a comma to every other token, as its training text does."""
    lm, pieces = story_model
    once = [1, *(pieces.index(piece) for piece in (" Once", " upon", " a", " time"))]
    assert pieces[int(lm.next_log_probs(Sequences.from_lists([once])).argmax())] == ","


def test_only_one_copy_of_the_prefix_is_attended_to(llama, monkeypatch):
    """The keys of the prefix have B rows in the attention, whatever N is, and nothing of size B·N·P is made."""
    seen = []
    part = shared_prefix._part

    def spy(q, k, v, seen_mask, softcap):
        seen.append(tuple(k.shape))
        return part(q, k, v, seen_mask, softcap)

    monkeypatch.setattr(shared_prefix, "_part", spy)
    monkeypatch.setattr(llama, "_decoder", None)  # as for an architecture that has no steps of ours
    contexts = Sequences.from_lists([[1] * 20, [2] * 17])
    llama.sample(contexts, 9, SequenceSpace(vocab_size=V, length=4), Rng(0))
    rows = {shape[0] for shape in seen if shape[2] == 20}
    assert rows == {2}
    assert {shape[0] for shape in seen if shape[2] < 20} == {18}


def test_the_stock_attention_is_put_back(llama, monkeypatch):
    monkeypatch.setattr(llama, "_decoder", None)
    stock = llama.model.config._attn_implementation
    llama.sample(Sequences.from_lists([[1, 2]]), 2, SequenceSpace(vocab_size=V, length=3), Rng(0))
    assert llama.model.config._attn_implementation == stock != shared_prefix.NAME


def test_gradients_flow_through_both_parts(llama):
    """d log P / d θ by the shared way equals the plain way: a copy of the base can learn."""
    x = Continuations.from_lists([[1, 2, 3], [4]], [[[5, 6], [7]], [[8], [9, 10]]])
    model = LlamaForCausalLM(llama.model.config)
    lm = HuggingFaceLM(model, eos=0)
    gradients = []
    for shared in (True, False):
        lm.shares_prefix = shared
        model.requires_grad_(True).zero_grad()
        lm.log_prob(x).sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


def test_an_architecture_of_unknown_attention_is_read_plainly(llama, monkeypatch):
    """If the shared way gave other numbers, it would be found out on loading and not be used."""
    part = shared_prefix._part
    monkeypatch.setattr(shared_prefix, "_part", lambda q, k, v, seen, softcap: part(1.1 * q, k, v, seen, softcap))
    wrong = HuggingFaceLM(llama.model, eos=0)
    assert not wrong.shares_prefix
    monkeypatch.undo()
    x = Continuations.from_lists([[1, 2, 3]], [[[5, 6], [7, 8]]])
    torch.testing.assert_close(wrong.log_prob(x), llama.log_prob(x), atol=1e-4, rtol=0)


def test_every_way_to_sample_draws_the_same(llama, monkeypatch):
    """Own steps, compiled ones, the model's, and whole strings: the same tokens from the same stream."""
    space, contexts = SequenceSpace(vocab_size=V, length=5, eos=0), Sequences.from_lists([[1, 2, 3], [4]])
    ways = [llama, HuggingFaceLM(llama.model, eos=0, fused=True)]
    ways += [HuggingFaceLM(llama.model, eos=0) for _ in range(2)]
    ways[2]._decoder = ways[3]._decoder = None
    ways[3].shares_prefix = False
    names = [lm.decodes_by for lm in ways]
    assert names[0] == "own steps"
    assert names[1] in ("compiled steps", "own steps")  # as there is a compiler
    assert names[2:] == ["the model's steps", "whole strings"]
    draws = [lm.sample(contexts, 6, space, Rng(0)) for lm in ways]
    for other in draws[1:]:
        assert torch.equal(other.x.tokens, draws[0].x.tokens)
        torch.testing.assert_close(other.log_base, draws[0].log_base, atol=1e-4, rtol=0)


def test_the_environment_asks_for_compiled_steps(llama, monkeypatch):
    asked = []
    of = huggingface.Decoder.of
    monkeypatch.setattr(huggingface.Decoder, "of", lambda model, compiled: asked.append(compiled) or of(model))
    for value in ("1", "0", ""):
        monkeypatch.setenv(huggingface.FUSED, value)
        HuggingFaceLM(llama.model, eos=0)
        HuggingFaceLM(llama.model, eos=0, fused=True)
    monkeypatch.delenv(huggingface.FUSED)
    HuggingFaceLM(llama.model, eos=0)
    assert asked == [True, True, False, True, False, True, False]


def test_weights_that_change_are_the_weights_that_sample(llama):
    """Training, or moving a model to another precision, after it was wrapped."""
    lm = HuggingFaceLM(LlamaForCausalLM(llama.model.config), eos=0)
    space, contexts = SequenceSpace(vocab_size=V, length=4), Sequences.from_lists([[1, 2]])
    before = lm.sample(contexts, 5, space, Rng(0))
    with torch.no_grad():
        for weight in lm.model.parameters():
            weight.copy_(2 * weight)
    after = lm.sample(contexts, 5, space, Rng(0))
    torch.testing.assert_close(after.log_base, lm.log_prob(after.x), atol=1e-4, rtol=0)
    assert (before.log_base - lm.log_prob(before.x)).abs().max() > 1e-3
    lm.model.double()
    wide = lm.sample(contexts, 5, space, Rng(0))
    torch.testing.assert_close(wide.log_base, lm.log_prob(wide.x), atol=1e-6, rtol=0)  # their norm is float32
    assert lm.decodes_by == "own steps"
    lm.model.bfloat16()
    assert lm.decodes_by == "the model's steps"
    assert lm.sample(contexts, 5, space, Rng(0)).log_base.isfinite().all()


def test_prefix_longer_than_the_context_is_one_sentence(llama):
    with pytest.raises(UserError, match="do not fit the model's context of 64 tokens: shorten the prefix to 60"):
        llama.sample(Sequences.from_lists([[1] * 62]), 1, SequenceSpace(vocab_size=V, length=4), Rng(0))
    with pytest.raises(UserError, match="do not fit"):
        llama.log_prob(Continuations.from_lists([[1] * 62], [[[1, 2, 3]]]))


def test_save_and_load_round_trip(llama, tmp_path):
    llama.save_pretrained(tmp_path / "model")
    again = HuggingFaceLM.from_pretrained(tmp_path / "model")
    assert again.eos == 0
    x = Continuations.from_lists([[1, 2, 3]], [[[5, 6], [7, 8]]])
    assert torch.equal(again.log_prob(x), llama.log_prob(x))
    assert {p.suffix for p in (tmp_path / "model").iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize(
    "damage", ["truncated", "weights of another size", "not json", "no weights", "pickle", "nothing"]
)
def test_damaged_checkpoints_are_one_sentence(llama, tmp_path, damage):
    folder = tmp_path / "model"
    llama.save_pretrained(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "weights of another size":
        config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    elif damage == "not json":
        config.write_text("{")
    elif damage == "no weights":
        weights.unlink()
    elif damage == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif damage == "nothing":
        for path in folder.iterdir():
            path.unlink()
    with pytest.raises(UserError) as caught:
        HuggingFaceLM.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_checkpoint_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no checkpoint"):
        HuggingFaceLM.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "millions"), [("paper-12l", 203), ("paper-24l", 203), ("balm-12l", 408), ("balm-24l", 408)]
)
def test_the_papers_sizes(name, millions):
    """Table 1 of Deng et al. 2020, at their vocabulary, without allocating a weight."""
    count = count_parameters(preset(name).config(vocab_size=50_096, eos=0))
    assert abs(count / (1e6 * millions) - 1) < 0.06


def test_small_presets_are_small():
    sizes = {name: count_parameters(PRESETS[name].config(vocab_size=4096, eos=0)) for name in ("tiny", "small")}
    assert sizes["tiny"] < 4e6 < sizes["small"] < 2e7
    with pytest.raises(UserError, match="there is no preset 'huge'"):
        preset("huge")


def test_a_gguf_file_loads(tmp_path):
    """A tiny Llama written as GGUF reads back with the same numbers."""
    gguf = pytest.importorskip("gguf")
    config = LlamaConfig(
        vocab_size=V, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = build(config, Rng(1)).eval()
    write_gguf(gguf, model, tmp_path / "tiny.gguf")
    lm = HuggingFaceLM.from_pretrained(tmp_path / "tiny.gguf")
    x = Continuations.from_lists([[1, 2, 3]], [[[5, 6], [7, 8]]])
    torch.testing.assert_close(lm.log_prob(x), HuggingFaceLM(model, eos=0).log_prob(x), atol=1e-5, rtol=0)
    lm.save_pretrained(tmp_path / "converted")
    again = HuggingFaceLM.from_pretrained(tmp_path / "converted")
    assert torch.equal(again.log_prob(x), lm.log_prob(x))


def write_gguf(gguf, model, path):
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for ours, theirs in names.items():
        weight = state[f"model.layers.0.{ours}.weight"]
        if theirs in ("attn_q", "attn_k"):  # GGUF keeps the rotary pairs of llama side by side
            heads = config.num_attention_heads
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        tensors[f"blk.0.{theirs}.weight"] = weight
    for name, weight in tensors.items():
        writer.add_tensor(name, weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_no_remote_code_is_run(tmp_path):
    """A checkpoint that names code of its own is refused, and its code is not run."""
    folder = tmp_path / "model"
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=16, eos_token_id=0))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n")
    with pytest.raises(UserError):
        HuggingFaceLM.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()
