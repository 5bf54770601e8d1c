"""Recipes of runs whose stages take seconds, as TOML."""

from pathlib import Path
from typing import Final, Literal

_CORPUS: Final = """
name = "small"
seed = 1
[corpus]
source = "{source}"
prefix = 12
continuation = 4
validation_share = 0.2
test_share = 0.2
[tokenizer]
vocab_size = 400
"""
_BASES: Final = {
    "network": """
[base]
preset = "tiny"
block = 16
dropout = 0.1
validation_tokens = 500
optimisation = { steps = 40, batch_size = 4, accumulate = 2, validate_every = 10, checkpoint_seconds = 0.0 }
""",
    "counts": """
[base]
kind = "ngram"
order = 2
""",
}
_NEGATIVES: Final = """
[negatives]
per_prefix = 4
windows = 24
validation_windows = 16
validation_per_prefix = 7
shard = 8
"""
_ENERGIES: Final = {
    "ngram": """
[energy]
kind = "ngram"
order = 2
""",
    "product": """
[energy]
kind = "product"
parts = [{ kind = "ngram", order = 3 }, { kind = "probe" }, { kind = "log-ratio" }]
[training]
negatives = 2
optimisation = { steps = 12, batch_size = 4, validate_every = 4, checkpoint_seconds = 0.0 }
""",
}
_BASELINE: Final = """
[[baselines]]
kind = "local"
name = "counts"
order = 2
windows = 10
"""
_EVALUATION: Final = """
[evaluation]
windows = 20
samples = 2
candidates = 8
certified_windows = 6
position_windows = 2
position_draws = 4
"""


def tiny_run(
    source: Path,
    *,
    base: Literal["network", "counts"] = "network",
    energy: Literal["ngram", "product"] | None = None,
    with_baseline: bool = False,
) -> str:
    """Return the recipe of a run over the text file ``source``; a base of counts takes no time.

    >>> 'kind = "probe"' in tiny_run(Path("text.jsonl"), energy="product")
    True
    """
    parts = [_CORPUS.format(source=source), _BASES[base], _EVALUATION]
    if energy is not None:
        parts += [_NEGATIVES, _ENERGIES[energy]]
    return "".join([*parts, _BASELINE] if with_baseline else parts)
