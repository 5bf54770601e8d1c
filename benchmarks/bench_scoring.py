"""Scoring candidates and one training step: ours beside a plain batched transformers loop.

The plain loop is what a user writes: whole strings of prefix and continuation, padded, 32 at a time with their
attention mask through ``AutoModel``, mean pooling over real tokens, a linear layer. Tokens are given, so that neither
side tokenises. Candidates continue one prefix of 120 tokens with 40 of their own, unless the case says otherwise.
"""

import copy
from functools import partial

import measuring
import torch
from transformers import AutoModel, BertConfig, LlamaConfig

from freenergy import HuggingFaceLM, RankingNCE, Rng, Scores, Sequences, SequenceSpace
from freenergy.core.sequences import Continuations
from freenergy.energies.bit import Bit, BitEnergy
from freenergy.energies.call import energies_in_batches
from freenergy.energies.int8 import int8_error, quantised
from freenergy.energies.probe import Probe, ProbeEnergy
from freenergy.lm.presets import build, set_dropout

PREFIX, LENGTH, VOCABULARY, AT_ONCE = 120, 40, 30_522, 32
SIZES = {"6 × 384": (6, 384, 12), "BERT-base": (12, 768, 12)}


def encoder(size):
    layers, width, heads = SIZES[size]
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModel.from_config(config, attn_implementation="sdpa", add_pooling_layer=False).eval()


def operations(size, rows, tokens=PREFIX + LENGTH):
    """Of all matrix products of whole strings."""
    layers, width, _ = SIZES[size]
    return rows * tokens * layers * (24 * width**2 + 4 * tokens * width)


def energy_of(network, **settings):
    energy = Bit(BitEnergy(**settings), copy.deepcopy(network), eos=0).eval()
    with torch.no_grad():
        energy.readout.weight.normal_(generator=torch.Generator().manual_seed(1))
    return energy


def candidates(num, *, seed=0, mixed=False, contexts=1):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, 1_000, VOCABULARY, generator=generator)
    prefix = Sequences(draw((contexts, PREFIX)), torch.full((contexts,), PREFIX))
    lengths = torch.randint(1, LENGTH + 1, (contexts, num), generator=generator)
    return Continuations(
        prefix, draw((contexts, num, LENGTH)), lengths if mixed else torch.full((contexts, num), LENGTH)
    )


@torch.no_grad()
def plain(network, head, x):
    """The loop that a user writes."""
    rows, found = x.joined(), []
    for i in range(0, len(rows), AT_ONCE):
        tokens, mask = rows.tokens[i : i + AT_ONCE], rows.mask[i : i + AT_ONCE].long()
        states = network(tokens, attention_mask=mask).last_hidden_state
        pooled = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        found.append(head(pooled))
    return torch.cat(found)


@torch.no_grad()
def ours(energy, x):
    return energy(x)


def rows_of(case, times, against="plain loop", **more):
    """One row a way; ``more`` holds what is known of single ways beside their times."""
    found = measuring.compared(times, against)
    return [{"case": case, "way": way, **found[way], **more.get(way, {})} for way in times]


def scoring(size, num, rounds):
    """Whole strings, int8, and a prefix that is read once."""
    network = encoder(size)
    head, x = torch.nn.Linear(network.config.hidden_size, 1), candidates(num)
    int8 = quantised(energy_of(network), candidates(32, seed=1))
    energies = {
        "Bit": energy_of(network),
        "Bit in int8": int8,
        "Bit, prefix once": energy_of(network, prefix_once=True),
    }
    ways = {"plain loop": partial(plain, network, head, x)}
    ways |= {name: partial(ours, energy, x) for name, energy in energies.items()}
    few = x.candidates(slice(0, 8))
    warm = {"plain loop": partial(plain, network, head, few)}
    warm |= {name: partial(ours, energy, few) for name, energy in energies.items()}
    times, peaks = measuring.with_peak(ways, rounds, warm)
    share = {name: measuring.share(operations(size, num), times[name], peaks) for name in ("plain loop", "Bit")}
    some = x.candidates(slice(0, 128))
    largest, typical = int8_error(int8, some)
    spread = ours(energies["Bit"], some).std().item()
    more = {
        "plain loop": {"share": share["plain loop"]},
        "Bit": {"share": share["Bit"], "needs": 1.0, "needs_share": 0.7},
        "Bit in int8": {"needs": 1.3, "error": typical, "largest_error": largest, "spread_of_energies": spread},
        "Bit, prefix once": {"needs": 3.0},
    }
    return rows_of(f"scoring {num:,} × {PREFIX + LENGTH} tokens, {size}", times, **more)


