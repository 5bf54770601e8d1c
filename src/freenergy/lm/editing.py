"""Predictions changed before a token is drawn from them.

    log P(v | h) = e_h(log P_LM(· | h))_v − log Σ_u exp e_h(log P_LM(· | h))_u

e_h is an edit: it knows what B × N candidates have read so far, changes scores of the whole vocabulary in place, and
does not mind a constant that is added to a row. A language model that can draw by fast steps has them edited there
(``EditableLM``); any other is edited around its stepper (``EditedLM``).

Legend: R = B·N rows, V vocabulary, W ≥ V entries of a row in memory.
"""

from collections.abc import Callable
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, LanguageModel
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation, normalised
from freenergy.lm.stepping import Stepper, begin, in_chunks, started
from freenergy.lm.token_log_probs import token_log_probs

_NUMBERS = 2**22  # log-probabilities held at once while sampling


@runtime_checkable
class Edit(Protocol):
    """What changes the predictions of B × N candidates; before the first token there is one row per context."""

    def advance(self, tokens: Int[Tensor, "B N"]) -> None:
        """Read a token of each candidate."""
        ...

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Replace candidate n of context b by candidate rows[b, n] of that context."""
        ...

    def apply(self, scores: Float[Tensor, "some W"], rows: slice) -> None:
        """Change the scores of some rows in place; entries behind the vocabulary stay as they are."""
        ...


EditMaker = Callable[[Sequences, int], Edit]  # from contexts, none of them empty, and the number of tokens to come


@runtime_checkable
class EditableLM(Protocol):
    """A language model that edits its own predictions wherever it makes them."""

    def edited(self, edit: EditMaker) -> LanguageModel:
        """Return the same model with edited predictions."""
        ...


def applied(edit: Edit, log_p: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """Compute log P of all rows, normalised."""
    scores = log_p.flatten(0, -2).clone(memory_format=torch.contiguous_format)
    edit.apply(scores, slice(0, len(scores)))
    return normalised(scores).view(log_p.shape)


def applied_after(
    edit: Edit, log_p: Float[Tensor, "B N S V"], tokens: Int[Tensor, "B N S"]
) -> Float[Tensor, "B N S V"]:
    """Compute log P at S places, each of which is predicted once the token in its column has been read."""
    edited = torch.empty_like(log_p)
    for s in range(tokens.shape[2]):
        edit.advance(tokens[:, :, s])
        edited[:, :, s] = applied(edit, log_p[:, :, s])
    return edited


@final
class EditedStepper:
    """A stepper whose predictions are edited."""

    def __init__(self, inner: Stepper, edit: Edit) -> None:
        self._inner, self._edit = inner, edit
        self._first = applied(edit, inner.first())

    @property
    def states(self) -> Tensor:
        """Return the hidden states of the stepper inside, where it shows them."""
        states: Tensor = self._inner.states  # type: ignore[attr-defined]
        return states

    def first(self) -> Float[Tensor, "B V"]:
        """Compute log P of the first token."""
        return self._first

    def step(self, tokens: Int[Tensor, "B N"]) -> Float[Tensor, "B N V"]:
        """Read a token of each candidate."""
        log_p = self._inner.step(tokens)
        self._edit.advance(tokens)
        return applied(self._edit, log_p)

    def select(self, rows: Int[Tensor, "B N"]) -> None:
        """Exchange candidates, and what the edit knows of them."""
        self._inner.select(rows)
        self._edit.select(rows)


@final
class EditedLM:
    """Any language model, edited around its stepper."""

    def __init__(self, base: LanguageModel, edit: EditMaker) -> None:
        self.base, self.edit = base, edit
        self.vocab_size, self.eos, self.max_length = base.vocab_size, base.eos, base.max_length
        self.draws_here = base.draws_here

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Compute log P(x | c), token by token."""
        return token_log_probs(self, x).log_prob.sum(-1)

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """Compute log P(v | c) for every token v."""
        contexts = started(contexts, self.eos)
        return applied(self.edit(contexts, 0), self.base.next_log_probs(contexts))

    def stepper(self, contexts: Sequences, num: int, length: int) -> EditedStepper:
        """Return a stepper at the start of ``num`` continuations of each context."""
        contexts = started(contexts, self.eos)
        return EditedStepper(begin(self.base, contexts, num, length), self.edit(contexts, length))

    @torch.no_grad()
    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draw ``num`` independent continuations of each context."""

        def read(some: slice) -> Callable[[int], EditedStepper]:
            return lambda count: self.stepper(contexts[some], count, space.length)

        rows = max(1, _NUMBERS // self.vocab_size)
        return in_chunks(read, contexts, num, space, rng, truncation, rows=rows)
