"""Quality of translations against references: BLEU and chrF by sacrebleu, and ROUGE.

    BLEU = BP · exp(¼ Σ_n log p_n),   chrF = F_2 of character n-grams,   ROUGE = mean over sentences of F_1, percent

BLEU and chrF are sacrebleu's, with its signatures, intervals and paired tests; ROUGE is rouge_score's, with words of
any alphabet in place of a–z (its own tokenizer would cut an umlaut out of a word). A score is a function of sums over
sentences:

    score = f(Σ_i s_i),      difference = f(Σ_i Σ_r a_ir) − f(Σ_i Σ_r b_ir)

s_i is what sentence i adds: for BLEU its n-grams, those of them that match, and two lengths; for a mean its value and a
one. r runs over seeds: a sentence stands with its translations by all the networks of a system, so f is the score of
their outputs put together. The interval over sentences is a bootstrap of them for both systems alike (Koehn 2004);
the variation between seeds is in the experiment's own interval over seeds.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np
from jaxtyping import Float

from freenergy.core.errors import UserError
from freenergy.core.rng import Rng
from freenergy.evaluation.bootstrap import FEWEST, ends_of
from freenergy.evaluation.perplexity import Measurement

ROUGE = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
TESTS = {"bs": "bootstrap", "ar": "randomisation"}
RESAMPLES = 1000  # sacrebleu's default
_TRIALS = 2000  # of the paired tests: p-values down to 1/2001
_WORD = re.compile(r"\w+")


@final
@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """The statistics s of N sentences, and the score f of their sum."""

    values: Float[np.ndarray, "N d"]
    score: Callable[[np.ndarray], float]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def value(self) -> float:
        """The score of the corpus."""
        return self.score(self.values.sum(0))

    def only(self, rows: Sequence[int]) -> "Statistics":
        """Select some of the sentences."""
        return Statistics(self.values[list(rows)], self.score)

    @staticmethod
    def together(parts: "Sequence[Statistics]") -> "Statistics":
        """Pool several corpora of the same sentences: per sentence the sum over corpora."""
        return Statistics(np.sum([part.values for part in parts], axis=0), parts[0].score)


def ratio_of(amount: Float[np.ndarray, " N"], count: Float[np.ndarray, " N"], times: float = 1.0) -> Statistics:
    """times · Σ amount / Σ count."""
    return Statistics(np.stack([amount, count], axis=1), lambda total: float(times * total[0] / max(total[1], 1e-300)))


def difference(
    ours: Sequence[Statistics], others: Sequence[Statistics], rng: Rng, resamples: int = RESAMPLES
) -> Measurement:
    """Return ours − others over all seeds, with the 95 % interval over sentences; none if there are too few."""
    a, b = Statistics.together(ours), Statistics.together(others)
    gap, N = a.value - b.value, len(a)
    if N < FEWEST:
        return Measurement(gap, None, None)
    chosen = (rng.uniform(resamples, N).numpy() * N).astype(np.int64)
    gaps = [a.score(a.values[rows].sum(0)) - b.score(b.values[rows].sum(0)) for rows in chosen]
    low, high = np.quantile(gaps, ends_of(N)).tolist()
    return Measurement(gap, low, high)


@final
class UnicodeWords:
    """Splits into lower-case words of letters and digits in any alphabet."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        return _WORD.findall(text.lower())


def bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> Statistics:
    """Return the sufficient statistics of BLEU per sentence."""
    return _of_metric(_bleu(language), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Statistics:
    """Return the sufficient statistics of chrF per sentence."""
    return _of_metric(_metrics().CHRF(), hypotheses, references)


def rouge(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Statistics]:
    """Return ROUGE-1, -2 and -L per sentence."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise _missing("rouge-score") from None
    scorer = RougeScorer(list(ROUGE.values()), tokenizer=UnicodeWords())
    scores = [scorer.score(reference, own) for own, reference in zip(hypotheses, references, strict=True)]
    F = {name: np.array([float(score[key].fmeasure) for score in scores]) for name, key in ROUGE.items()}
    return {name: ratio_of(values, np.ones(len(values)), 100.0) for name, values in F.items()}


def by_words(references: Sequence[str], lengths: Sequence[int]) -> dict[str, list[int]]:
    """Group sentence numbers by the words of the reference, as in "[0, 12)", …, "[18, ∞)"; without empty groups."""
    words = [len(reference.split()) for reference in references]
    ends = [0, *lengths, None]
    found = {}
    for low, high in pairwise(ends):
        rows = [i for i, count in enumerate(words) if count >= (low or 0) and (high is None or count < high)]
        if rows:
            found[f"[{low}, {'∞' if high is None else high})"] = rows
    return found


def sacrebleu_scores(hypotheses: Sequence[str], references: Sequence[str], language: str) -> dict[str, dict[str, Any]]:
    """Return BLEU and chrF with sacrebleu's bootstrap interval and signature."""
    found = {}
    for name, metric in (("BLEU", _bleu(language)), ("chrF", _metrics().CHRF())):
        score = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=RESAMPLES)
        found[name] = {
            "score": score.score,
            "mean": float(score._mean),
            "reach": float(score._ci),
            "signature": metric.get_signature().format(),
            "words": str(score),
        }
    return found


def paired_tests(
    ours: Sequence[Sequence[str]], others: Sequence[Sequence[str]], references: Sequence[str], language: str
) -> dict[str, Measurement]:
    """Return sacrebleu's p-values of the difference in BLEU: paired bootstrap, approximate randomisation.

    The outputs of all seeds are tested as one corpus with the references repeated: a unit is one translation of one
    sentence by one network. That says whether these networks differ, on sentences like these; not whether others would.
    Where all outputs are equal p is 1; sacrebleu would call no difference a sure one.
    """
    _bleu(language)  # raises if a package is missing
    from sacrebleu.significance import PairedTest

    systems: list[tuple[str, Sequence[str]]] = [
        (name, [line for seed in runs for line in seed]) for name, runs in (("others", others), ("ours", ours))
    ]
    repeated = [list(references) * len(ours)]
    found = {}
    for test, name in TESTS.items():
        _, results = PairedTest(systems, {"BLEU": _bleu(language)}, repeated, test_type=test, n_samples=_TRIALS)()
        result: Any = results["BLEU"][1]
        p = 1.0 if systems[0][1] == systems[1][1] else float(result.p_value)
        found[f"p {name}"] = Measurement(p, p, p)
    return found


def _of_metric(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Statistics:
    # sacrebleu's own resampling uses these two methods
    values = metric._extract_corpus_statistics(list(hypotheses), [list(references)])
    return Statistics(
        np.array(values, dtype=np.float64), lambda total: float(metric._compute_score_from_stats(total.tolist()).score)
    )


def _bleu(language: str) -> Any:
    return _metrics().BLEU(trg_lang=language)


def _metrics() -> Any:
    try:
        from sacrebleu import metrics
    except ImportError:
        raise _missing("sacrebleu") from None
    return metrics


def _missing(package: str) -> UserError:
    return UserError(f"translations need {package}, which is not installed: pip install 'freenergy[translation]'")
