"""A black box as a base: whatever writes texts, without their probabilities.

    prefix c  →  its text  →  the source  →  text x  →  tokens of x after c, and EOS

A text is encoded as it stands after its prefix, and ends with EOS. A text of more than L tokens, the length of the
space, is cut there, as the continuations of the corpus are. So the law of the base is that of its texts cut at L
tokens, whatever wrote them. Its draws must be independent, given the prefix: see docs/black-box.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint
from freenergy.core.rng import Rng
from freenergy.core.roles import Draws
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.corpus.tokenize_pair import encode_after
from freenergy.corpus.tokenizer import Tokenizer
from freenergy.lm.sources.load import POOL, load_source, source_files, source_record, source_settings
from freenergy.lm.sources.pool import FromPool
from freenergy.lm.sources.protocol import DrawnText, TextRequest, TextSource
from freenergy.lm.sources.settings import PoolSource, SourceSettings

_INSTEAD = (
    "write with resampling, rejection or metropolis, rank by energy, and take energies that read text (ngram, or bit "
    'with start = "encoder" or "scratch")'
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLM:
    """A source of texts as a language model without probabilities: it draws, and nothing else.

    ``settings`` are those of a source that a folder can name; a source that is only an object cannot be saved.
    """

    kind: ClassVar[str] = "samples"
    record_keys: ClassVar[tuple[str, ...]] = ("source", "lead")
    draws_here: ClassVar[bool] = False
    is_sample_only: ClassVar[bool] = True
    max_length: ClassVar[int | None] = None
    source: TextSource
    tokenizer: Tokenizer
    lead: str = ""
    settings: SourceSettings | None = None

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the tokenizer."""
        return self.tokenizer.vocab_size

    @property
    def eos(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos

    def part(self, split: str) -> "SamplesLM":
        """Return the base that draws texts for windows of a split; only a pool is divided."""
        return replace(self, source=self.source.part(split))

    def write(self, folder: Path) -> dict[str, Any]:
        """Return the settings of the source, and copy a pool."""
        if self.settings is None:
            raise UserError(
                f"a source of class {type(self.source).__name__} cannot be saved: name it by settings (lm.sources)"
            )
        if isinstance(self.source, FromPool):
            self.source.save(folder / POOL)
        record = source_record(self.settings)
        return {
            "source": record,
            "lead": self.lead,
            "fingerprint": fingerprint([record, self.lead, source_files(self.settings)]),
        }

    @classmethod
    def read(cls, folder: Path, record: dict[str, Any], tokenizer: Tokenizer) -> "SamplesLM":
        """Find the source again; nothing is started before a text is asked for."""
        settings = source_settings(record["source"])
        if isinstance(settings, PoolSource):
            settings = PoolSource(path=str(folder / POOL))
        return cls(source=load_source(settings), tokenizer=tokenizer, lead=record["lead"], settings=settings)

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Refuse: the probability of a text is not known."""
        raise UserError(f"the base only gives texts, and no probabilities: {_INSTEAD}")

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """Refuse: the probabilities of the next token are not known."""
        raise UserError(f"the base only gives whole texts, and no probabilities of tokens: {_INSTEAD}")

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draw ``num`` texts after each context; their log-probabilities are 0, relative to this base itself."""
        _check(space, truncation)
        first_b, first_n = rng.origin
        prefixes = [[token for token in row if token != self.eos] for row in contexts.lists()]
        requests = []
        for b, prefix in enumerate(prefixes):
            stream, text = rng.child("samples", first_b + b), self.tokenizer.decode(prefix)
            requests += [TextRequest(text, stream, first_n + n, space.length) for n in range(num)]
        drawn = self.source.draw(requests)
        rows = [
            [self._tokens(prefix, requests[i], drawn[i], space) for i in range(b * num, (b + 1) * num)]
            for b, prefix in enumerate(prefixes)
        ]
        x = _padded(contexts, rows, space.length)
        zero = torch.zeros(x.shape, dtype=torch.float64, device=x.tokens.device)
        return Draws(x, zero, zero)

    def _tokens(self, context: list[int], request: TextRequest, drawn: DrawnText, space: SequenceSpace) -> list[int]:
        """Return a text as a continuation: its tokens and EOS, or the first L tokens of a longer one."""
        text = drawn.text
        if request.prefix and self.lead and text[:1].strip():
            text = self.lead + text
        tokens = encode_after(self.tokenizer, context, request.prefix, text).tokens if text else []
        if len(tokens) < space.length and not drawn.has_ended:
            raise UserError(
                f"the source was cut off after {len(tokens)} tokens and a continuation has up to {space.length}: let "
                "it write more (max_tokens), or set corpus.continuation lower"
            )
        return [*tokens, self.eos][: space.length]


def _check(space: SequenceSpace, truncation: Truncation) -> None:
    if not truncation.is_identity:
        raise UserError(
            "temperature, top_k and top_p need the probabilities of tokens, which the base does not give: leave them "
            "out, or set them where the texts are made"
        )
    if space.eos is None:
        raise UserError('texts of a source end where they end, and the space has no EOS: set corpus.ending = "eos"')


def _padded(contexts: Sequences, rows: Sequence[Sequence[list[int]]], length: int) -> Continuations:
    found = Continuations.from_lists(contexts.lists(), rows)
    tokens = torch.nn.functional.pad(found.tokens, (0, length - found.tokens.shape[2]))
    device = contexts.tokens.device
    return Continuations(contexts, tokens.to(device), found.lengths.to(device))
