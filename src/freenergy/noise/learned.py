"""Noise that learns the data while the energy learns to separate it from them (dynamic noise-contrastive estimation).

    max over φ of   mean log q_φ(x⁺ | c)          next to the objective, in which q_φ stands without gradient

(Wang and Ou, "Improved training of neural trans-dimensional random field language models with dynamic noise-contrastive
estimation", 2018.) The nearer q_φ comes to the data, the more each negative teaches, and the fewer are needed.
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from freenergy.core.rng import Rng
from freenergy.core.roles import Draws, Examples, LanguageModel, Model, NoiseState
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.lm.tabular import TabularLM
from freenergy.noise.from_lm import draws_by_room, stream_of


@final
class Learned:
    """Draws of a language model whose weights learn; ``rate`` is its learning rate relative to the energy's.

    ``module`` holds the weights of ``lm``, whose ``log_prob`` carries their gradient. ``base`` scores the draws.
    """

    kind = "learned"

    def __init__(
        self, lm: LanguageModel, module: nn.Module, base: LanguageModel, space: SequenceSpace, *, rate: float = 1.0
    ) -> None:
        self.lm, self.module, self.base, self.space, self.rate = lm, module.requires_grad_(True), base, space, rate

    def init(self, rng: Rng) -> NoiseState:
        """Returns no state: what is learned is in the weights."""
        return {}

    @torch.no_grad()
    def draw(
        self, model: Model | None, state: NoiseState, data: Examples, num: int, rng: Rng
    ) -> tuple[NoiseState, Draws]:
        """Draws ``num`` continuations of each window's prefix from q_φ as it is now."""

        def drawn(contexts: Sequences, numbers: list[int], space: SequenceSpace) -> Draws:
            return self.lm.sample(contexts, num, space, stream_of(rng, numbers))

        draws = draws_by_room(data, self.space, drawn)
        return state, Draws(draws.x, self.base.log_prob(draws.x), draws.log_proposal)

    def log_noise(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Returns log q_φ(x | c), with the gradient of φ."""
        return self.lm.log_prob(x)


@final
class NgramLogits(nn.Module):
    """A table of logits over the last ``order`` tokens that learns; it starts uniform.

    >>> q = NgramLogits(vocab_size=4, order=1)
    >>> q.log_prob(Continuations.from_lists([[1]], [[[2, 3]]])).exp().item()
    0.0625
    """

    draws_here = True

    def __init__(self, *, vocab_size: int, order: int, eos: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.eos, self.max_length = vocab_size, eos, None
        self.logits = nn.Parameter(torch.zeros(vocab_size**order, vocab_size, dtype=torch.float64))

    def log_prob(self, x: Continuations) -> Float[Tensor, "B N"]:
        """Returns log q(x | c)."""
        return self._lm().log_prob(x)

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "B V"]:
        """Returns log q(v | c) for every token v."""
        return self._lm().next_log_probs(contexts)

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """Draws ``num`` continuations of each context."""
        return self._lm().sample(contexts, num, space, rng, truncation)

    def _lm(self) -> TabularLM:
        return TabularLM(self.logits, eos=self.eos)
