"""Fast decoding: the numbers of a plain forward pass, the law of ancestral sampling, one copy of everything."""

import copy
import ctypes
import math
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from freenergy import Continuations, HuggingFaceLM, Rng, Sequences, SequenceSpace, Truncation
from freenergy.core import compiled as compiler
from freenergy.core.rng import choose
from freenergy.core.truncation import ANCESTRAL, normalised
from freenergy.lm.activations import traced_ancestral
from freenergy.lm.decoding import drawing, fused, sampling
from freenergy.lm.decoding.families import Affine, take_apart
from freenergy.lm.decoding.load import Decoder, FastStepper, rows_at_once
from freenergy.lm.decoding.memory import stretches
from freenergy.lm.decoding.plain import PlainSteps
from freenergy.lm.network_steps import read
from freenergy.lm.stepping import Stepper, in_chunks
from freenergy.testing.enumerating import law

V = 11
CONTEXTS = [[1, 2, 3, 1, 2, 9, 8], [3], [2, 10, 1]]
TRUNCATIONS = [
    ANCESTRAL,
    Truncation(temperature=0.7),
    Truncation(temperature=1e-42),
    Truncation(top_k=1),
    Truncation(top_k=4, temperature=1.6),
    Truncation(top_k=5, top_p=0.6),
    Truncation(top_p=0.7),
    Truncation(top_p=0.8, temperature=0.5),
    Truncation(top_k=500),
    Truncation(top_p=1.0, temperature=2.0),
]


