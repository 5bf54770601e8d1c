"""A lesson: a globally normalised model of spelling whose normaliser is exact, and what estimates of it are worth.

    P(word) = exp( Σ weights of its letter n-grams ) / Z,        Z = Σ over all words of 1 … m letters

    python examples/words.py [--quick] [--order 3] [--words FILE] [--seed 0] [--json] [--plot docs/figures/words.png]

Z sums over 26^20 strings; a transfer matrix over the last letters does it exactly. So the fit is the true maximum of
the likelihood, held-out words have a true probability, and draws are exact. Then log Z is estimated as if it were not
known: by importance sampling from a letter bigram model, and by annealed importance sampling from below and, started
from exact draws, from above. Words are those of Python's own documentation, or of a file with one word per line.
"""

import argparse
import json
import math
import re
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

from freenergy import Importance, NgramLM, Rng, Sequences, StoppingRule, Target
from freenergy.models.spelling import EOS, LETTERS, SpellingModel
from freenergy.partition import Annealed, Schedule
from freenergy.training.maximum_entropy import fit_by_gradient


def word_list(path: Path | None) -> tuple[list[str], list[str]]:
    """Return words to fit and every tenth to test."""
    text = path.read_text(encoding="utf-8") if path else " ".join(topics.values())
    words = sorted(set(re.findall(r"(?<![\w.])[a-z]{2,20}(?![\w.(])", text)))
    return [word for i, word in enumerate(words) if i % 10], words[::10]


def perplexity(log_prob: float, words: list[str]) -> float:
    """Per letter, the end of a word counted as one."""
    return math.exp(-log_prob / sum(len(word) + 1 for word in words))


def bigrams(words: list[str], order: int) -> NgramLM:
    """A Kneser-Ney model of letters."""
    stream = [token for word in words for token in [*(LETTERS.index(letter) + 1 for letter in word), EOS]]
    return NgramLM.fit(np.array(stream), vocab_size=len(LETTERS) + 1, eos=EOS, order=order)


def estimates(model: SpellingModel, base: NgramLM, chains: int, seed: int) -> dict[str, float]:
    """Estimate log Z as if it were not known."""
    target = Target(model, Sequences.from_lists([[]]), model.space, base)
    rule = StoppingRule(max_draws=chains, check_every=chains)
    annealed = Annealed(chains=chains, schedule=Schedule(temperatures=8))
    with torch.no_grad():
        importance = Importance(until=rule)(target, Rng(seed))
        both = annealed.bounds(target, model.sample(chains, Rng(seed).child("exact")), Rng(seed).child("annealed"))
        return {
            "exact": float(model.log_partition()),
            "importance": float(importance.lower),
            "importance_ess": float(importance.ess),
            "annealed_lower": both.lower,
            "annealed_upper": both.upper,
        }


def draw(model: SpellingModel, words: list[str], path: Path) -> None:
    """Write the law of lengths: of the words and of the model, exact."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    with torch.no_grad():
        law = model.log_prob_of_lengths().exp().numpy()
    share = np.bincount([len(word) for word in words], minlength=len(law) + 1)[1:] / len(words)
    figure, ax = plt.subplots(figsize=(6, 3.2))
    ax.bar(np.arange(1, len(law) + 1), share, color="0.8", label="words")
    ax.plot(np.arange(1, len(law) + 1), law, "o-", color="#0072B2", label="model (exact)")
    ax.set(xlabel="letters", ylabel="share")
    ax.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="letter bigrams, few steps and chains")
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--words", type=Path, help="a file with one word per line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--plot", type=Path, help="write the law of lengths here")
    arguments = parser.parse_args()
    order, steps, chains = (2, 40, 200) if arguments.quick else (arguments.order, 200, 2000)
    train, test = word_list(arguments.words)
    model = SpellingModel.of_words(train, order=order, min_count=2, max_length=20)
    fit = fit_by_gradient(model, model.encode(train), l2=1e-4, max_steps=steps)
    base, x = bigrams(train, 2), model.encode(test)
    with torch.no_grad():
        exact = perplexity(float(model.log_prob(x).sum()), test)
    smoothed = {f"KN{k}": perplexity(float(bigrams(train, k).log_prob(x).sum()), test) for k in (2, order)}
    found = {
        "words": len(train), "features": len(model.weights), "moment_gap": fit.moment_gap,
        "perplexity": exact, **smoothed, "log_partition": estimates(model, base, chains, arguments.seed),
        "draws": model.decode(model.sample(8, Rng(arguments.seed))),
    }  # fmt: skip
    if arguments.plot:
        draw(model, train, arguments.plot)
    print(json.dumps(found, indent=None if arguments.json else 2, ensure_ascii=False))


if __name__ == "__main__":
    main()
