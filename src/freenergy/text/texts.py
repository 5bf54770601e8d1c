"""What was written, or may come next, as text: to read, to print, as JSON and as a data frame."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from freenergy.core.errors import UserError
from freenergy.core.scored import Scored
from freenergy.core.truncation import ANCESTRAL
from freenergy.corpus import Tokenizer
from freenergy.partition import log_partition
from freenergy.partition.estimate import LARGE_SHARE
from freenergy.partition.next_token import NextRow, NextToken
from freenergy.samplers.sampled import Sampled

if TYPE_CHECKING:
    import pandas


COLUMNS = ("next", "base", "model", "± s.e.", "rank", "effective")  # of the next-token table
_TARGETS = {
    "model": "the residual model on the strings that the proposal can draw",
    "restricted": "the residual model restricted to the truncated base",
    "base": "the base, truncated and tempered as asked",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text that was written; its numbers are sums over its chunks."""

    text: str
    tokens: tuple[int, ...]
    log_base: float
    energy: float
    drawn: int  # tokens that the numbers are of: more than ``tokens`` where the document ended before them
    share: float | None = None  # of the weight among the candidates; None for several chunks
    has_ended: bool = False  # EOS was written

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {
            "text": self.text,
            "tokens": len(self.tokens),
            "drawn": self.drawn,
            "log_base": finite(self.log_base),
            "energy": finite(self.energy),
            "log_score": finite(self.log_base - self.energy),
            "share": self.share,
            "has_ended": self.has_ended,
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts that continue one prefix, and the evidence of how they were chosen.

    ``steps`` are what the sampler gave: one for all texts, or one per chunk of each text in order.
    """

    prefix: str
    texts: tuple[Text, ...]
    steps: tuple[Sampled, ...]
    tokenizer: Tokenizer
    notes: tuple[str, ...] = ()
    has_log_prob: bool = True  # False: the base only samples, and what stands for log P_LM means nothing

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> Text:
        return self.texts[i]

    def __str__(self) -> str:
        lines = []
        for text in self.texts:
            share = "" if text.share is None else f", {100 * text.share:.1f} % of the weight"
            lines += [
                f"{self.prefix[-60:]} ▸ {text.text}",
                f"    {self.numbers(text)}{share}",
            ]
        return "\n".join([*lines, *evidence_lines(self.steps), *(f"mind: {note}" for note in self.all_notes())])

    def numbers(self, text: Text) -> str:
        """Return log P_LM, where it is known, and the energy of a text."""
        known = f"log P_LM {text.log_base:.2f}, " if self.has_log_prob else ""
        return f"{known}E {text.energy:.2f}"

    def all_notes(self) -> list[str]:
        """Return what speaks against trusting the texts, each thing once."""
        found, of = Counter(note for step in self.steps for note in step.notes), len(self.steps)
        counted = [f"{note} (in {count} of {of} chunks)" if count > 1 else note for note, count in found.items()]
        return [*dict.fromkeys(self.notes), *counted]

    def to_json(self, *, candidates: bool = False) -> dict[str, Any]:
        """Return texts and diagnostics; with every candidate if asked."""
        steps = [diagnosis(step) for step in self.steps]
        if candidates:
            rows = [self._rows(step) for step in self.steps]
            steps = [{**step, "candidates": row} for step, row in zip(steps, rows, strict=True)]
        return {
            "prefix": self.prefix,
            "texts": [text.to_json() | self._unknown for text in self.texts],
            "steps": steps,
            "notes": self.all_notes(),
        }

    def to_frame(self) -> "pandas.DataFrame":
        """Return one row per candidate: step, text, log-probabilities, energy, share of the weight, times chosen."""
        return data_frame([{"step": i, **row} for i, step in enumerate(self.steps) for row in self._rows(step)])

    @property
    def _unknown(self) -> dict[str, None]:
        return {} if self.has_log_prob else {"log_base": None}

    def _rows(self, step: Sampled) -> list[dict[str, Any]]:
        found = step.candidates
        if found is None or step.chosen is None:
            return [row | self._unknown for row in _results(step, self.tokenizer)]
        times = step.chosen.bincount(minlength=found.energy.shape[1]).tolist()
        columns = [found.log_base, found.log_proposal, found.energy, found.log_weight, found.share]
        names = ["log_base", "log_proposal", "energy", "log_weight", "share"]
        if found.log_ahead is not None:
            columns, names = [*columns, found.log_ahead], [*names, "log_ahead"]
        numbers = [column[0].tolist() for column in columns]
        return [
            {"text": self.tokenizer.decode(x), "tokens": len(x), "chosen": chosen}
            | {name: finite(value) for name, value in zip(names, row, strict=True)}
            | self._unknown
            | ({} if self.has_log_prob else {"log_proposal": None})
            for x, chosen, *row in zip(found.x.lists()[0], times, *numbers, strict=True)
        ]


def _results(step: Sampled, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    rows = zip(step.x.lists()[0], step.log_base[0].tolist(), step.energy[0].tolist(), strict=True)
    return [
        {"text": tokenizer.decode(x), "tokens": len(x), "log_base": finite(log_base), "energy": finite(E), "chosen": 1}
        for x, log_base, E in rows
    ]


def diagnosis(step: Sampled) -> dict[str, Any]:
    """Return how a sampler's results came about, in plain numbers."""
    numbers: dict[str, Any] = {
        "method": step.method,
        "law": step.law,
        "distance": step.distance,
        "distance_is_estimated": step.is_estimated,
        "base_tokens": step.base_tokens,
        "acceptance": step.acceptance,
    }
    if step.log_partition is not None:
        numbers |= {"log_partition": finite(step.log_partition), "ess": step.ess}
    return numbers | ({} if step.candidates is None else weights(step.candidates))


def weights(candidates: Scored) -> dict[str, Any]:
    """Effective sample size, largest share, k̂ and coverage of one context's candidates."""
    n, (covered, error) = candidates.energy.shape[1], candidates.covered()
    found = log_partition(candidates.log_weight) if n > 1 else None
    return {
        "candidates": n,
        "distinct": int(candidates.first().sum()),
        "ess": candidates.ess.item(),
        "largest_share": float(candidates.share.max()),
        "k_hat": None if found is None else finite(float(found.k_hat)),
        "log_partition": None if found is None else finite(float(found.lower)),
        "standard_error": None if found is None else finite(float(found.standard_error)),
        "covered": float(covered),
        "covered_error": finite(float(error)),
    }


def evidence_lines(steps: Sequence[Sampled]) -> list[str]:
    """Return the evidence in one or two lines; of several steps the worst numbers."""
    numbers = [diagnosis(step) for step in steps]
    lines = []
    if steps[0].candidates is not None:
        ess, share = min(row["ess"] for row in numbers), max(row["largest_share"] for row in numbers)
        tails = [row["k_hat"] for row in numbers if row["k_hat"] is not None]
        at_worst = ", at worst" if len(steps) > 1 else ""
        tail = f", tail k̂ {max(tails):.2f}" if tails else ""
        lines.append(
            f"{numbers[0]['candidates']} candidates{at_worst}: {ess:.1f} effective, the heaviest has "
            f"{100 * share:.1f} % of the weight{tail}"
        )
    accepted = [row["acceptance"] for row in numbers if row["acceptance"] is not None]
    rate = f"{100 * min(accepted):.3g} % of proposals accepted; " if accepted else ""
    how = "estimated" if any(step.is_estimated for step in steps) else "for sure"
    known = [step.distance for step in steps if step.distance is not None]
    far = f"at most {max(known):.2g} ({how})" if len(known) == len(steps) else "not known"
    if any(row.get("largest_share", 0.0) > LARGE_SHARE for row in numbers):
        far = "not known, since one candidate carries most of the weight"
    lines.append(
        f"{steps[0].method}: {rate}total variation from {_target(steps[0])} {far}; "
        f"{sum(step.base_tokens for step in steps):,} base tokens"
    )
    return lines


def _target(step: Sampled) -> str:
    """Return the law that was aimed at, in words."""
    found = step.candidates
    words = "the residual model" if found is not None and found.truncation == ANCESTRAL else _TARGETS[step.law]
    return words if found is None or found.log_ahead is None else f"{words}, looking ahead,"


def data_frame(rows: list[dict[str, Any]]) -> "pandas.DataFrame":
    """Return a pandas data frame, where pandas is installed."""
    try:
        import pandas
    except ImportError:
        raise UserError("a data frame needs pandas: pip install pandas, or use to_json") from None
    return pandas.DataFrame(rows)


def finite(value: float) -> float | None:
    """Return the number, or None where JSON has none for it."""
    return value if abs(value) < float("inf") else None


@final
@dataclass(frozen=True, slots=True)
class NextTable:
    """The likeliest next tokens of the base under both models: Table 3 of Deng et al. 2020 with standard errors."""

    prefix: str
    found: NextToken
    tokenizer: Tokenizer

    def rows(self) -> list[list[str]]:
        """Return the cells of a table as text; the last row is all other tokens."""
        strata = [*self.found.rows, *([self.found.other] if self.found.other else [])]
        return [
            [
                self._text(row),
                f"{row.base:.4f}",
                f"{row.joint:.4f}",
                "exact" if self.found.is_exact else f"{row.standard_error:.4f}",
                "" if row.joint_rank is None else str(row.joint_rank),
                "" if row.ess is None else f"{row.ess:.1f}",
            ]
            for row in strata
        ]

    def __str__(self) -> str:
        rows = [list(COLUMNS), *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, *([f"mind: {verdict}"] if (verdict := self.found.verdict()) else [])])

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, each token with its text."""
        found = self.found.to_json()
        for row, plain in zip(self.found.rows, found["rows"], strict=True):
            plain["text"] = self._text(row)
        return {"prefix": self.prefix, **found}

    def _text(self, row: NextRow) -> str:
        if row.token is None:
            return "(other)"
        return "(end of document)" if row.token == self.tokenizer.eos else self.tokenizer.decode([row.token])
