"""Quality of translations against references: BLEU and chrF by sacrebleu, and ROUGE.

    BLEU = BP · exp(¼ Σ_n log p_n),   chrF = F_2 of character n-grams,   ROUGE = mean over sentences of F_1, percent

BLEU and chrF are sacrebleu's, with its signatures, intervals and paired tests; ROUGE is rouge_score's, with words of
any alphabet in place of a–z (its own tokenizer would cut an umlaut out of a word).
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np

from freenergy.apps.translation.statistics import RESAMPLES, Statistics, ratio_of
from freenergy.core.errors import UserError
from freenergy.evaluation.perplexity import Measurement

ROUGE = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}
TESTS = {"bs": "bootstrap", "ar": "randomisation"}
_TRIALS = 2000  # of the paired tests: p-values down to 1/2001
_WORD = re.compile(r"\w+")


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
    return _of_metric(_chrf(), hypotheses, references)


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
    for name, metric in (("BLEU", _bleu(language)), ("chrF", _chrf())):
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
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise _missing("sacrebleu") from None
    return BLEU(trg_lang=language)


def _chrf() -> Any:
    try:
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise _missing("sacrebleu") from None
    return CHRF()


def _missing(package: str) -> UserError:
    return UserError(f"translations need {package}, which is not installed: pip install 'freenergy[translation]'")
