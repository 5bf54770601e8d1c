"""Hard constraints as booleans: which labels, and which neighbours, a tagging may have.

    y is allowed  ⇔  start(y_1)  ∧  end(y_L)  ∧  pairs(y_{t−1}, y_t) for t = 2 … L  ∧  labels_t(y_t) for every t

A forbidden tagging has probability exactly 0, whatever the numbers are. ``bio`` and ``bioes`` read the constraints off
the names of the labels:

    BIO     I-x follows B-x or I-x
    BIOES   B-x and I-x are followed by I-x or E-x; O, E-x and S-x by O, B or S
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from freenergy.core.errors import UserError

_INSIDE = {"bio": "I", "bioes": "IE"}  # prefixes that continue a segment
_OPEN = {"bio": "BI", "bioes": "BI"}  # prefixes whose segment may go on
_MUST_GO_ON = {"bio": "", "bioes": "BI"}  # prefixes whose segment has to
_PREFIXES = {"bio": "BI", "bioes": "BIES"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a tagging may contain; None leaves everything open.

    ``pairs`` [K, K] (or [B, T − 1, K, K], entry t − 1 for the step into position t), ``start`` and ``end`` [K],
    ``labels`` [B, T, K].
    """

    pairs: Bool[Tensor, "*steps K K"] | None = None
    start: Bool[Tensor, " K"] | None = None
    end: Bool[Tensor, " K"] | None = None
    labels: Bool[Tensor, "B T K"] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is forbidden."""
        return self.pairs is None and self.start is None and self.end is None and self.labels is None

    def with_labels(self, labels: Bool[Tensor, "B T K"]) -> "Allowed":
        """Return the constraints with these label sets as well."""
        if self.labels is None:
            return replace(self, labels=labels)
        if self.labels.shape != labels.shape:
            raise UserError(f"label sets have the shape {list(labels.shape)}: give {list(self.labels.shape)}")
        return replace(self, labels=self.labels & labels)


def bio(labels: Sequence[str]) -> Allowed:
    """Return the constraints of the BIO (IOB2) scheme for labels such as O, B-PER, I-PER.

    >>> bio(["O", "B-PER", "I-PER"]).pairs.tolist()
    [[True, True, False], [True, True, True], [True, True, True]]
    """
    return _scheme("bio", labels)


def bioes(labels: Sequence[str]) -> Allowed:
    """Return the constraints of the BIOES scheme for labels such as O, B-PER, I-PER, E-PER, S-PER.

    >>> bioes(["O", "B-PER", "I-PER", "E-PER", "S-PER"]).end.tolist()
    [True, False, False, True, True]
    """
    return _scheme("bioes", labels)


def _scheme(scheme: str, labels: Sequence[str]) -> Allowed:
    parts = [_split(scheme, label) for label in labels]
    pairs = [[_may_follow(scheme, before, after) for after in parts] for before in parts]
    start = [_may_follow(scheme, ("O", ""), after) for after in parts]
    end = [before[0] not in _MUST_GO_ON[scheme] for before in parts]
    return Allowed(pairs=torch.tensor(pairs), start=torch.tensor(start), end=torch.tensor(end))


def _split(scheme: str, label: str) -> tuple[str, str]:
    prefix, _, kind = label.partition("-")
    if label == "O" or (prefix in _PREFIXES[scheme] and len(prefix) == 1 and kind):
        return prefix, kind
    known = ", ".join(f"{letter}-NAME" for letter in _PREFIXES[scheme])
    raise UserError(f"the label {label!r} is not of the scheme {scheme.upper()}: labels are O, {known}")


def _may_follow(scheme: str, before: tuple[str, str], after: tuple[str, str]) -> bool:
    continues = after[0] in _INSIDE[scheme]
    if continues:
        return before[0] in _OPEN[scheme] and before[1] == after[1]
    return before[0] not in _MUST_GO_ON[scheme]
