"""The roles. Everything else in the package plays one of them.

    P(x | c) = P_LM(x | c) · exp(−E(c, x)) / Z(c),        Z(c) = E_{x ~ P_LM(·|c)} exp(−E(c, x))

``energy`` is low where text is likely. ``log_base`` is log P_LM. ``log_score`` = log_base − energy is not normalised;
``log_prob`` is a promise: it sums to one over a ``SequenceSpace``. Roles are structural: any class with these methods
plays the role, and ``freenergy.testing`` checks that it plays it well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.core.truncation import ANCESTRAL, Truncation


@final
@dataclass(frozen=True, slots=True)
class Draws:
    """Continuations drawn from a proposal, with both log-probabilities of each.

    ``log_base`` is log P_LM(x | c); ``log_proposal`` is the log-probability with which x was really drawn. They are
    equal when nothing is truncated or tempered.
    """

    x: Continuations
    log_base: Float[Tensor, "batch num"]
    log_proposal: Float[Tensor, "batch num"]

    @staticmethod
    def cat(parts: "Sequence[Draws]", dim: int) -> "Draws":
        """Join draws of other contexts (dim 0) or more candidates of the same contexts (dim 1)."""
        x = Continuations.cat([part.x for part in parts], dim)
        log_base = torch.cat([part.log_base for part in parts], dim)
        return Draws(x, log_base, torch.cat([part.log_proposal for part in parts], dim))


@runtime_checkable
class LanguageModel(Protocol):
    """P_LM(x | c): normalised, with exact scores and exact samples."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; ids are 0 … vocab_size − 1."""

    @property
    def eos(self) -> int:
        """The token that ends a document. An empty context reads as the start of a document, after EOS."""

    @property
    def max_length(self) -> int | None:
        """The longest context + continuation that the model can read, or None where there is no limit."""

    @property
    def draws_here(self) -> bool:
        """Whether ``sample`` draws from the ``Rng`` that it is given; False where a server draws by a seed."""

    def log_prob(self, x: Continuations) -> Float[Tensor, "batch num"]:
        """log P_LM(x | c), float64: the sum over the tokens of x, EOS included where it is present."""

    def next_log_probs(self, contexts: Sequences) -> Float[Tensor, "batch V"]:
        """log P_LM(v | c) for every token v."""

    def sample(
        self, contexts: Sequences, num: int, space: SequenceSpace, rng: Rng, truncation: Truncation = ANCESTRAL
    ) -> Draws:
        """``num`` independent continuations of each context, in ``space``."""


@runtime_checkable
class Energy(Protocol):
    """E(c, x): one number per continuation, low where text is likely. An nn.Module's forward, or any callable."""

    def __call__(self, x: Continuations) -> Float[Tensor, "batch num"]:
        """The energy of each continuation."""


@runtime_checkable
class Model(Protocol):
    """A density of continuations, known up to a constant per context."""

    def log_score(self, x: Continuations) -> Float[Tensor, "batch num"]:
        """log P(x | c) + log Z(c), with gradients where the model has weights to train."""


M = TypeVar("M", bound=Model, covariant=True)


@final
@dataclass(frozen=True, slots=True)
class Target(Generic[M]):
    """What is sampled and summed: P(x | c) ∝ exp(log_score(c, x)) for each context c, x in a space.

    ``proposal`` is what draws are made from where the model has no base of its own.
    """

    model: M
    contexts: Sequences
    space: SequenceSpace
    proposal: LanguageModel | None = None

    def __len__(self) -> int:
        return len(self.contexts)

    def __getitem__(self, rows: slice | Tensor) -> "Target[M]":
        return replace(self, contexts=self.contexts[rows])

    def after(self, contexts: Sequences) -> "Target[M]":
        """Return the same target given other contexts."""
        return replace(self, contexts=contexts)

    def within(self, space: SequenceSpace) -> "Target[M]":
        """Return the same target on another space."""
        return replace(self, space=space)


@runtime_checkable
class KernelState(Protocol):
    """What the next step needs: at least the positions [1, chains]."""

    @property
    def x(self) -> Continuations: ...  # noqa: D102