def duplicates(size, num, rounds):
    """Half of the candidates are copies of the other half; and candidates of mixed lengths."""
    network, halves = encoder(size), candidates(num // 2)
    head, energy, mixed = (
        torch.nn.Linear(network.config.hidden_size, 1),
        energy_of(network),
        candidates(num, mixed=True),
    )
    both = Continuations.cat([halves, halves], dim=1)
    once = partial(energies_in_batches, energy, both, batch_size=num, distinct=True)
    ways = {"plain loop": partial(plain, network, head, both), "Bit": once}
    found = rows_of(f"half of {num} are copies, {size}", measuring.interleaved(ways, rounds), Bit={"needs": 1.8})
    once = energy_of(network, prefix_once=True)
    ways = {"plain loop": partial(plain, network, head, mixed), "Bit": partial(ours, energy, mixed)}
    ways["Bit, prefix once"] = partial(ours, once, mixed)
    times = measuring.interleaved(ways, rounds)
    return found + rows_of(f"{num} continuations of 1 to {LENGTH} tokens, {size}", times, Bit={"needs": 1.0})


def probe(num, rounds):
    """A probe of what the sampler computed anyway, beside an encoder; and what the trace costs the sampler."""
    config = LlamaConfig(
        vocab_size=8_000, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=8,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    lm = HuggingFaceLM(build(config, Rng(0)), eos=0)
    energy, space = Probe(ProbeEnergy(), lm), SequenceSpace(vocab_size=8_000, length=LENGTH)
    network = encoder("6 × 384")
    head, x = torch.nn.Linear(384, 1), candidates(num)
    contexts = Sequences(x.contexts.tokens % 8_000, x.contexts.lengths)
    trace = lm.sample_traced(contexts, num, space, Rng(0), layers=energy.layers)[1]
    ways = {"plain loop": partial(plain, network, head, x), "Probe of a trace": lambda: energy.energy_of_trace(trace)}
    warm = {"plain loop": partial(plain, network, head, x.candidates(slice(0, 8)))}
    warm["Probe of a trace"] = ways["Probe of a trace"]
    times = measuring.interleaved(ways, rounds, warm)
    found = rows_of(
        f"scoring {num:,} × {PREFIX + LENGTH} tokens, 6 × 384", times, **{"Probe of a trace": {"needs": 50}}
    )
    sampling = {
        "without a trace": lambda: lm.sample(contexts, num, space, Rng(0)),
        "with a trace": lambda: lm.sample_traced(contexts, num, space, Rng(0), layers=energy.layers),
    }
    times = measuring.interleaved(sampling, rounds)
    return found[1:] + rows_of(f"sampling {num:,}, 6 layers, d 256", times, "without a trace")


def step(energy, x):
    """One step of ranking NCE, without the optimiser."""
    energy.zero_grad()
    E = energy(x)
    RankingNCE()(Scores(E[:, :1]), Scores(E[:, 1:])).value.backward()


def training(size, rounds):
    """Four windows with four negatives each; the prefix shared or not; dropout or not."""
    network, x = encoder(size), candidates(5, contexts=4)
    once, apart = energy_of(network, prefix_once=True).train(), energy_of(network, prefix_once=True).train()
    with_dropout = energy_of(network).train()
    set_dropout(with_dropout.trunk.network, 0.1)
    alone = Continuations(x.contexts[torch.arange(20) // 5], x.tokens.view(20, 1, LENGTH), x.lengths.view(20, 1))

    def separately():
        apart.zero_grad()
        E = apart(alone).view(4, 5)
        RankingNCE()(Scores(E[:, :1]), Scores(E[:, 1:])).value.backward()

    ways = {
        "Bit, dropout 0.1": partial(step, with_dropout, x),
        "Bit": partial(step, energy_of(network).train(), x),
        "prefix once, read for every string": separately,
        "prefix once, shared": partial(step, once, x),
    }
    times, peaks = measuring.with_peak(ways, rounds)
    share = measuring.share(3 * operations(size, 20), times["Bit"], peaks)
    return rows_of(f"one NCE step, 4 × 5 strings, {size}", times, "Bit, dropout 0.1", Bit={"share": share})


def cases(quick):
    if quick:
        return {
            "scoring": partial(scoring, "6 × 384", 64),
            "copies": partial(duplicates, "6 × 384", 64),
            "probe": partial(probe, 64),
        }
    return {
        "scoring": lambda rounds: scoring("6 × 384", 1_024, min(rounds, 3)),
        "scoring, BERT-base": lambda rounds: scoring("BERT-base", 128, min(rounds, 3)),
        "copies": partial(duplicates, "6 × 384", 256),
        "probe": lambda rounds: probe(1_024, min(rounds, 3)),
        "training": partial(training, "6 × 384"),
    }


def measure(rounds, quick):
    return [row for case in cases(quick).values() for row in case(rounds)]


if __name__ == "__main__":
    measuring.main(measure, "scoring", cases)
