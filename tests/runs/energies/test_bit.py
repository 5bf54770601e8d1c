"""The bidirectional energy: from the base, from a masked trunk, from an encoder with its own tokenizer."""

from collections import Counter
from functools import partial

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from freenergy import Continuations, Rng, TabularLM, UserError
from freenergy.corpus import Tokenizer
from freenergy.corpus.tokenizer import byte_alphabet
from freenergy.energies import batching
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.energies.registry import load_energy
from freenergy.energies.trunk import Trunk
from freenergy.lm import shared_prefix
from freenergy.lm.presets import build, preset
from freenergy.testing import check_energy
from freenergy.testing.networks import tiny_network

V = 11
X = Continuations.from_lists(
    [[1, 2, 3, 4, 5], [6], [], [7, 0, 8]],
    [[[9, 1, 2], [3], []], [[4, 5, 0], [6, 7, 8], [9]], [[1], [2, 3], [4, 0]], [[], [10], [10, 9, 8]]],
)
ARCHITECTURES = ["GPT2", "Llama", "GPTNeoX"]
DEPTH = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
ENCODERS = ["Bert", "Roberta", "Electra"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,'!?"


def sharpened(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # sharp attention, as in a trained model
    return model


base = partial(tiny_network, vocab_size=V)


def moved(energy, scale=0.3):
    """Away from the start, where every energy is 0 and nothing can be told apart."""
    with torch.no_grad():
        for weight in energy.readout.parameters():
            weight.copy_(scale * Rng(1).child(str(tuple(weight.shape))).normal(*weight.shape))
    return energy.eval()


@pytest.fixture(scope="session")
def corpus_tokenizer():
    """Every byte is a token, a few pairs are merged; token 0 ends a document."""
    alphabet = {char: i + 1 for i, char in enumerate(byte_alphabet())}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("a", "n")]
    vocabulary = {"<eos>": 0} | alphabet | {"".join(pair): 257 + i for i, pair in enumerate(merges)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    return Tokenizer(inner, eos=0)


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory):
    """Random encoders with a WordPiece vocabulary of letters and a few words."""

    def make(name, places=64):
        folder = tmp_path_factory.mktemp(name)
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##at", "sat", "on"]
        pieces += [*LETTERS, *("##" + char for char in LETTERS)]
        inner = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
        inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
        config = getattr(transformers, f"{name}Config")(
            vocab_size=len(pieces), **DEPTH, intermediate_size=32, max_position_embeddings=places, pad_token_id=0
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sharpened(transformers.AutoModel.from_config(config)).save_pretrained(folder)
        return folder

    return make


def texts(tokenizer, prefix, continuations):
    """One context and its continuations; "$" at the end is EOS."""
    rows = [tokenizer.encode(text.rstrip("$")) + [tokenizer.eos] * text.endswith("$") for text in continuations]
    return Continuations.from_lists([tokenizer.encode(prefix)], [rows])


def by_own_attention(network, context, x, *, prefix_once):
    """States of one string through the network's own attention, under an explicit mask."""
    T, P = len(context + x), len(context)
    mask = torch.zeros(1, 1, T, T, dtype=network.dtype)
    if prefix_once:
        mask[:, :, :P, P:] = torch.finfo(mask.dtype).min
    with torch.no_grad():
        return network(torch.tensor([context + x]), attention_mask=mask).last_hidden_state[0]


@pytest.mark.parametrize("prefix_once", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_from_the_base_it_starts_at_zero_and_keeps_the_contract(name, prefix_once):
    energy = Bit.from_base(BitEnergy(prefix_once=prefix_once, over="all"), base(name))
    assert torch.equal(energy(X), torch.zeros(4, 3))
    check_energy(moved(energy), X)
    assert energy(X).std() > 1e-3
    assert not energy.lossy(X).any()


@pytest.mark.parametrize("prefix_once", [False, True])
@pytest.mark.parametrize("over", ["continuation", "all"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_equals_the_networks_own_attention_under_a_mask(name, prefix_once, over):
    energy = moved(Bit.from_base(BitEnergy(prefix_once=prefix_once, pool="mean", over=over), base(name)))
    found = energy(X).detach()
    for b, context in enumerate(X.contexts.lists()):
        for n, x in enumerate(X.lists()[b]):
            states = by_own_attention(energy.trunk.network, context or [0], x, prefix_once=prefix_once)
            own = states if over == "all" else states[len(context or [0]) :]
            wanted = energy.readout.weight[0] @ (own.sum(0) / max(len(own), 1)) + energy.readout.bias[0]
            assert abs(float(found[b, n]) - wanted.item()) < 2e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_a_prefix_that_is_read_once_is_blind_to_the_continuation(name):
    x = Continuations.from_lists([[1, 2, 3]], [[[4, 5], [6, 7]]])
    network = base(name).model.base_model
    apart, both = Trunk(network, "prefix_once")(x).prefix, Trunk(network, "bidirectional")(x).prefix
    assert apart.shape == (1, 1, 3, 16)
    assert both.shape == (1, 2, 3, 16)
    assert (both[0, 0] - both[0, 1]).abs().min() > 1e-6
    alone = by_own_attention(network, [1, 2, 3], [], prefix_once=True)
    torch.testing.assert_close(apart[0, 0], alone, atol=1e-5, rtol=0)


def test_the_prefix_is_read_once_whatever_n_is(monkeypatch):
    """Keys of the prefix have B rows, whatever N is."""
    seen, part = set(), shared_prefix._part

    def spy(q, k, v, visible, terms):
        seen.add((k.shape[0], k.shape[2]))
        return part(q, k, v, visible, terms)

    energy = Bit.from_base(BitEnergy(prefix_once=True), base())
    monkeypatch.setattr(shared_prefix, "_part", spy)
    energy(Continuations.from_lists([[1] * 9, [2] * 8], [[[3, 4]] * 5] * 2))
    assert seen == {(2, 9), (10, 2)}


@pytest.mark.parametrize("prefix_once", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "GPTNeoX"])
def test_gradients_against_finite_differences(name, prefix_once):
    """Along a random direction in all parameters, float64."""
    energy = moved(Bit.from_base(BitEnergy(prefix_once=prefix_once, over="all"), base(name, torch.float64)))
    weights = list(energy.parameters())
    assert all(weight.requires_grad for weight in weights)
    ways = [Rng(2).child(i).normal(*weight.shape) for i, weight in enumerate(weights)]
    energy(X).square().sum().backward()
    wanted = sum(float((weight.grad * way).sum()) for weight, way in zip(weights, ways, strict=True))
    values = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for weight, way in zip(weights, ways, strict=True):
                weight.add_(step * way)
            values.append(float(energy(X).square().sum()))
    assert abs((values[0] - values[1]) / 2e-6 / wanted - 1) < 1e-5


def test_a_network_without_attention_is_one_sentence():
    with pytest.raises(UserError, match="MambaModel cannot be read in both directions"):
        Bit.from_base(BitEnergy(), base("Mamba"))


@pytest.mark.parametrize("prefix_once", [False, True])
def test_an_attention_that_is_not_obeyed_is_found_out(prefix_once, monkeypatch):
    lm = base()
    for name in ("_part", "scaled_dot_product_attention"):
        own = getattr(shared_prefix, name)
        monkeypatch.setattr(shared_prefix, name, lambda q, *rest, own=own, **more: own(1.1 * q, *rest, **more))
    with pytest.raises(UserError, match="cannot be read in both directions"):
        Bit.from_base(BitEnergy(prefix_once=prefix_once), lm)


def test_a_base_without_a_network_is_one_sentence():
    with pytest.raises(UserError, match="'bit' reads the base's network, and a TabularLM has no network"):
        Bit.from_base(BitEnergy(), TabularLM.random(Rng(0), vocab_size=V, order=1))


def test_from_a_masked_trunk(tmp_path):
    model = build(preset("tiny").config(vocab_size=V + 1, eos=0), Rng(3))
    settings = BitEnergy(start="scratch", pool="sum")
    energy = Bit.from_trunk(settings, model)
    assert torch.equal(energy(X), torch.zeros(4, 3))
    check_energy(moved(energy, 0.05), X)
    with torch.no_grad():
        next(energy.trunk.parameters()).add_(1)
    assert not torch.equal(next(energy.trunk.parameters()), next(model.base_model.parameters()))  # a copy
    with pytest.raises(UserError, match="the text has token 12, but the energy's network knows 12 tokens"):
        energy(Continuations.from_lists([[1]], [[[12]]]))


@pytest.mark.parametrize("prefix_once", [False, True])
def test_save_and_load_give_equal_bits(prefix_once, tmp_path, corpus_tokenizer):
    lm = base("GPT2")
    energy = moved(Bit.from_base(BitEnergy(prefix_once=prefix_once, dropout=0.2), lm))
    energy.save_pretrained(tmp_path / "bit")
    again = load_energy(tmp_path / "bit", base=lm, tokenizer=corpus_tokenizer)
    assert again.settings == energy.settings
    assert torch.equal(again(X), energy(X))


@pytest.mark.parametrize("prefix_once", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_keeps_the_contract(name, prefix_once, encoder_folder, corpus_tokenizer, tmp_path):
    folder = encoder_folder(name)
    settings = BitEnergy(start="encoder", encoder=str(folder), prefix_once=prefix_once)
    energy = Bit.from_encoder(settings, folder, corpus_tokenizer)
    encode = corpus_tokenizer.encode
    x = Continuations.from_lists(
        [encode("the cat"), [], encode("an")],
        [[encode(" sat on"), encode("s")], [encode("the"), [0]], [encode("d the"), [*encode(" cat."), 0]]],
    )
    assert torch.equal(energy(x), torch.zeros(3, 2))
    check_energy(moved(energy), x)
    assert energy(x).std() > 1e-3
    energy.save_pretrained(tmp_path / "bit")
    again = load_energy(tmp_path / "bit", base=base(), tokenizer=corpus_tokenizer)
    assert torch.equal(again(x), energy(x))


def test_an_encoder_gives_what_transformers_gives(encoder_folder, corpus_tokenizer):
    """[CLS] the cat sat . [SEP] through the stock encoder and its own tokenizer; pooled over " sat."."""
    folder = encoder_folder("Bert")
    energy = moved(Bit.from_encoder(BitEnergy(start="encoder", encoder="x"), folder, corpus_tokenizer))
    stock = transformers.AutoModel.from_pretrained(folder)
    with torch.no_grad():
        states = stock(torch.tensor([[2, 5, 6, 8, energy.crossing.encoder.token_to_id("."), 3]])).last_hidden_state[0]
    wanted = energy.readout.weight[0] @ states[3:5].mean(0) + energy.readout.bias[0]
    found = energy(texts(corpus_tokenizer, "the cat", [" sat."]))
    assert abs(found.item() - wanted.item()) < 1e-5


@pytest.mark.parametrize("prefix_once", [False, True])
def test_what_an_encoder_reads_is_text(prefix_once, encoder_folder, corpus_tokenizer):
    """Other tokens of the same two texts have the same energy; an end that came has another than a cut."""
    settings = BitEnergy(start="encoder", encoder="x", prefix_once=prefix_once)
    energy = moved(Bit.from_encoder(settings, encoder_folder("Bert"), corpus_tokenizer))
    whole = texts(corpus_tokenizer, "on the", [" cat and the", " cat and the$", " cat and he"])
    single = [[corpus_tokenizer.encode(char)[0] for char in text] for text in ("on the", " cat and the", " cat and he")]
    apart = Continuations.from_lists([single[0]], [[single[1], [*single[1], 0], single[2]]])
    assert apart.tokens.shape != whole.tokens.shape
    assert torch.equal(energy(apart), energy(whole))
    E = energy(whole)[0]
    assert abs((E[0] - E[1]).item()) > 1e-4
    assert abs((E[0] - E[2]).item()) > 1e-4


@pytest.mark.parametrize("prefix_once", [False, True])
def test_an_empty_continuation_has_the_bias_alone(prefix_once, encoder_folder, corpus_tokenizer):
    settings = BitEnergy(start="encoder", encoder="x", prefix_once=prefix_once)
    energy = moved(Bit.from_encoder(settings, encoder_folder("Bert"), corpus_tokenizer))
    E = energy(texts(corpus_tokenizer, "the cat", ["", "$"]))
    assert E[0, 0].item() == energy.readout.bias.item() != E[0, 1].item()
    assert E.isfinite().all()


def test_losses_are_counted(encoder_folder, corpus_tokenizer):
    energy = Bit.from_encoder(BitEnergy(start="encoder", encoder="x"), encoder_folder("Bert"), corpus_tokenizer)
    x = texts(corpus_tokenizer, "the", [" cat", " ☃", " sat", " é"])
    broken = x.tokens.clone()
    broken[0, 3, 2:] = 0
    x = Continuations(x.contexts, broken, torch.tensor([[4, 4, 4, 2]]))  # é is two bytes, and one of them is cut
    assert energy.lossy(x).tolist() == [[False, True, False, True]]
    assert energy.crossed == 0
    energy(x)
    assert energy.crossed == 4
    assert energy.lost["characters that the encoder does not know"] >= 1
    assert energy.lost["bytes that are not UTF-8"] == 1


@pytest.mark.parametrize("prefix_once", [False, True])
def test_text_crosses_in_portions_with_the_same_energies_and_exact_counts(
    prefix_once, encoder_folder, corpus_tokenizer, monkeypatch
):
    """Portions of three strings and batches of a few tokens, against all at once as in training."""
    settings = BitEnergy(start="encoder", encoder="x", prefix_once=prefix_once, over="all")
    energy = moved(Bit.from_encoder(settings, encoder_folder("Bert"), corpus_tokenizer))
    endings = [" sat on", " s", " ☃", " the cat and the", "$", " cat. the cat$", ""]
    one, two = (texts(corpus_tokenizer, prefix, endings) for prefix in ("the cat", "an é and"))
    x = Continuations.cat([one, two], dim=0)
    wanted, lost = energy(x).detach(), dict(energy.lost)
    assert energy.crossed == 14
    assert lost
    energy.crossed, energy.lost = 0, Counter()
    monkeypatch.setattr(batching, "_PORTION", 3)
    monkeypatch.setattr(batching, "_BUDGET", 200)
    with torch.no_grad():
        found = energy(x)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    assert energy.crossed == 14
    assert dict(energy.lost) == lost


@pytest.mark.parametrize("prefix_once", [False, True])
def test_too_long_for_the_encoder_is_one_sentence(prefix_once, encoder_folder, corpus_tokenizer):
    settings = BitEnergy(start="encoder", encoder="x", prefix_once=prefix_once)
    energy = Bit.from_encoder(settings, encoder_folder("Bert", places=12), corpus_tokenizer)
    assert energy(texts(corpus_tokenizer, "a b c d e", [" f g h i j"])).shape == (1, 1)
    with pytest.raises(UserError, match=r"are 14 tokens of the encoder, which reads 12: set corpus\.prefix lower"):
        energy(texts(corpus_tokenizer, "a b c d e f g", [" f g h i j"]))


def test_a_damaged_encoder_is_one_sentence(encoder_folder, corpus_tokenizer):
    folder = encoder_folder("Bert")
    settings = BitEnergy(start="encoder", encoder=str(folder))
    weights = folder / "model.safetensors"
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="does not load as an encoder"):
        Bit.from_encoder(settings, folder, corpus_tokenizer)
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        Bit.from_encoder(settings, folder, corpus_tokenizer)
