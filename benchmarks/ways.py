"""Ways to sample n continuations of one prefix with a causal language model, and the models they are tried on.

"generate" is ``model.generate(num_return_sequences=n)`` of transformers, which gives no log-probabilities; "expanded
cache" is what an able user writes instead: the prefix read once, its cache repeated n times, a loop of forward passes;
CTranslate2 runs where it is installed, and is given the prefix once, as a static prompt. "ours" and "ours, fused" are
``HuggingFaceLM`` without and with its compiled step.
"""

import copy
from functools import partial
from itertools import product

import torch
from transformers import GPT2Config, LlamaConfig

from freenergy import HuggingFaceLM, Rng, Sequences, SequenceSpace
from freenergy.lm.presets import build

PREFIX, LENGTH = 120, 40
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


def six(vocabulary=8000, room=256):
    """Six layers of width 256."""
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
        max_position_embeddings=room, tie_word_embeddings=True, **SPECIAL,
    )  # fmt: skip


def gpt2_small():
    return GPT2Config(**SPECIAL)


def llama_135m():
    """The sizes of SmolLM2-135M."""
    return LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, **SPECIAL,
    )  # fmt: skip


MODELS = {"six": six, "gpt2-small": gpt2_small, "llama-135m": llama_135m}


def made(config):
    """A network with weights drawn at random: the cost of a step does not look at them."""
    return build(config, Rng(0)).eval().requires_grad_(False)


def prefix_of(model, length=PREFIX):
    return torch.randint(1, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def ours(model, fused):
    """Draws with log-probabilities."""
    return drawing_with(HuggingFaceLM(model, eos=0, fused=fused))


def drawing_with(lm):
    def draw(prefix, n):
        space = SequenceSpace(vocab_size=lm.vocab_size, length=LENGTH)
        return lm.sample(Sequences(prefix, torch.tensor([prefix.shape[1]])), n, space, Rng(0))

    return draw


def fallbacks(model):
    """Ours as architectures have it that we do not know: by how a continuation is sampled there."""
    known, shared, plain = (HuggingFaceLM(model, eos=0, fused=False) for _ in range(3))
    shared._decoder = plain._decoder = None
    plain.shares_prefix = False
    return {lm.decodes_by: drawing_with(lm) for lm in (known, shared, plain)}


@torch.no_grad()
def generate(model, prefix, n):
    return model.generate(
        prefix, attention_mask=torch.ones_like(prefix), num_return_sequences=n, do_sample=True, top_k=0,
        min_new_tokens=LENGTH, max_new_tokens=LENGTH, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def in_parts(draw, most, prefix, n):
    """The same n in several calls."""
    return [draw(prefix, min(most, n - done)) for done in range(0, n, most)]


@torch.no_grad()
def expanded(model, prefix, n):
    """Tokens with log-probabilities, from a cache that holds the prefix n times."""
    out = model(prefix, use_cache=True, logits_to_keep=1)
    cache, tokens, log_prob = out.past_key_values, [], 0
    cache.batch_repeat_interleave(n)
    log_p = out.logits[:, -1].log_softmax(-1).expand(n, -1)
    for t in range(LENGTH):
        tokens.append(torch.multinomial(log_p.exp(), 1))
        log_prob = log_prob + log_p.gather(1, tokens[-1])
        if t + 1 < LENGTH:
            log_p = model(tokens[-1], past_key_values=cache).logits[:, -1].log_softmax(-1)
    return torch.cat(tokens, dim=1), log_prob


WAYS = {  # what makes a function of a prefix and n from a model
    "generate": partial(partial, generate),
    "expanded cache": partial(partial, expanded),
    "ours": partial(ours, fused=False),
    "ours, fused": partial(ours, fused=True),
}
OURS = ("ours", "ours, fused")


def ctranslate2_ways(model, folder, settings):
    """The same for CTranslate2, in float32 and int8; none where it is not there.

    ``settings`` are pairs of workers and batch size: all threads on one batch, or batches side by side. Making a
    generator gives its number of threads to the whole process, torch included: that is taken back.
    """
    try:
        import ctranslate2
    except ImportError:
        return {}
    names = [f"<{i}>" for i in range(model.config.vocab_size)]
    if settings:
        _convert(model, names, folder)
    found, threads = {}, torch.get_num_threads()
    for kind, (workers, batch) in product(("float32", "int8"), settings):
        shares = {"inter_threads": workers, "intra_threads": max(1, threads // workers)}
        generator = ctranslate2.Generator(folder, compute_type=kind, **shares)
        torch.set_num_threads(threads)
        name = f"CTranslate2 {kind}, {workers} × {batch}"
        found[name] = partial(_translated, generator, names, batch)
    return found


def _convert(model, names, folder):
    from ctranslate2.converters.transformers import GPT2Loader, LlamaLoader

    loader = LlamaLoader if model.config.model_type == "llama" else GPT2Loader
    spec = loader().get_model_spec(copy.deepcopy(model))  # it takes layers away while it reads them
    spec.register_vocabulary(names)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = names[0]
    spec.validate()
    spec.save(folder)


def _translated(generator, names, batch, prefix, n):
    start = [names[token] for token in prefix[0].tolist()]
    return generator.generate_batch(
        [start[-1:]] * n, static_prompt=start[:-1], max_batch_size=batch, max_length=LENGTH, min_length=LENGTH,
        sampling_topk=0, include_prompt_in_result=False, return_scores=True, end_token=[],
    )  # fmt: skip
