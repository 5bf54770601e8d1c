"""Texts that were written before, by anybody: a pool of independent draws.

    {"prefix": "…", "text": "…"}    or    {"prefix": "…", "texts": ["…", …], "split": "test"}        one JSON per line

The candidates of a window are taken from the pool without replacement, in an order that the window's random stream
names: if the texts of the pool are independent draws of one writer, so are the candidates. A text that the energy has
learned to refuse would count as a poor candidate, so no text serves two splits: a row says which it is for (``split``),
or the texts of a prefix are divided by their place in the file, half for training, a fifth for validation, the rest for
test. A pool without prefixes has the empty prefix.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.files import write_text
from freenergy.corpus.settings import SPLITS
from freenergy.lm.sources.protocol import DrawnText, TextRequest

_TENTHS = (5, 7)  # the first five of ten texts are for training, two for validation, three for test
Texts = dict[str, dict[str, list[str]]]  # prefix → split → texts


@final
@dataclass(frozen=True, slots=True)
class FromPool:
    """Draws the texts of one split; texts that are written rather than measured are of the test split too."""

    texts: Texts
    name: str
    split: str = "test"

    def draw(self, requests: Sequence[TextRequest]) -> list[DrawnText]:
        """Return the texts at the requests' places in each window's own order of the pool."""
        orders: dict[int, list[str]] = {}  # requests of a context share one stream
        found = []
        for request in requests:
            if id(request.rng) not in orders:
                orders[id(request.rng)] = self._shuffled(request)
            order = orders[id(request.rng)]
            if request.candidate >= len(order):
                raise UserError(
                    f"the pool {self.name} has {len(order)} {self.split} texts for the prefix {request.prefix[-40:]!r} "
                    f"and candidate {request.candidate + 1} was asked for: add texts, or lower evaluation.candidates, "
                    "negatives.per_prefix and negatives.validation_per_prefix"
                )
            found.append(DrawnText(order[request.candidate]))
        return found

    def part(self, split: str) -> "FromPool":
        """Return the pool of a split; a text that was given is measured like test text."""
        return replace(self, split=split if split in SPLITS else "test")

    def _shuffled(self, request: TextRequest) -> list[str]:
        texts = self.texts.get(request.prefix, {}).get(self.split, [])
        return [texts[i] for i in request.rng.permutation(len(texts)).tolist()]

    def save(self, path: Path) -> None:
        """Write the pool with every text's split."""
        rows = [
            {"prefix": prefix, "split": split, "texts": texts}
            for prefix, by_split in self.texts.items()
            for split, texts in by_split.items()
        ]
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_pool(path: Path) -> FromPool:
    """Read a pool, or say in one sentence which line is wrong."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: give the JSON-lines file with the texts of the pool")
    found: Texts = {}
    places: dict[str, int] = {}
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            prefix, split, texts = _row(line, f"{path}:{number}")
            for text in texts:
                place = places.get(prefix, 0)
                places[prefix] = place + (split is None)
                found.setdefault(prefix, {}).setdefault(split or _split(place), []).append(text)
    if not found:
        raise UserError(f'the pool {path} is empty: write one line such as {{"text": "…"}} per text')
    return FromPool(found, str(path))


def _split(place: int) -> str:
    train, validation = _TENTHS
    return "train" if place % 10 < train else "validation" if place % 10 < validation else "test"


def _row(line: str, where: str) -> tuple[str, str | None, list[str]]:
    """Return prefix, split and texts of a line."""
    remedy = 'write lines such as {"prefix": "…", "text": "…"}'
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}): {remedy}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}: {remedy}")
    prefix, split = row.get("prefix", ""), row.get("split")
    texts = row.get("texts", [row["text"]] if "text" in row else None)
    if not isinstance(prefix, str) or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f'{where} has no "text" or "texts" of strings: {remedy}')
    if split not in (None, *SPLITS):
        raise UserError(f"{where} is for the split {split!r}: leave it out, or choose one of {', '.join(SPLITS)}")
    return prefix, split, texts
