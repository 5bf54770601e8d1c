"""Best of n: the candidate with the highest score is kept, instead of a fair draw.

    x_1 … x_n ~ q(· | c),      emit x_i with the highest s(x_i);      several results are the highest several

    s = −E            by = "energy"
    s = log P_LM      by = "likelihood"
    s = log P_LM − E  by = "model"

Cheap, common, and not the model: as n grows, the law of a result approaches the mode of s, not P. By likelihood it
repeats itself, by energy it finds what fools the energy. It draws the same candidates as resampling does with the same
seed, so the two can be compared at equal cost. How far it is from P is not known, so ``distance`` is None.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, final

from freenergy.core.checks import check_range
from freenergy.core.errors import UserError
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.core.roles import Model, Target
from freenergy.core.scored import Scored
from freenergy.core.truncation import ANCESTRAL, Truncation
from freenergy.samplers.resampling import Resampling
from freenergy.samplers.sampled import SILENT, DrawRequest, Sampled, check_call, drive, picked


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BestOf:
    """n candidates, of which the best are kept."""

    candidates: int = 256
    by: Literal["energy", "likelihood", "model"] = "energy"
    truncation: Truncation = ANCESTRAL
    batch_size: int = 256

    def __post_init__(self) -> None:
        check_range(self, "candidates", "batch_size", at_least=1)
        if self.by not in ("energy", "likelihood", "model"):
            raise UserError(f"by is {self.by!r}: choose energy, likelihood or model")

    def __call__(self, target: Target[Model], num: int, rng: Rng, progress: Progress = SILENT) -> Sampled:
        """Draw, score, keep the best."""
        return drive(self.requests(target, num, rng), progress)

    def requests(self, target: Target[Model], num: int, rng: Rng) -> Generator[DrawRequest, Scored, Sampled]:
        """Do the same in steps, so that many share the calls of the models."""
        check_call(target, num)
        if num > self.candidates:
            raise UserError(f"the best {num} of {self.candidates} candidates were asked for: draw more candidates")
        drawing = Resampling(candidates=self.candidates, truncation=self.truncation, batch_size=self.batch_size)
        found = yield from drawing.draws(target, rng.child("draw"))
        found.check_any_acceptable()
        score = {"energy": -found.energy, "likelihood": found.log_base, "model": found.log_score}[self.by]
        order = score.masked_fill(found.log_weight.isneginf(), -float("inf"))[0].argsort(descending=True, stable=True)
        chosen = order[:num]
        return Sampled(
            x=picked(found, chosen),
            log_base=found.log_base[:, chosen],
            energy=found.energy[:, chosen],
            method=f"best-of-n by {self.by}",
            law="restricted",
            distance=None,
            is_estimated=False,
            base_tokens=found.tokens_drawn,
            candidates=found,
            chosen=chosen,
            notes=("the best of n is not a draw of the model: as n grows it approaches the highest score",),
        )