@runtime_checkable
class KernelInfo(Protocol):
    """What one step did: which chains took their proposal, and how many tokens the base has drawn for it."""

    @property
    def is_accepted(self) -> Bool[Tensor, " chains"]: ...  # noqa: D102
    @property
    def base_tokens(self) -> int: ...  # noqa: D102


S = TypeVar("S", bound=KernelState)


@runtime_checkable
class Kernel(Protocol[S]):
    """One step of Markov chains side by side that leaves the target of their one context invariant: P K = P."""

    def init(self, target: Target[Model], x: Continuations) -> S:
        """Start chains at given positions [1, chains]."""

    def step(self, target: Target[Model], state: S, rng: Rng) -> tuple[S, KernelInfo]:
        """Move every chain once; ``rng`` is this step's own, and chain n draws from candidate n of it."""


Z_co = TypeVar("Z_co", covariant=True)


@runtime_checkable
class PartitionEstimator(Protocol[Z_co]):
    """log Z of every context of a target, with diagnostics: settings that can be called.

    The answer is a ``partition.LogPartition`` of shape [B]; a space of several lengths gives [B, lengths].
    """

    def __call__(self, target: Target[Model], rng: Rng) -> Z_co:
        """Estimate log Z; the same ``rng`` gives the same estimate, and contexts own their random numbers."""


@final
@dataclass(frozen=True, slots=True)
class Scores:
    """All that an objective sees of continuations: numbers, never networks.

    ``log_score`` is the model's unnormalised log-density, ``log_noise`` the log-probability under the law that the
    negatives were drawn from. Both are there for data and for negatives.
    """

    log_score: Float[Tensor, "batch num"]
    log_noise: Float[Tensor, "batch num"]

    @classmethod
    def relative(
        cls, energy: Float[Tensor, "batch num"], log_ratio: Float[Tensor, "batch num"] | None = None
    ) -> "Scores":
        """Returns the scores of a residual model divided by its base; ``log_ratio`` is log noise − log P_LM.

        log P_LM stands in both scores and is cancelled before it is computed: where the noise is the base itself (no
        ``log_ratio``), the base need not read the text, and the logit −E has no rounding error.
        """
        return cls(-energy, torch.zeros_like(energy) if log_ratio is None else log_ratio.to(energy.device))

    @property
    def logit(self) -> Float[Tensor, "batch num"]:
        """The log of model over noise, in float64."""
        return self.log_score.double() - self.log_noise.double()


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """A number to minimise, and the metrics that are reported with it."""

    value: Float[Tensor, ""]
    metrics: dict[str, float]
    statistics: dict[str, Tensor] = field(default_factory=dict)  # what a task collects from all micro-batches


@runtime_checkable
class Objective(Protocol):
    """What training minimises: one datum against negatives of the same context."""

    @property
    def kind(self) -> str:
        """The name of the objective in a recipe."""

    def __call__(self, data: Scores, negatives: Scores) -> Loss:
        """Returns the loss of data [B, 1] against negatives [B, K]."""


NoiseState = dict[str, Tensor]  # what a noise carries from draw to draw; empty where draws are independent


@final
@dataclass(frozen=True, slots=True)
class Examples:
    """Windows of the data: their true continuations [B, 1], and their numbers.

    The number of a window names its random stream and its stored draws.
    """

    x: Continuations
    rows: Int[Tensor, " batch"]
    rooms: Int[Tensor, " batch"] | None = None  # maximum length of each continuation; None: that of the noise's space


@runtime_checkable
class Noise(Protocol):
    """Where negatives come from, and with which law."""

    def init(self, rng: Rng) -> NoiseState:
        """Returns the state before the first draw."""

    def draw(
        self, model: "Model | None", state: NoiseState, data: Examples, num: int, rng: Rng
    ) -> tuple[NoiseState, Draws]:
        """Draws ``num`` negatives for each window; ``model`` is the one that learns, for noise that depends on it."""

    def log_noise(self, x: Continuations) -> Float[Tensor, "batch num"] | None:
        """Returns the log-probability of any continuations, or None where the law is unknown; may carry a gradient."""
