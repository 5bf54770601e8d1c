"""Scores as functions of sums over sentences: sacrebleu's own values, intervals over sentences."""

import numpy as np
import pytest
import sacrebleu
from scipy.stats import t as student

from freenergy.apps.translation.quality import (
    Statistics,
    bleu,
    by_words,
    chrf,
    difference,
    paired_tests,
    ratio_of,
    rouge,
    sacrebleu_scores,
)
from freenergy.core.rng import Rng

SENTENCE = "ein Mann mit Hut steht auf der Straße und sieht einen grünen Bären neben dem Haus"
WORDS = SENTENCE.split()


def corpus(count, seed, wrong):
    """References, and translations in which a share of the words is another."""
    rng, references, hypotheses = Rng(seed), [], []
    for n in range(count):
        length = 5 + int(Rng(0).child(n).uniform(1).item() * 9)
        words = [WORDS[int(i)] for i in Rng(1).child(n).permutation(len(WORDS))[:length]]
        is_wrong = rng.child(n).uniform(length) < wrong
        references.append(" ".join(words) + ".")
        hypotheses.append(" ".join("Hund" if bad else word for word, bad in zip(words, is_wrong, strict=True)) + ".")
    return hypotheses, references


def test_the_values_are_those_of_sacrebleu():
    hypotheses, references = corpus(60, 2, 0.3)
    assert bleu(hypotheses, references, "de").value == pytest.approx(
        sacrebleu.corpus_bleu(hypotheses, [references]).score
    )
    assert chrf(hypotheses, references).value == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score)
    kept = sacrebleu_scores(hypotheses, references, "de")
    assert kept["BLEU"]["score"] == pytest.approx(bleu(hypotheses, references, "de").value)
    assert 0 < kept["BLEU"]["reach"] < 10
    assert "tok:13a" in kept["BLEU"]["signature"]
    assert f"version:{sacrebleu.__version__}" in kept["chrF"]["signature"]


def test_some_sentences_and_several_seeds_are_corpora_of_their_own():
    (one, references), (two, _) = corpus(40, 2, 0.3), corpus(40, 3, 0.5)
    rows = [3, 17, 21, 38]
    some = bleu(one, references, "de").only(rows)
    wanted = sacrebleu.corpus_bleu([one[i] for i in rows], [[references[i] for i in rows]]).score
    assert some.value == pytest.approx(wanted)
    both = Statistics.together([bleu(one, references, "de"), bleu(two, references, "de")])
    assert both.value == pytest.approx(sacrebleu.corpus_bleu(one + two, [references * 2]).score)


def test_rouge_keeps_umlauts():
    exact = rouge(["grüne Bären"], ["Grüne Bären."])
    assert {name: one.value for name, one in exact.items()} == {"ROUGE-1": 100.0, "ROUGE-2": 100.0, "ROUGE-L": 100.0}
    # of rouge_score's own words, "Bären" and "Büren" share the r-e-n that an umlaut leaves
    assert rouge(["Bären"], ["Büren"])["ROUGE-1"].value == 0.0
    half = rouge(["a b c d"], ["a x c y"])
    assert half["ROUGE-1"].value == pytest.approx(50.0)
    assert half["ROUGE-2"].value == 0.0
    assert half["ROUGE-L"].value == pytest.approx(50.0)


def test_buckets_hold_every_sentence_once():
    references = ["w " * n for n in (1, 11, 12, 17, 18, 40)]
    assert by_words(references, [12, 18]) == {"[0, 12)": [0, 1], "[12, 18)": [2, 3], "[18, ∞)": [4, 5]}
    assert by_words(references, [50]) == {"[0, 50)": [0, 1, 2, 3, 4, 5]}
    assert by_words(references, []) == {"[0, ∞)": [0, 1, 2, 3, 4, 5]}


def test_the_interval_of_a_mean_is_the_usual_one():
    """A resampled mean has standard error sd/√N; the wider quantiles of few sentences make it Student's."""
    N = 80
    a, b = Rng(5).normal(N).numpy(), 0.5 * Rng(6).normal(N).numpy() + 1
    one = np.ones(N)
    found = difference([ratio_of(a, one)], [ratio_of(b, one)], Rng(7), resamples=4000)
    gap = a - b
    reach = student.ppf(0.975, N - 1) * gap.std(ddof=1) / np.sqrt(N)
    assert found.value == pytest.approx(gap.mean())
    # 4,000 resamples tell a quantile to about 3 % of the reach; four of these
    assert found.low == pytest.approx(gap.mean() - reach, abs=0.12 * reach)
    assert found.high == pytest.approx(gap.mean() + reach, abs=0.12 * reach)
    # the mutant that resamples both sides apart has another reach
    apart = student.ppf(0.975, N - 1) * np.sqrt((a.var(ddof=1) + (a - gap * 2).var(ddof=1)) / N)
    assert abs(apart / reach - 1) > 0.12


def test_seeds_of_a_sentence_stay_together():
    """Two seeds of the same outputs tell no more about sentences than one."""
    (a, references), (b, _) = corpus(50, 2, 0.3), corpus(50, 3, 0.5)
    ours, others = bleu(a, references, "de"), bleu(b, references, "de")
    once, twice = (difference([ours] * n, [others] * n, Rng(1), resamples=300) for n in (1, 2))
    assert twice.to_json() == pytest.approx(once.to_json())
    assert once.low > 0


def test_p_values_tell_systems_apart():
    (a, references), (b, _), (c, _) = corpus(60, 2, 0.2), corpus(60, 3, 0.5), corpus(60, 4, 0.2)
    clear = paired_tests([a, c], [b, b], references, "de")
    assert set(clear) == {"p bootstrap", "p randomisation"}
    assert all(one.value < 0.01 for one in clear.values())
    assert all(one.value > 0.05 for one in paired_tests([a], [c], references, "de").values())
    assert all(one.value == 1.0 for one in paired_tests([a], [a], references, "de").values())
