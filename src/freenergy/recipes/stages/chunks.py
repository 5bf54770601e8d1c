"""The corpus of a run, as its stages read it: in whole windows, or chunk by chunk.

    chunk = 5          every window is 5 tokens after 5 tokens, each given the true past
    chunk = [5, 10]    the same, and the energy is trained on chunks of 10 tokens too

The first length is the one that is validated, certified and written.
"""

from freenergy.corpus import Corpus
from freenergy.recipes.families.residual import ResidualRun


def open_corpus(run: ResidualRun) -> Corpus:
    """Load the corpus of a run; its windows are chunk windows where the recipe says so."""
    return Corpus.open(run.stage("corpus")).in_chunks(run.recipe.chunks[:1])


def corpus_of_split(run: ResidualRun, corpus: Corpus, split: str) -> Corpus:
    """Return the corpus whose windows negatives of a split are drawn for: training text has chunks of all lengths."""
    return corpus.in_chunks(run.recipe.chunks) if split == "train" else corpus
