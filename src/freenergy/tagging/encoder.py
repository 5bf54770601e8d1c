"""A Hugging Face network as a reader of words.

    state of word t = mean of the last hidden states of the pieces of word t

The tokenizer says which word each piece belongs to. A word without pieces (of characters it drops) has the state 0.
Sentences of more pieces than the network has places are read in parts, each as long as fits, at word boundaries.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.errors import UserError
from freenergy.energies.bit import load_encoder
from freenergy.tagging.sentences import Sentence

_REST = 8  # pieces that special tokens may take


@final
class WordEncoder(nn.Module):
    """States of words; a frozen encoder reads each sentence once and remembers it."""

    def __init__(self, folder: Path, *, frozen: bool) -> None:
        super().__init__()
        from transformers import AutoTokenizer

        self.network: Any = load_encoder(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not self.tokenizer.is_fast:
            raise UserError(
                f"the tokenizer of {folder} cannot say which word a piece is of: take one with tokenizer.json"
            )
        config = self.network.config.get_text_config()
        self.width: int = config.hidden_size
        self.places: int = getattr(config, "max_position_embeddings", 512) - _REST
        self.frozen, self._known = frozen, dict[tuple[str, ...], Tensor]()
        if frozen:
            self.network.eval().requires_grad_(False)

    def states(self, sentences: Sequence[Sentence]) -> Float[Tensor, "N H"]:
        """Returns the state of every word, sentence after sentence."""
        if not self.frozen:
            return torch.cat(self._read([sentence.words for sentence in sentences]))
        fresh = [words for sentence in sentences if (words := sentence.words) not in self._known]
        with torch.no_grad():
            for words, found in zip(fresh, self._read(fresh) if fresh else [], strict=True):
                self._known[words] = found
        return torch.cat([self._known[sentence.words] for sentence in sentences])

    def _read(self, sentences: Sequence[tuple[str, ...]]) -> list[Float[Tensor, "T H"]]:
        parts = [part for words in sentences for part in self._parts(words)]
        device = self.network.device
        coded = self.tokenizer(
            [list(part) for part in parts],
            is_split_into_words=True,
            padding=True,
            truncation=True,
            max_length=self.places + _REST,
            return_tensors="pt",
        )
        h = self.network(**{name: each.to(device) for name, each in coded.items()}).last_hidden_state
        states = []
        for row, part in enumerate(parts):
            owner = torch.tensor([-1 if w is None else w for w in coded.word_ids(row)], device=device)
            kept = owner >= 0
            sums = h.new_zeros(len(part), self.width).index_add(0, owner[kept], h[row, kept])
            states.append(sums / torch.bincount(owner[kept], minlength=len(part)).clamp(min=1).unsqueeze(1))
        whole, place = list[Tensor](), 0
        for words in sentences:
            count = len(self._parts(words))
            whole.append(torch.cat(states[place : place + count]))
            place += count
        return whole

    def _parts(self, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Returns the words in parts that fit."""
        if sum(map(len, words)) < self.places:
            return [words]
        sizes = [len(self.tokenizer.tokenize(word)) for word in words]
        parts, begin, pieces = list[tuple[str, ...]](), 0, 0
        for place, size in enumerate(sizes):
            if pieces + size > self.places and place > begin:
                parts.append(words[begin:place])
                begin, pieces = place, 0
            pieces += size
        return [*parts, words[begin:]]
