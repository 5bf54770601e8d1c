"""Text as a domain: a causal language model that is trained on blocks of a corpus.

    perplexity = exp(Σ_b nats_b / Σ_b tokens_b)        over the blocks b of the test text, one after the other
    percent    = 100 · (1 − exp(−G)),   G = Σ_b (nats of the other − nats of ours)_b / Σ_b tokens_b

Nats are averaged over seeds first, so the interval of the percentage is over the documents of the test text.
Re-sampling by the energy of whole texts (Table 3 of Wang et al. 2022) is measured on windows, with bounds.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from safetensors.numpy import save_file
from torch.nn.functional import cross_entropy

from freenergy.core.errors import UserError
from freenergy.core.files import atomic_write, read_arrays, write_json
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Corpus
from freenergy.energies.logits import Logits, LogitsEnergy
from freenergy.evaluation.bootstrap import paired_bootstrap
from freenergy.evaluation.perplexity import Measurement, bounded_exp, choose_windows
from freenergy.evaluation.residual_perplexity import residual_perplexity
from freenergy.lm.checkpoints import checkpoint_fingerprint, load_checkpoint, save_checkpoint
from freenergy.lm.huggingface import HuggingFaceLM
from freenergy.lm.load import RECORD
from freenergy.lm.networks.blocks import BlockData, LaneData
from freenergy.lm.networks.causal import CausalNetwork
from freenergy.lm.networks.protocol import Network, Recurrent
from freenergy.models.residual import Residual
from freenergy.recipes.families.language_model import LanguageModelRecipe
from freenergy.recipes.families.network import Domain
from freenergy.training.tasks.language_model import start_model

_BLOCKS, _MODEL = "blocks.safetensors", "model"
_ROWS = 8  # blocks read at once


@final
class TextDomain(Domain):
    """A causal language model on a corpus."""

    def __init__(self, recipe: LanguageModelRecipe, corpus: Corpus, start: Path | None) -> None:
        self.recipe, self.base, self.settings = recipe, recipe.base, recipe.evaluation
        self.corpus, self.start = corpus, start
        if self.settings.split not in corpus.splits:
            raise UserError(
                f"the corpus has no {self.settings.split} text: give corpus.{self.settings.split}, or set "
                f"evaluation.split to {' or '.join(corpus.splits[1:])}"
            )

    def network(self, rng: Rng) -> CausalNetwork:
        """Returns a network with fresh weights, or those of a checkpoint."""
        base = self.base
        sizes: dict[str, Any] = {"preset_name": base.preset, "block": base.block, "dropout": base.dropout}
        model = start_model(self.corpus, self.start, rng, section="base", **sizes)
        return CausalNetwork(model, memory=base.memory, rows=base.optimisation.batch_size)

    def data(self, *, batch_size: int, accumulate: int, rng: Rng) -> BlockData | LaneData:
        """Returns blocks of the training text, in its order with a memory; fake rows begin with the corpus's prefix."""
        train, validation = self.corpus.stream("train"), self.corpus.stream("validation")
        known = min(self.corpus.prefix, self.base.block - 1)
        sizes = {"block": self.base.block, "known": known, "validation_tokens": self.base.validation_tokens}
        if self.base.memory:
            return LaneData(train, validation, batch_size=batch_size, **sizes)
        return BlockData(train, validation, batch_size=batch_size, accumulate=accumulate, rng=rng, **sizes)

    def save(self, network: Network, folder: Path) -> None:
        """Write a checkpoint, and the record by which ``load_base`` finds it."""
        model: Any = network.module
        tokenizer = self.corpus.tokenizer
        save_checkpoint(model, folder / _MODEL, eos=tokenizer.eos, tokenizer=tokenizer)
        parameters = sum(weight.numel() for weight in model.parameters())
        record = {"kind": "huggingface", "path": _MODEL, "parameters": parameters}
        write_json(folder / RECORD, record | {"fingerprint": checkpoint_fingerprint(folder / _MODEL)})

    def is_saved(self, folder: Path) -> bool:
        """Returns whether the record is there, which is written last."""
        return (folder / RECORD).is_file()

    def restore(self, network: Network, folder: Path) -> None:
        """Read the weights of a checkpoint."""
        network.module.load_state_dict(load_checkpoint(folder / _MODEL)[0].state_dict())

    def measure(self, network: Network, folder: Path, rng: Rng, progress: Progress) -> dict[str, float]:
        """Perplexity of the test text, and of its windows with re-sampling where that is asked for."""
        nats, tokens = self._nats(network, progress)
        starts = np.arange(len(nats)) * self.base.block + 1
        documents = np.searchsorted(self.corpus.documents(self.settings.split), starts, side="right") - 1
        with atomic_write(folder / _BLOCKS) as aside:
            save_file({"nats": nats, "tokens": tokens, "documents": documents.astype(np.int64)}, aside)
        found = {"perplexity": bounded_exp(float(nats.sum() / tokens.sum()))}
        if self.settings.certified_windows:
            found |= self._resampled(network, rng.child("resampled"), progress)
        return {name: np.inf if value is None else value for name, value in found.items()}

    def compare(self, ours: Sequence[Path], others: Sequence[Path], rng: Rng) -> dict[str, Measurement]:
        """How much lower the perplexity is, in percent."""
        a, b = ([read_arrays(folder / _BLOCKS) for folder in folders] for folders in (ours, others))
        log_a, log_b = (-np.mean([blocks["nats"] for blocks in side], axis=0) for side in (a, b))
        documents = a[0]["documents"]
        return {"percent lower perplexity": paired_bootstrap(log_a, log_b, a[0]["tokens"], documents, rng)}

    @torch.no_grad()
    def _nats(self, network: Network, progress: Progress) -> tuple[Float[np.ndarray, " W"], Float[np.ndarray, " W"]]:
        """Of each block of the text, and its tokens."""
        stream = self.corpus.stream(self.settings.split)
        sizes = {"block": self.base.block, "known": 0, "validation_tokens": len(stream)}
        memory = network if isinstance(network, Recurrent) and self.base.memory else None
        blocks = (
            LaneData(stream, stream, batch_size=1, **sizes)
            if memory
            else BlockData(stream, stream, batch_size=_ROWS, accumulate=1, rng=Rng(), **sizes)
        )
        total, done = (len(stream) - 1) // self.base.block, 0
        # made at once: small arrays that stay, made between logits, would keep the room of each of those from the next
        nats, tokens = np.zeros(total), np.zeros(total)
        with progress.track("perplexity", total, "blocks") as advance, memory.apart() if memory else nullcontext():
            for batch in blocks.held_out():
                logits = network.logits(batch.given, batch.tokens)
                targets = batch.tokens.to(logits.device)
                each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
                rows = slice(done, done + len(targets))
                nats[rows] = (each.double().cpu() * batch.mask).sum(1).numpy()
                tokens[rows] = batch.mask.sum(1).double().numpy()
                if memory:
                    memory.remember()
                done += len(targets)
                advance(len(targets))
        return nats, tokens

    def _resampled(self, network: Network, rng: Rng, progress: Progress) -> dict[str, float | None]:
        """Perplexity of windows: of the network, and of the residual model with the energy of its logits."""
        windows = self.corpus.windows(self.settings.split)
        rows = choose_windows(len(windows), self.settings.certified_windows, self.settings.split, rng.child("windows"))
        model: Any = copy.deepcopy(network.module)  # what measures it freezes it
        base = HuggingFaceLM(model, eos=self.corpus.tokenizer.eos)
        report = residual_perplexity(
            Residual(base, Logits(LogitsEnergy(), base)),
            windows.continuations(rows),
            self.settings.candidates - 1,
            self.corpus.space,
            rng.child("draws"),
            tokenizer=self.corpus.tokenizer,
            documents=windows.documents[rows],
            progress=progress,
        )
        by_bound = report.perplexity["token"]
        named = {f"perplexity resampled ({bound})": by_bound[bound].value for bound in ("certified", "lower", "upper")}
        return {"perplexity of windows": report.base.value} | named
