"""Reads the checkpoint format of llama2.c (version 0) into a Hugging Face Llama: a real model of 260 thousand weights.

The file: seven int32 (width, feed-forward, layers, heads, key-value heads, vocabulary, context), then float32 weights
in the order below. Its rotary pairs are neighbours; Hugging Face pairs the halves of a head, so rows of q and k move.
"""

import struct
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def load(path: Path) -> LlamaForCausalLM:
    data = path.read_bytes()
    d, ff, layers, heads, kv, vocab, context = struct.unpack("7i", data[:28])
    weights = np.frombuffer(data[28:], dtype=np.float32)
    at = 0

    def take(*shape):
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return torch.from_numpy(weights[at - count : at].copy()).view(*shape)

    head = d // heads
    embed, norm_1 = take(abs(vocab), d), take(layers, d)
    q, k, v = take(layers, d, d), take(layers, kv * head, d), take(layers, kv * head, d)
    o, norm_2 = take(layers, d, d), take(layers, d)
    gate, down, up = take(layers, ff, d), take(layers, d, ff), take(layers, ff, d)
    norm = take(d)

    def halves(rows, count):
        return rows.view(count, head // 2, 2, d).transpose(1, 2).reshape(count * head, d)

    config = LlamaConfig(
        vocab_size=abs(vocab), hidden_size=d, intermediate_size=ff, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, max_position_embeddings=context, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    state = {"model.embed_tokens.weight": embed, "lm_head.weight": embed, "model.norm.weight": norm}
    for i in range(layers):
        state |= {
            f"model.layers.{i}.input_layernorm.weight": norm_1[i],
            f"model.layers.{i}.self_attn.q_proj.weight": halves(q[i], heads),
            f"model.layers.{i}.self_attn.k_proj.weight": halves(k[i], kv),
            f"model.layers.{i}.self_attn.v_proj.weight": v[i],
            f"model.layers.{i}.self_attn.o_proj.weight": o[i],
            f"model.layers.{i}.post_attention_layernorm.weight": norm_2[i],
            f"model.layers.{i}.mlp.gate_proj.weight": gate[i],
            f"model.layers.{i}.mlp.down_proj.weight": down[i],
            f"model.layers.{i}.mlp.up_proj.weight": up[i],
        }
    model.load_state_dict(state)
    return model


def vocabulary(path: Path, size: int) -> list[str]:
    """The pieces of a llama2.c tokenizer file: int32 longest, then (float32 score, int32 length, bytes) each."""
    data, at, pieces = path.read_bytes(), 4, []
    for _ in range(size):
        length = struct.unpack("i", data[at + 4 : at + 8])[0]
        pieces.append(data[at + 8 : at + 8 + length].decode("utf-8", errors="replace"))
        at += 8 + length
    return pieces
