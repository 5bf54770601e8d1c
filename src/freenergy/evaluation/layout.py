"""Where an evaluation keeps what is slow to make: shards that appear whole, below its folder.

    windows/<who>/      log P of windows' own texts, by the base and each baseline, some windows per shard
    certified/<who>/    the same of each baseline on the windows of the residual model
    scores/             log P_LM and E of candidates, some windows per shard
    positions/          log P of each token, one window per shard

Legend: <who> is ``base``, or the fingerprint of a baseline's name, since a baseline may be called base.
"""

from pathlib import Path

from freenergy.core.files import fingerprint

WINDOWS = 4  # whose candidates are scored at once


def log_probs_folder(folder: Path, baseline: str | None, *, is_certified: bool = False) -> Path:
    """Of the base (None) or of a baseline; on the residual model's windows if ``is_certified``."""
    who = "base" if baseline is None else fingerprint(baseline)
    return folder / ("certified" if is_certified else "windows") / who


def scores_folder(folder: Path) -> Path:
    """Of candidates."""
    return folder / "scores"


def positions_folder(folder: Path) -> Path:
    """Of single tokens."""
    return folder / "positions"
