"""How likely a network finds the true translation, word by word, after the truth and after its own words.

    true prefix:   log q(x_t | source, x_<t)            teacher forcing, as in training
    own prefix:    log q(x_t | source, ŷ_<t)            ŷ = the network's own greedy translation, as in use

The paper counts the true words that E-ARM finds likelier than a baseline where both translate training sentences (Table
8, after Zhang et al. 2019) and does not say after which words. Ours is free running: every network predicts the true
token x_t after its own first t − 1 tokens, because exposure bias is what its own words do to it. Beyond the end of ŷ
there is nothing to predict, so the places are t ≤ |ŷ| with EOS. Words are tokens of the shared vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from freenergy.apps.translation.batches import EncodedPairs, by_length, padded
from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write
from freenergy.core.progress import Progress
from freenergy.lm.networks.causal import inference
from freenergy.lm.networks.protocol import Network

LogProbs = list[np.ndarray]  # of each sentence, place by place


def log_probs(
    network: Network, pairs: EncodedPairs, prefixes: Sequence[list[int]], tokens: int, progress: Progress, label: str
) -> LogProbs:
    """log q of the true token at every place of ``prefixes`` that the truth has too."""
    found: LogProbs = [np.zeros(0, dtype=np.float32)] * len(pairs)
    with inference(network.module), torch.no_grad(), progress.track(label, len(pairs), "sentences") as advance:
        for rows in by_length([len(ids) for ids in prefixes], tokens):
            batch, (read, _) = pairs.batch(rows), padded([prefixes[i] for i in rows])
            T = min(read.shape[1], batch.tokens.shape[1])
            logits = network.logits(batch.given, read[:, :T]).cpu()
            true = logits.gather(-1, batch.tokens[:, :T].unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
            for row, values in zip(rows, true.numpy(), strict=True):
                found[row] = values[: min(len(prefixes[row]), len(pairs.target[row]))].copy()
            advance(len(rows))
    return found


def likelier(
    ours: Sequence[LogProbs], others: Sequence[LogProbs]
) -> tuple[Float[np.ndarray, " sentences"], Float[np.ndarray, " sentences"]]:
    """In each sentence, over the seeds: the true words that ours finds likelier, and those that both were asked for."""
    more, asked = (np.zeros(len(ours[0])) for _ in range(2))
    for a, b in zip(ours, others, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            places = min(len(x), len(y))
            more[i] += (x[:places] > y[:places]).sum()
            asked[i] += places
    return more, asked


@final
class TruthFile:
    """Log-probabilities by name, each as one long array with the number of places of every sentence."""

    @staticmethod
    def save(path: Path, values: dict[str, LogProbs]) -> None:
        """Write them all."""
        arrays = {f"{name}.log_prob": np.concatenate(found) for name, found in values.items()}
        arrays |= {f"{name}.places": np.array([len(found) for found in values[name]]) for name in values}
        with atomic_write(path) as temporary:
            save_file(arrays, temporary)

    @staticmethod
    def load(path: Path) -> dict[str, LogProbs]:
        """Read them back."""
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}): measure the network again") from None
        names = [name.removesuffix(".places") for name in arrays if name.endswith(".places")]
        return {
            name: np.split(arrays[f"{name}.log_prob"], np.cumsum(arrays[f"{name}.places"])[:-1])
            for name in sorted(names)
        }
