"""The lm-evaluation-harness on a residual model.

Usage: ``python -m freenergy.apps.lm_eval --model freenergy --model_args run=RUN …``

    log_score(x) = log P_LM(x | c) − E(c, x) = log P(x | c) + log Z(c)

Multiple choice compares continuations of one context, so Z(c) cancels and ``log_score`` decides exactly. Where it does
not cancel (perplexity, the probability of one continuation alone) the adapter refuses. Text is written by importance
resampling: n continuations of the base, one of them taken with probability proportional to exp(−E). The harness looks
for no plugins, so ``main`` registers our model and then is ``lm_eval``.
"""

import logging
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, final

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.core.sequences import Continuations, Sequences, SequenceSpace
from freenergy.corpus.tokenize_pair import join
from freenergy.models.residual import no_energy
from freenergy.recipes import load_base
from freenergy.recipes.open_run import load_residual
from freenergy.text.model import RECORD, ResidualModel

_LOG = logging.getLogger(__name__)
_HARNESS = "the adapter needs lm-evaluation-harness: install it with pip install 'freenergy[eval]'"
_NOT_NORMALISED = (
    "the residual model's log-scores are not normalised, so the harness cannot measure perplexity with them: use "
    "`freenergy evaluate RUN`, which reports it with bounds"
)


@final
class TextModel:
    """A residual model (or its base alone) that reads and writes strings."""

    def __init__(self, model: ResidualModel, *, n: int = 64, length: int = 40, seed: int = 0) -> None:
        if n < 1 or length < 1:
            raise UserError(f"n is {n} and length {length}: set both to 1 or more")
        if model.tokenizer is None:
            raise UserError("this residual model has no tokenizer: pass one to ResidualModel")
        self.model, self.tokenizer = model, model.tokenizer
        self.n, self.length, self.rng = n, length, Rng(seed)

    @classmethod
    def open(cls, run: str, *, base: bool = False, n: int = 64, length: int = 40, seed: int = 0) -> "TextModel":
        """Return the residual model of a run (or of a saved pair); with ``base``, the run's language model alone."""
        return cls(_base_alone(run) if base else load_residual(run), n=n, length=length, seed=seed)

    def log_scores(self, context: str, continuations: Sequence[str]) -> list[float]:
        """Return log_score of each continuation of one context; they are comparable with each other only."""
        start = context.rstrip()  # a space at the boundary belongs to the continuation, as in the harness
        joined = join(self.tokenizer, start, [context[len(start) :] + x for x in continuations])
        xs = [text.tokens for text in joined.texts]
        c = self._fitting(joined.context, max(map(len, xs)))
        return [float(score) for score in self.model.log_score(Continuations.from_lists([c], [xs]))[0]]

    def write(self, context: str, until: Sequence[str], length: int | None, rng: Rng) -> str:
        """Return a continuation by importance resampling among n draws of the base, cut at the first stop string."""
        space = SequenceSpace(
            vocab_size=self.model.base.vocab_size, length=length or self.length, eos=self.tokenizer.eos
        )
        tokens = self._fitting(self.tokenizer.encode(context), space.length)
        contexts, stream = Sequences.from_lists([tokens]), rng.child("draws")
        draws = self.model.residual.propose(contexts, self.n, space, stream, batch_size=self.n, allow_inf=False)
        chosen = int(rng.child("choice").categorical(draws.log_weight).item())
        return cut(self.tokenizer.decode(draws.x.lists()[0][chosen]), until)

    def _fitting(self, context: list[int], length: int) -> list[int]:
        """Return the end of a context that leaves space for ``length`` tokens."""
        limit = self.model.base.max_length
        if limit is None or len(context) + length <= limit:
            return context
        if length >= limit:
            raise UserError(f"a continuation of {length} tokens does not fit a model of {limit}: request a shorter one")
        _LOG.warning("a context of %d tokens was cut on the left to fit a model of %d", len(context), limit)
        return context[len(context) + length - limit :]


def cut(text: str, until: Sequence[str]) -> str:
    """Return the text before the first stop string.

    >>> cut("one. two! three", ["!", "."])
    'one'
    """
    return text[: min((place for stop in until if stop and (place := text.find(stop)) >= 0), default=len(text))]


def _base_alone(run: str) -> ResidualModel:
    """Return the language model of a run or of a saved pair, with E = 0."""
    if (Path(run) / RECORD).is_file():
        pair = ResidualModel.from_pretrained(run)
        return ResidualModel(pair.base, no_energy, pair.tokenizer)
    lm, tokenizer = load_base(run)
    return ResidualModel(lm, no_energy, tokenizer)


def register() -> type:
    """Register the model "freenergy" with the harness, and return its class."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import get_model, register_model
    except ModuleNotFoundError:
        raise UserError(_HARNESS) from None
    import lm_eval.models  # noqa: F401  # lists the harness's own models, which it does only where none are listed yet

    try:
        return get_model("freenergy")  # type: ignore[no-any-return]
    except ValueError:
        pass

    @register_model("freenergy")
    class FreenergyLM(LM):  # type: ignore[misc]
        """Arguments: run=FOLDER, base=true for the base alone, n=CANDIDATES, length=TOKENS, seed=NUMBER."""

        def __init__(self, run: str = "", batch_size: Any = None, device: Any = None, **settings: Any) -> None:
            super().__init__()
            if not run:
                raise UserError("no run is named: give --model_args run=FOLDER")
            settings.pop("max_batch_size", None)
            unknown = set(settings) - {"base", "n", "length", "seed"}
            if unknown:
                raise UserError(f"unknown model_args {', '.join(sorted(unknown))}: use run, base, n, length, seed")
            _check_kinds(settings)
            self.model = TextModel.open(str(run), **settings)

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return _choices(self.model, requests)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise UserError(_NOT_NORMALISED)

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [_written(self.model, i, *request.args) for i, request in enumerate(requests)]

    return FreenergyLM


def _check_kinds(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if type(value) is not (bool if name == "base" else int):
            wanted = "true or false" if name == "base" else "a whole number"
            raise UserError(f"the model_arg {name} is {value!r}: give {wanted}")


def _choices(model: TextModel, requests: list[Any]) -> list[tuple[float, bool]]:
    """Return the scores of all choices per question; whether one is greedy is unknown for a residual model."""
    found: list[tuple[float, bool]] = []
    uneven = questions = 0
    for _, group in groupby(requests, key=lambda request: (request.task_name, request.doc_id, request.args[0])):
        choices = [request.args[1] for request in group]
        if len(choices) < 2:
            raise UserError(
                f"a task asks for the probability of one continuation alone ({choices[0][:40]!r}), which needs log Z: "
                "use tasks of output_type multiple_choice"
            )
        context = requests[len(found)].args[0]
        found += [(score, False) for score in model.log_scores(context, choices)]
        questions += 1
        uneven += len({len(model.tokenizer.encode(choice)) for choice in choices}) > 1
    if uneven:
        _LOG.warning("%d of %d questions have choices of different length, whose Z differ", uneven, questions)
    return found


def _written(model: TextModel, i: int, context: str, settings: dict[str, Any]) -> str:
    until = settings.get("until") or []
    length = settings.get("max_gen_toks")
    return model.write(context, [until] if isinstance(until, str) else until, length, model.rng.child("text", i))


def main() -> None:
    """Run ``lm_eval`` with one more model; bad input is one sentence and exit status 2."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        print(f"freenergy: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
