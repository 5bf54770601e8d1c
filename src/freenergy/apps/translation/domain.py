"""Family ``translation``: an encoder–decoder learns to translate; what is measured, and how two systems compare.

    corpus (the tokenizer) → base → measurement

``measure`` leaves in its folder what ``compare`` and people read:

    greedy.txt beam.txt sampled.txt resampled-K.txt highest-K.txt    translations of the test sentences, one a line
    sources.txt references.txt                                       the test sentences and their translations
    truth.safetensors                                                log-probabilities of true words (``decoding``)
    quality.json                                                     sacrebleu's numbers with signatures and intervals
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from freenergy.apps.translation import quality
from freenergy.apps.translation.decoding import Decoding, LogProbs, likelier, load_log_probs, log_probs, save_log_probs
from freenergy.apps.translation.pairs import EncodedPairs, PairData, Splits, read_pairs, tokenizer_for
from freenergy.apps.translation.quality import Statistics, difference, ratio_of
from freenergy.apps.translation.settings import TranslationSettings
from freenergy.apps.translation.translator import Translator, build
from freenergy.core.errors import UserError
from freenergy.core.files import fingerprint, write_json, write_text
from freenergy.core.progress import Progress
from freenergy.core.rng import Rng
from freenergy.corpus import Tokenizer
from freenergy.evaluation.perplexity import Measurement, measured_rate
from freenergy.lm.networks.protocol import Network
from freenergy.recipes.families.network import Domain, NetworkRecipe, learning, measuring
from freenergy.runs.run import Plan, Run, Stage
from freenergy.training.settings import TrainedNetwork

_TRUTH, _TEST, _OWN, _TRUE = "truth.safetensors", "test", "own_prefix", "true_prefix"


def open_translation(settings: TranslationSettings, folder: Path, progress: Progress) -> "Translation":
    """Returns the domain, with its tokenizer in ``folder``."""
    splits = read_pairs(settings, progress)
    return Translation(settings, splits, tokenizer_for(splits.train, settings.vocabulary, folder))


@final
class Translation(Domain):
    """An encoder–decoder that translates sentences."""

    def __init__(self, settings: TranslationSettings, splits: Splits, tokenizer: Tokenizer) -> None:
        self.settings, self.tokenizer, self.test = settings, tokenizer, splits.test
        self.main_column = f"BLEU beam {settings.beams}"
        self._train = EncodedPairs.of(splits.train, tokenizer).fitting(settings.longest)
        self._validation, self._test = (
            EncodedPairs.of(part, tokenizer).cut(settings.longest) for part in (splits.validation, splits.test)
        )
        if not len(self._train):
            words = f"no training pair of {settings.path} has at most {settings.longest} tokens"
            raise UserError(f"{words}: set translation.longest higher")

    def network(self, rng: Rng) -> Translator:
        """Fresh weights."""
        return build(self.settings, vocab_size=self.tokenizer.vocab_size, eos=self.tokenizer.eos, rng=rng)

    def data(self, *, batch_size: int, accumulate: int, rng: Rng) -> PairData:
        """The training pairs; ``batch_size`` is the number of target tokens of a step, padding with them."""
        sizes = {"batch_size": batch_size, "accumulate": accumulate, "held_out_tokens": self.settings.batch_tokens}
        return PairData(self._train, self._validation, rng=rng, **sizes)

    def measure(self, network: Network, folder: Path, rng: Rng, progress: Progress) -> dict[str, float]:
        """BLEU, chrF, ROUGE and nats of the test pairs; true words of training pairs after the network's own."""
        if not isinstance(network, Translator):
            raise UserError(f"a {type(network).__name__} cannot translate: measure a Translator")
        decoding = Decoding(network, self.settings.longest, self.settings.batch_tokens)
        written = self._translate(decoding, rng.child("resampling"), progress)
        truth = self._truth(decoding, progress)
        for name, lines in {**written, "sources": self.test.source, "references": self.test.target}.items():
            write_text(folder / f"{name}.txt", "".join(f"{line}\n" for line in lines))
        save_log_probs(folder / _TRUTH, truth)
        kept = quality.sacrebleu_scores(written["beam"], self.test.target, self.settings.target)
        write_json(folder / "quality.json", {"beam": kept})
        return {name: one.value for name, one in self._statistics(written, truth).items()}

    def compare(self, ours: Sequence[Path], others: Sequence[Path], rng: Rng) -> dict[str, Measurement]:
        """Differences over sentences (``statistics``), p-values, true words that ours finds likelier."""
        if len(ours) != len(others) or not ours:
            raise UserError(f"{len(ours)} folders are compared with {len(others)}: give as many, one for each seed")
        a, b = ([self._read(folder) for folder in folders] for folders in (ours, others))
        stats_a, stats_b = ([self._statistics(*one) for one in side] for side in (a, b))
        found = {
            name: difference([one[name] for one in stats_a], [one[name] for one in stats_b], rng.child("sentences"))
            for name in stats_a[0]
        }
        beam_a, beam_b = ([written["beam"] for written, _ in side] for side in (a, b))
        tests = quality.paired_tests(beam_a, beam_b, self.test.target, self.settings.target)
        found |= {f"{name} {self.main_column}": p for name, p in tests.items()}
        for name, words in ((_OWN, "own"), (_TRUE, "true")):
            if name in a[0][1]:
                more, asked = likelier([truth[name] for _, truth in a], [truth[name] for _, truth in b])
                found[f"% true words likelier after {words} words"] = measured_rate(100 * more, asked)
        return found

    def _translate(self, decoding: Decoding, rng: Rng, progress: Progress) -> dict[str, list[str]]:
        """Translations of the test sentences, by the names of their files."""
        found = {
            "greedy": decoding.search(self._test.source, 1, progress),
            "beam": decoding.search(self._test.source, self.settings.beams, progress),
        }
        numbers = self.settings.resampled
        for K, one in (decoding.resample(self._test.source, numbers, rng, progress) if numbers else {}).items():
            found |= {"sampled": one.first, f"resampled-{K}": one.drawn, f"highest-{K}": one.highest}
        return {name: [self._text(ids) for ids in sentences] for name, sentences in found.items()}

    def _truth(self, decoding: Decoding, progress: Progress) -> dict[str, LogProbs]:
        """Log-probabilities of the true words of test pairs, and of some training pairs after true and own words."""
        network, tokens = decoding.network, decoding.tokens
        found = {_TEST: log_probs(network, self._test, self._test.target, tokens, progress, "test pairs")}
        if self.settings.exposure_pairs:
            # the same pairs for every network, whatever its seed
            chosen = Rng().child("exposure").permutation(len(self._train))[: self.settings.exposure_pairs]
            pairs = self._train.only(chosen.tolist())
            own = decoding.search(pairs.source, 1, progress)
            found[_OWN] = log_probs(network, pairs, own, tokens, progress, "true words after own")
            found[_TRUE] = log_probs(network, pairs, pairs.target, tokens, progress, "true words after true")
        return found

    def _statistics(self, written: dict[str, list[str]], truth: dict[str, LogProbs]) -> dict[str, Statistics]:
        """What every column of the table sums."""
        references, beams, language = self.test.target, self.settings.beams, self.settings.target
        found = {
            "BLEU greedy": quality.bleu(written["greedy"], references, language),
            self.main_column: quality.bleu(written["beam"], references, language),
            f"chrF beam {beams}": quality.chrf(written["beam"], references),
        } | quality.rouge(written["beam"], references)
        for bucket, rows in quality.by_words(references, self.settings.lengths).items():
            found[f"BLEU {bucket}"] = found[self.main_column].only(rows)
        if self.settings.resampled:
            found["BLEU sampled"] = quality.bleu(written["sampled"], references, language)
        for K in self.settings.resampled:
            found[f"BLEU resampled {K}"] = quality.bleu(written[f"resampled-{K}"], references, language)
            found[f"BLEU highest of {K}"] = quality.bleu(written[f"highest-{K}"], references, language)
        named = {_TEST: "nats/token test", _OWN: "nats/token after own words", _TRUE: "nats/token after true words"}
        for name, values in truth.items():
            nats, places = [-float(one.sum()) for one in values], [float(len(one)) for one in values]
            found[named[name]] = ratio_of(np.array(nats), np.array(places))
        return found

    def _read(self, folder: Path) -> tuple[dict[str, list[str]], dict[str, LogProbs]]:
        """What ``measure`` has written."""
        names = ["greedy", "beam", *(["sampled"] if self.settings.resampled else [])]
        names += [f"{way}-{K}" for K in self.settings.resampled for way in ("resampled", "highest")]
        written = {name: _lines(folder / f"{name}.txt") for name in [*names, "references"]}
        same = written.pop("references") == self.test.target
        if not same or any(len(lines) != len(self.test) for lines in written.values()):
            raise UserError(f"{folder} was measured on other test sentences: measure the network again")
        return written, load_log_probs(folder / _TRUTH)

    def _text(self, ids: list[int]) -> str:
        return " ".join(self.tokenizer.decode(ids).split())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        raise UserError(f"there is no {path}: measure the network again") from None


