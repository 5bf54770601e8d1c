"""The next-token table as text: Table 3 of Deng et al. 2020 with standard errors."""

from dataclasses import dataclass
from typing import Any, final

from freenergy.corpus import Tokenizer
from freenergy.partition.next_token import NextRow, NextToken

COLUMNS = ("next", "base", "model", "± s.e.", "rank", "effective")


@final
@dataclass(frozen=True, slots=True)
class NextTable:
    """The likeliest next tokens of the base, with the probabilities of base and residual model."""

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