def network(name, *, dtype=torch.float32, scale=0.4, **options):
    """A tiny model with sharp attention."""
    sizes = {"vocab_size": V, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    depth = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 64}
    config = getattr(transformers, f"{name}Config")(**(sizes | depth | options))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(0, scale)
    return model.to(dtype).eval()


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "llama": lambda **k: network("Llama", num_key_value_heads=2, intermediate_size=48, **k),
    "llama, wide heads": lambda **k: network("Llama", num_key_value_heads=4, head_dim=32, intermediate_size=48, **k),
    "llama with biases, tied": lambda **k: network(
        "Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, intermediate_size=48, **k
    ),
    "llama, other angles": lambda **k: network("Llama", intermediate_size=48, rope_parameters=LLAMA3, **k),
    "mistral": lambda **k: network("Mistral", num_key_value_heads=1, intermediate_size=48, sliding_window=None, **k),
    "qwen2": lambda **k: network("Qwen2", num_key_value_heads=2, intermediate_size=48, **k),
    "gpt2": lambda **k: network("GPT2", **k),
    "neox": lambda **k: network("GPTNeoX", intermediate_size=48, **k),
    "neox, one after the other": lambda **k: network("GPTNeoX", intermediate_size=48, use_parallel_residual=False, **k),
}
UNKNOWN = {
    "another architecture": lambda: network("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "another activation": lambda: network("Llama", intermediate_size=48, hidden_act="gelu"),
    "a window that bites": lambda: network("Mistral", num_key_value_heads=2, intermediate_size=48, sliding_window=4),
    "windows in some layers": lambda: network(
        "Qwen2", num_key_value_heads=2, intermediate_size=48, use_sliding_window=True, sliding_window=4,
        max_window_layers=1,
    ),
    "angles that depend on the length": lambda: network(
        "Llama", intermediate_size=48, rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    ),
    "scores by depth": lambda: network("GPT2", scale_attn_by_inverse_layer_idx=True),
    "half precision": lambda: network("Llama", intermediate_size=48, dtype=torch.bfloat16),
}  # fmt: skip


def tokens(N=4, L=5):
    """Continuations that differ from each other early."""
    return torch.tensor([[[(3 * b + 5 * n + t * t + 1) % V for t in range(L)] for n in range(N)] for b in range(3)])


def whole(model, context, x, layers=()):
    """One string through a stock forward pass: log P at the places of x, and hidden states there."""
    with torch.no_grad():
        out = model(torch.tensor([[*context, *x]]), use_cache=False, output_hidden_states=True)
    at = slice(len(context) - 1, len(context) + len(x))
    states = [out.hidden_states[layer][0, at] for layer in layers]
    return out.logits[0, at].log_softmax(-1), torch.stack(states, dim=1) if layers else None


def begin(model, num, length, layers=(), *, compiled=False, contexts=CONTEXTS):
    decoder = Decoder.of(model, compiled=compiled)
    assert decoder is not None
    with torch.no_grad():
        first = read(model, Sequences.from_lists(contexts), layers)
    if compiled:  # whatever their number
        return FastStepper(decoder.network, first, num, length, layers, fused.kernels())
    return decoder.starting(first, length, layers)(num)


def check_steps(model, stepper, tolerance, layers=()):
    """Every step of every candidate is a plain forward pass of its whole string."""
    x = tokens()
    log_p, states = [stepper.first().unsqueeze(1).expand(-1, 4, -1)], [stepper.states.expand(-1, 4, -1, -1)]
    for t in range(x.shape[2]):
        log_p.append(stepper.step(x[:, :, t]))
        states.append(stepper.states)
    for b, context in enumerate(CONTEXTS):
        for n in range(4):
            expected, shown = whole(model, context, x[b, n].tolist(), layers)
            found = torch.stack([step[b, n] for step in log_p])
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
            if layers:
                seen = torch.stack([step[b, n] for step in states])
                torch.testing.assert_close(seen, shown, atol=tolerance, rtol=0)


def rounding(name):
    """transformers takes the norms of Llama in float32 whatever the weights are."""
    return 1e-10 if name.startswith(("gpt2", "neox")) else 3e-6


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_a_plain_forward_pass(name):
    """In float64 to the last digits: attention in two parts is exact, whatever the lengths of the contexts."""
    model = MODELS[name](dtype=torch.float64)
    stepper = begin(model, 4, 6, (0, 2, 3))
    assert isinstance(stepper, Stepper)
    check_steps(model, stepper, rounding(name), (0, 2, 3))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_left_alone(name):
    model = UNKNOWN[name]()
    before = {key: weight.data_ptr() for key, weight in model.state_dict().items()}
    assert Decoder.of(model) is None
    assert {key: weight.data_ptr() for key, weight in model.state_dict().items()} == before


def test_a_model_whose_numbers_differ_is_refused():
    """A known name is not enough: here the logits are bent behind our back."""
    model = MODELS["llama"]()
    assert Decoder.of(model) is not None
    model.register_forward_hook(lambda module, inputs, out: setattr(out, "logits", out.logits * 1.01))
    assert Decoder.of(model) is None


def test_a_model_without_room_for_the_comparison_is_refused():
    assert Decoder.of(network("GPT2", max_position_embeddings=8)) is None


def test_weights_are_the_models_own():
    """Nothing is held twice, what the model learns is decoded with, and nothing is copied a second time."""
    model = MODELS["llama with biases, tied"](dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    apart = take_apart(model)
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
    storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    held = [layer.qkv.weight for layer in apart.layers] + [layer.up.bias for layer in apart.layers]
    held += [apart.embedding, apart.head.weight, apart.layers[0].down.weight]
    assert {weight.untyped_storage().data_ptr() for weight in held} <= storages
    assert take_apart(model).layers[1].qkv.weight.data_ptr() == apart.layers[1].qkv.weight.data_ptr()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)
    check_steps(model, begin(model, 4, 6), rounding("llama"))


def test_a_model_that_was_taken_apart_saves_and_copies_as_before(tmp_path):
    model = MODELS["llama"]()
    take_apart(model)
    model.save_pretrained(tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    twin = copy.deepcopy(model)
    for other in (again, twin):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert next(model.parameters()).abs().max() > 0


def test_weights_that_were_moved_are_found_again():
    model = MODELS["qwen2"]()
    decoder = Decoder.of(model)
    model.double()
    with torch.no_grad():
        first = read(model, Sequences.from_lists(CONTEXTS), ())
    check_steps(model, decoder.starting(first, 6)(4), rounding("qwen2"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_candidates_change_places(name, compiled):
    """After ``select`` a candidate goes on as the one whose place it took; one candidate may take many places."""
    if compiled and fused.kernels() is None:
        pytest.skip("no C++ compiler here, so there are no compiled steps: the plain ones are tested")
    model, x = MODELS[name](), tokens()
    stepper = begin(model, 4, 6, (1,), compiled=compiled)
    rows = torch.tensor([[3, 3, 0, 1], [0, 1, 2, 3], [2, 0, 0, 0]])
    stepper.step(x[:, :, 0])
    stepper.step(x[:, :, 1])
    before = stepper.states.clone()
    stepper.select(rows)
    log_p = stepper.step(x[:, :, 2])
    for b, context in enumerate(CONTEXTS):
        for n in range(4):
            string = [*x[b, rows[b, n], :2].tolist(), int(x[b, n, 2])]
            torch.testing.assert_close(log_p[b, n], whole(model, context, string)[0][-1], atol=1e-4, rtol=0)
            assert not torch.equal(before[b, 0], before[b, 3])
    stepper = begin(model, 4, 6, (1,), compiled=compiled)
    stepper.select(rows)  # before anything was read all candidates are alike
    torch.testing.assert_close(stepper.step(x[:, :, 0])[2, 1], whole(model, CONTEXTS[2], [int(x[2, 1, 0])])[0][-1])


def test_the_prefix_is_held_once():
    stepper = begin(MODELS["llama"](), 50, 3)
    assert {tuple(keys.shape) for keys in stepper.memory.prefix_keys} == {(3 * 2, 7, 8)}
    assert {tuple(keys.shape) for keys in stepper.memory.keys} == {(1, 3, 2, 50, 3, 8)}


@pytest.mark.parametrize(("length", "expected"), [(1, (1, 1)), (16, (1, 16)), (17, (2, 9)), (40, (3, 14))])
def test_stretches_are_as_long_as_each_other(length, expected):
    assert stretches(length) == expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
@pytest.mark.parametrize("num", [1, 6, 90])  # products by row, by feature, by row
def test_long_suffixes_are_remembered_stretch_by_stretch(name, num):
    model = MODELS[name]()
    x = torch.randint(V, (3, num, 20), generator=torch.Generator().manual_seed(5))
    rows = torch.arange(num).flip(0).expand(3, num)
    stepper = begin(model, num, 20)
    assert stepper.memory.keys[0].shape[0] == 2
    for t in range(12):
        stepper.step(x[:, :, t])
    stepper.select(rows)  # in the middle of the second stretch
    for t in range(12, 20):
        log_p = stepper.step(x[:, :, t])
    for b, context in enumerate(CONTEXTS):
        for n in {0, num // 2, num - 1}:
            string = [*x[b, rows[b, n], :12].tolist(), *x[b, n, 12:].tolist()]
            torch.testing.assert_close(log_p[b, n], whole(model, context, string)[0][-1], atol=1e-4, rtol=0)


# drawing


def padded(logits):
    room = drawing.room_for(len(logits), logits.shape[-1], logits)
    room[:, : logits.shape[-1]], room[:, logits.shape[-1] :] = logits, drawing.NOTHING
    return room


def spread(R, size, seed, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(R, size, generator=generator) + 40 * torch.randn(R, 1, generator=generator)
    return logits, torch.rand(R, generator=generator, dtype=torch.float64)


def check_draw(draw, logits, u, truncation):
    """The token that ``choose`` takes at the same u, with the numbers of ``Truncation``."""
    drawn = draw(padded(logits), truncation, partial(drawing.by_uniform, u), True)
    log_p = normalised(logits.double())
    log_q = truncation(log_p)
    chosen = choose(log_q, u)
    cdf = log_q.exp().cumsum(-1)
    margin = (cdf - u.unsqueeze(-1)).abs().amin(-1)  # where u falls between two tokens rounding decides
    assert (drawn.tokens == chosen)[margin > 1e-5].all()
    assert (margin > 1e-5).float().mean() > 0.9 or truncation.temperature < 1e-9
    at = drawn.tokens.unsqueeze(-1)
    torch.testing.assert_close(drawn.log_base, log_p.gather(-1, at).squeeze(-1), atol=2e-5, rtol=0)
    torch.testing.assert_close(drawn.log_proposal, log_q.gather(-1, at).squeeze(-1), atol=2e-5, rtol=0)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
    torch.testing.assert_close(drawn.entropy, entropy, atol=2e-5, rtol=0)
    rank = 1 + (logits > logits.gather(-1, at)).sum(-1)
    assert torch.equal(drawn.log_rank.exp().round().long(), rank)
    assert drawn.log_base.dtype == drawn.log_proposal.dtype == torch.float64


@pytest.mark.parametrize("size", [7, 256, 1000])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_a_draw_is_that_of_the_slow_way(truncation, size):
    check_draw(drawing.draw, *spread(200, size, size), truncation)


@given(st.integers(0, 10**6), st.floats(0.2, 3.0), st.integers(1, 400), st.floats(0.01, 1.0), st.floats(0.1, 8.0))
def test_any_truncation_is_that_of_the_slow_way(seed, temperature, top_k, top_p, scale):
    for truncation in (
        Truncation(temperature=temperature, top_k=top_k, top_p=top_p),
        Truncation(temperature=temperature, top_p=top_p),
    ):
        logits, u = spread(5, 600, seed, scale)
        drawn = drawing.draw(padded(logits), truncation, partial(drawing.by_uniform, u), False)
        log_p = normalised(logits.double())
        log_q = truncation(log_p).gather(-1, drawn.tokens.unsqueeze(-1)).squeeze(-1)
        near = (drawn.log_proposal - log_q).abs() < 1e-4
        # a token at the very edge of a nucleus is in or out by rounding, and then q differs by that token's mass
        assert near.float().mean() >= 0.8
        base = log_p.gather(-1, drawn.tokens.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(drawn.log_base, base, atol=2e-5, rtol=0)


def test_the_law_of_a_draw_by_all_of_u():
    """The share of u that gives a token is its probability, on a grid of u fine enough to tell; a mutant is refused."""
    logits, points = spread(1, 6, 3, 1.0)[0], 4000
    u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    for truncation in TRUNCATIONS:
        drawn = drawing.draw(padded(logits.expand(points, -1)), truncation, partial(drawing.by_uniform, u), False)
        share = torch.bincount(drawn.tokens, minlength=6) / points
        expected = truncation(normalised(logits.double()))[0].exp()
        assert (share - expected).abs().max() < 2 / points
        if truncation.is_identity:
            mutant = Truncation(temperature=1.03)(normalised(logits.double()))[0].exp()
            assert (share - mutant).abs().max() > 10 / points


@pytest.mark.parametrize("k", [1, 5, 20, 300])
def test_the_top_is_found_in_two_levels(k):
    logits = padded(spread(30, 900, k)[0])
    values, place = drawing.top(logits, k)
    assert torch.equal(values, logits.topk(k).values)
    assert torch.equal(logits.gather(-1, place), values)
    assert all(len(set(row)) == k for row in place.tolist())
    tied = padded(torch.zeros(2, 900))
    assert drawing.top(tied, k)[0].eq(0).all()
    assert all(len(set(row)) == k and max(row) < 900 for row in drawing.top(tied, k)[1].tolist())


def test_a_wide_nucleus_is_exact_too():
    """More tokens in the nucleus than are looked at: everything is sorted."""
    logits, u = spread(50, 2000, 5, 0.1)
    check_draw(drawing.draw, logits, u, Truncation(top_p=0.95))


def test_the_ends_of_u_are_tokens():
    """u = 0 is the first token with any mass, the largest u the last one; forbidden and missing tokens never come."""
    logits = torch.zeros(2, 300)
    logits[:, :3] = logits[:, 290:] = drawing.NOTHING
    u = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    for draw in draws():
        drawn = draw(padded(logits), ANCESTRAL, partial(drawing.by_uniform, u), True)
        assert drawn.tokens.tolist() == [3, 289]
        torch.testing.assert_close(drawn.entropy, torch.full((2,), math.log(287), dtype=torch.float64))


def test_what_float32_cannot_hold_has_a_log_probability():
    """At a high temperature a token may be drawn whose probability under P_LM is below the smallest float32."""
    logits, u = torch.tensor([[0.0, -200.0]]), torch.tensor([0.99], dtype=torch.float64)
    drawn = drawing.draw(padded(logits), Truncation(temperature=100.0), partial(drawing.by_uniform, u), False)
    assert drawn.tokens.tolist() == [1]
    assert float(drawn.log_base) == pytest.approx(-200)
    assert float(drawn.log_proposal) == pytest.approx(-2 - math.log1p(math.exp(-2)))


# sampling


def fast_sampler(model, *, compiled=False, draw=sampling.sample, rows=1000):
    """As the adapter will use it."""
    decoder = Decoder.of(model, compiled=compiled)

    def sample(contexts, num, space, rng, truncation=ANCESTRAL):
        def make(some):
            with torch.no_grad():
                first = read(model, contexts[some], ())
            return decoder.starting(first, space.length)

        return in_chunks(make, contexts, num, space, rng, truncation, rows=rows, draw=draw)

    return sample


@pytest.mark.parametrize("truncation", TRUNCATIONS[:8], ids=str)
@pytest.mark.parametrize("eos", [None, 0])
def test_the_same_stream_gives_the_same_text(eos, truncation):
    """Token by token what the shared way draws, in chunks of any size, with its numbers."""
    model = MODELS["llama"](scale=0.2)
    space, contexts = SequenceSpace(vocab_size=V, length=4, eos=eos), Sequences.from_lists(CONTEXTS)
    lm, samplers = HuggingFaceLM(model, eos=0), [fast_sampler(model, rows=rows) for rows in (1000, 7)]
    slow = lm.sample(contexts, 20, space, Rng(1), truncation)
    for sampler in samplers:
        quick = sampler(contexts, 20, space, Rng(1), truncation)
        assert torch.equal(quick.x.tokens, slow.x.tokens)
        assert torch.equal(quick.x.lengths, slow.x.lengths)
        torch.testing.assert_close(quick.log_base, slow.log_base, atol=1e-4, rtol=0)
        torch.testing.assert_close(quick.log_proposal, slow.log_proposal, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "truncation", [ANCESTRAL, Truncation(top_k=2, temperature=0.7), Truncation(top_p=0.6)], ids=str
)
@pytest.mark.parametrize("eos", [None, 0])
def test_the_law_of_the_sampler(truncation, eos):
    """Every branch walked: P(x) = Π q(x_t | c, x_<t) for every string of the space."""
    model = network("GPT2", vocab_size=3, num_hidden_layers=1, dtype=torch.float64)
    space, lm = SequenceSpace(vocab_size=3, length=3, eos=eos), HuggingFaceLM(model, eos=0)
    contexts, sampler = Sequences.from_lists([[1, 2]]), fast_sampler(model)
    found = law(lambda rng: sampler(contexts, 1, space, rng, truncation), lambda draws: tuple(draws.x.lists()[0][0]))
    log_q = cache(lambda *x: truncation(lm.next_log_probs(Sequences.from_lists([[1, 2, *x]])))[0].tolist())
    expected = {
        tuple(x): math.exp(sum(log_q(*x[:t])[token] for t, token in enumerate(x))) for x in space.enumerate().lists()
    }
    expected = {x: p for x, p in expected.items() if p > 0}
    assert found == pytest.approx(expected, abs=1e-9)


def test_logits_exist_for_a_few_rows_at_a_time(monkeypatch):
    model, contexts = MODELS["neox"](), Sequences.from_lists(CONTEXTS)
    space = SequenceSpace(vocab_size=V, length=4)
    together = fast_sampler(model)(contexts, 9, space, Rng(2))
    rooms, room_for = [], drawing.room_for
    monkeypatch.setattr(sampling, "_LOGITS", 4 * V)  # 27 rows in 7 parts
    monkeypatch.setattr(drawing, "room_for", lambda *a: rooms.append(room_for(*a)) or rooms[-1])
    apart = fast_sampler(model)(contexts, 9, space, Rng(2))
    assert [len(room) for room in rooms] == [4]
    assert torch.equal(apart.x.tokens, together.x.tokens)
    torch.testing.assert_close(apart.log_base, together.log_base, atol=1e-6, rtol=0)


def test_as_many_rows_as_memory_allows():
    """The keys and values of the candidates in hand stay within three quarters of a gigabyte."""
    apart = take_apart(MODELS["llama"]())
    assert rows_at_once(apart, 40) == 512
    for length in (6000, 20_000):
        rows = rows_at_once(apart, length)
        assert 10 < rows < 512
        assert rows * 2 * 3 * 2 * 8 * length * 4 <= 3 * 2**28 < (rows + 64) * 2 * 3 * 2 * 8 * length * 4
        assert rows % 64 == 0  # whole blocks
    assert rows_at_once(apart, 10**9) == 1


@pytest.mark.parametrize("rows", [1, 15, 16, 70, 255, 256, 300])
def test_products_are_the_same_whatever_lies_in_memory(rows):
    generator = torch.Generator().manual_seed(0)
    x, kept = (torch.randn(rows, features, generator=generator) for features in (24, 1100))
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((24, 1100), (1100,)))
    for product in (Affine(weight, bias), Affine(weight, None), Affine(weight, bias).by_output()):
        expected = x @ weight + (0 if product.bias is None else bias)
        for same in (x, x.t().contiguous().t()):
            torch.testing.assert_close(product(same), expected, atol=1e-4, rtol=0)
            logits = x.new_empty(rows, 1103)[:, :-3]
            product.write(same, logits)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
            for total in (kept.clone(), kept.t().clone(memory_format=torch.contiguous_format).t()):
                product.add_to(total, same)
                torch.testing.assert_close(total, kept + expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "weight"),
    [("gpt2", "transformer.h.2.mlp.c_proj.weight"), ("llama", "model.layers.2.self_attn.v_proj.weight")],
)
def test_copies_of_weights_are_kept_until_the_weights_change(compiled, name, weight):
    """One copy at a time: an optimiser's step, or another place in memory, makes it anew."""
    model = MODELS[name]()
    decoder = Decoder.of(model, compiled=compiled)
    with torch.no_grad():
        first = read(model, Sequences.from_lists(CONTEXTS), ())
    copies = [decoder.starting(first, 3)(40).network.layers[0] for _ in range(2)]
    assert copies[0] is copies[1]
    with torch.no_grad():
        model.get_parameter(weight).mul_(1.5)
        first = read(model, Sequences.from_lists(CONTEXTS), ())
    changed = decoder.starting(first, 3)(40)
    assert changed.network.layers[0] is not copies[0]
    found = changed.step(torch.ones(3, 40, dtype=torch.long))[0, 39]
    torch.testing.assert_close(found, whole(model, CONTEXTS[0], [1])[0][-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("eos", [None, 0])
def test_the_trace_is_that_of_a_traced_stepper(eos, compiled):
    if compiled and fused.kernels() is None:
        pytest.skip("no C++ compiler here, so there are no compiled steps: the plain ones are tested")
    model, layers = MODELS["llama"](scale=0.2), (0, 1, 3)
    space, contexts = SequenceSpace(vocab_size=V, length=6, eos=eos), Sequences.from_lists(CONTEXTS)
    draws, expected = traced_ancestral(begin(model, 8, 6, layers), contexts, 8, space, Rng(4), ANCESTRAL)
    stepper = begin(model, 8, 6, layers, compiled=compiled)
    found, trace = sampling.sample_traced(stepper, contexts, 8, space, Rng(4), ANCESTRAL)
    assert torch.equal(found.x.tokens, draws.x.tokens)
    assert torch.equal(trace.mask, expected.mask)
    for name in ("states", "log_p", "entropy", "log_rank"):
        torch.testing.assert_close(getattr(trace, name), getattr(expected, name), atol=1e-4, rtol=0)


# compiled


@pytest.fixture
def compiled():
    kernels = fused.kernels()
    if kernels is None:
        pytest.skip("no C++ compiler here, so there are no compiled steps: the plain ones are tested")
    return kernels


def compiled_draw(logits, truncation, pick, is_traced):
    """Through a head whose rows are the logits, and states that choose them one by one."""
    assert truncation.is_identity
    states = fused.kernels().enter(torch.eye(len(logits)).unsqueeze(0))
    return fused.kernels().draw(states, Affine(logits, None), pick.args[0].unsqueeze(0), is_traced)


def draws():
    return [drawing.draw] if fused.kernels() is None else [drawing.draw, compiled_draw]


@pytest.mark.parametrize("name", MODELS)
def test_compiled_steps_are_a_plain_forward_pass(name, compiled):
    model = MODELS[name]()
    stepper = begin(model, 4, 6, (0, 2, 3), compiled=True)
    assert type(stepper.kernels) is type(compiled)
    check_steps(model, stepper, 2e-4, (0, 2, 3))


@pytest.mark.parametrize("size", [7, 256, 1000])
def test_compiled_draws_are_those_of_the_slow_way(size, compiled, monkeypatch):
    """All candidates at once or some blocks of them at a time."""
    check_draw(compiled_draw, *spread(200, size, 8), ANCESTRAL)
    monkeypatch.setattr(fused, "_LOGITS", 2 * 64 * 1024)
    check_draw(compiled_draw, *spread(200, size, 8), ANCESTRAL)


def test_compiled_draws_without_a_trace_are_the_same(compiled):
    logits, u = spread(70, 600, 9)
    traced, bare = (
        compiled_draw(padded(logits), ANCESTRAL, partial(drawing.by_uniform, u), seen) for seen in (True, False)
    )
    assert torch.equal(traced.tokens, bare.tokens)
    assert torch.equal(traced.log_base, bare.log_base)
    assert bare.entropy is None
    assert bare.log_rank is None


@pytest.mark.parametrize("by_output", [False, True])
@pytest.mark.parametrize("outputs", [5, 6, 25, 61])
def test_compiled_products_of_any_size(outputs, by_output, compiled):
    """Whole tiles and what is left of them, more inputs than are taken at once, either way round in memory."""
    generator = torch.Generator().manual_seed(outputs)
    weight, bias = torch.randn(outputs, 300, generator=generator), torch.randn(outputs, generator=generator)
    product = Affine(weight.t() if by_output else weight.t().contiguous(), bias)
    x = torch.randn(2, 70, 300, generator=generator)
    found = compiled.rows(compiled.qkv(compiled.enter(x), product), (2, 70))
    torch.testing.assert_close(found, product(x.flatten(0, 1)), atol=1e-4, rtol=0)


def test_few_candidates_are_left_to_plain_torch(compiled):
    decoder = Decoder.of(MODELS["llama"](), compiled=True)
    assert [type(decoder.kernels_for(num)) for num in (1, 31, 32)] == [PlainSteps, PlainSteps, fused.Fused]


def test_compiled_sampling_is_within_rounding_of_plain(compiled):
    """A trained-like model, strings of forty tokens: log P to 1e-4 a sequence."""
    model = network("Llama", vocab_size=700, hidden_size=64, intermediate_size=96, scale=0.2)
    space, contexts = SequenceSpace(vocab_size=700, length=40), Sequences.from_lists([[1, 2, 3]])
    draws = fast_sampler(model, compiled=True)(contexts, 50, space, Rng(5))
    exact = HuggingFaceLM(copy.deepcopy(model).double(), eos=0).log_prob(draws.x)
    assert (draws.log_base - exact).abs().max() < 1e-4
    assert draws.log_base.std() > 1


def test_compiled_parts_are_for_float32_only(compiled):
    assert type(Decoder.of(MODELS["llama"](dtype=torch.float64), compiled=True).kernels_for()) is PlainSteps


def test_without_a_compiler_plain_torch_decodes(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert fused._library() is None
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert fused._library() is None
    monkeypatch.setattr(fused, "kernels", lambda: None)
    assert type(Decoder.of(MODELS["gpt2"](), compiled=True).kernels_for()) is PlainSteps


def test_the_library_is_compiled_once(compiled, monkeypatch):
    calls, run = [], compiler.subprocess.run
    spy = SimpleNamespace(run=lambda command, **k: calls.append(command) or run(command, **k))
    spy.CalledProcessError = compiler.subprocess.CalledProcessError
    monkeypatch.setattr(compiler, "subprocess", spy)
    assert isinstance(fused._library(), ctypes.CDLL)
    assert [command[1:] for command in calls] == [["--version"]]


def test_rounding_modes_of_the_process_are_untouched(compiled):
    """A library linked with -ffast-math would flush the smallest numbers to zero for everybody."""
    assert float(torch.tensor(1e-40)) > 0
    assert float(torch.tensor(1e-40) * 0.5) > 0
    assert Continuations.from_lists([[1]], [[[2]]]).shape == (1, 1)