_opened: dict[tuple[TranslationSettings, str], Translation] = {}  # the last one: encoding all pairs takes its time


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationRecipe(NetworkRecipe[TrainedNetwork]):
    """An encoder–decoder on pairs of sentences."""

    family: Literal["translation"] = "translation"
    translation: TranslationSettings
    base: TrainedNetwork = field(default_factory=TrainedNetwork)

    @property
    def main_column(self) -> str:
        """The number that figures show."""
        return f"BLEU beam {self.translation.beams}"

    def data_stages(self) -> tuple[Stage[Any], ...]:
        """Returns the stage that learns the tokenizer."""
        return (Stage("corpus", _plan),)

    def domain(self, run: Run[Any], progress: Progress) -> Translation:
        """Returns the pairs with their tokenizer."""
        key = self.translation, str(run.finished("corpus")["key"])
        if key not in _opened:
            _opened.clear()
            _opened[key] = open_translation(self.translation, run.stage("corpus"), progress)
        return _opened[key]

    def learning_inputs(self, progress: Progress) -> Any:
        """Returns the sizes of the network and the choice of pairs."""
        return learning(self.translation)

    def measuring_inputs(self) -> Any:
        """Returns what is measured."""
        return measuring(self.translation)


def _plan(run: Run[TranslationRecipe], progress: Progress) -> Plan:
    settings = run.recipe.translation
    splits = read_pairs(settings, progress)
    learned = [[part.source, part.target] for part in (splits.train, splits.validation)]

    def work(folder: Path, progress: Progress) -> dict[str, Any]:
        tokenizer = tokenizer_for(splits.train, settings.vocabulary, folder)
        counts = {name: len(getattr(splits, name)) for name in ("train", "validation", "test")}
        return {"tokenizer": tokenizer.fingerprint, "pairs": counts}

    return Plan({"pairs": fingerprint(learned), "vocabulary": settings.vocabulary}, work)
