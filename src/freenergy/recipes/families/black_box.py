"""What a recipe with a base that only samples can and cannot ask for; refused before anything is done."""

from freenergy.core.errors import UserError
from freenergy.corpus.settings import CorpusSettings
from freenergy.energies.settings import EnergySettings
from freenergy.noise.settings import NegativeSettings


def check_black_box(
    corpus: CorpusSettings,
    negatives: NegativeSettings,
    energy: EnergySettings | None,
    num_baselines: int,
    position_windows: int,
) -> None:
    """Refuse what needs the probabilities of the base, or another form of text than whole texts."""
    if energy is None:
        raise UserError(
            "a base that only samples has no perplexity, so there is nothing to measure without an energy: add an "
            "[energy] section"
        )
    for part in energy.split():
        if part.reads_base:
            raise UserError(
                f"an energy of kind {part.kind!r} reads the base's network or predictions, and a base that only "
                'samples has none: take energy.kind = "ngram", or a bit with start = "encoder" or "scratch"'
            )
    if not negatives.is_base:
        raise UserError(
            "other negatives than plain draws of the base are corrected for by its probabilities, which a base that "
            "only samples does not give: leave negatives.sources out"
        )
    if num_baselines:
        raise UserError(
            "baselines are compared by perplexity, which a base that only samples does not have: leave [[baselines]] "
            "out"
        )
    if position_windows:
        raise UserError(
            "gains by position need the base's probabilities of tokens, which a base that only samples does not give: "
            "set evaluation.position_windows = 0"
        )
    _check_windows(corpus)


def _check_windows(corpus: CorpusSettings) -> None:
    if corpus.ending != "eos":
        raise UserError(
            'a base that only samples writes texts that end by themselves: set corpus.ending = "eos" (longer texts are '
            "cut after corpus.continuation tokens)"
        )
    if corpus.prefix == 0 and corpus.stride is None:
        raise UserError(
            "with corpus.prefix = 0 a base that only samples writes whole texts, and windows from the middle of longer "
            "documents would be compared with them: set corpus.stride = 1000000, which takes each document once"
        )
