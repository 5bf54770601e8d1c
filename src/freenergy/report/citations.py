"""Citations: the papers of the methods that a run has used, as BibTeX."""

from typing import Any

from freenergy.lm.settings import NgramBase
from freenergy.noise.settings import InfilledNegatives
from freenergy.objectives import BinaryNCE, RankingNCE
from freenergy.recipes.families.random_field import RandomFieldRecipe
from freenergy.recipes.families.residual import ResidualRecipe
from freenergy.recipes.families.tagging import TaggingRecipe
from freenergy.runs.run import Recipe, Run
from freenergy.tagging.settings import NeuralTagger

_ENTRIES = {
    "deng2020residual": """@inproceedings{deng2020residual,
  title     = {Residual Energy-Based Models for Text Generation},
  author    = {Deng, Yuntian and Bakhtin, Anton and Ott, Myle and Szlam, Arthur and Ranzato, Marc'Aurelio},
  booktitle = {International Conference on Learning Representations}, year = {2020}
}""",
    "gutmann2010nce": """@inproceedings{gutmann2010nce,
  title     = {Noise-contrastive estimation: A new estimation principle for unnormalized statistical models},
  author    = {Gutmann, Michael and Hyv{\\"a}rinen, Aapo},
  booktitle = {Proceedings of the Thirteenth International Conference on Artificial Intelligence and Statistics},
  pages     = {297--304}, year = {2010}
}""",
    "ma2018nce": """@inproceedings{ma2018nce,
  title     = {Noise Contrastive Estimation and Negative Sampling for Conditional Models: Consistency and Statistical
               Efficiency},
  author    = {Ma, Zhuang and Collins, Michael},
  booktitle = {Proceedings of the 2018 Conference on Empirical Methods in Natural Language Processing},
  pages     = {3698--3707}, year = {2018}
}""",
    "nowozin2018debiasing": """@inproceedings{nowozin2018debiasing,
  title     = {Debiasing Evidence Approximations: On Importance-weighted Autoencoders and Jackknife Variational
               Inference},
  author    = {Nowozin, Sebastian},
  booktitle = {International Conference on Learning Representations}, year = {2018}
}""",
    "lawson2019energy": """@inproceedings{lawson2019energy,
  title     = {Energy-Inspired Models: Learning with Sampler-Induced Distributions},
  author    = {Lawson, Dieterich and Tucker, George and Dai, Bo and Ranganath, Rajesh},
  booktitle = {Advances in Neural Information Processing Systems}, volume = {32}, year = {2019}
}""",
    "vehtari2024pareto": """@article{vehtari2024pareto,
  title   = {Pareto Smoothed Importance Sampling},
  author  = {Vehtari, Aki and Simpson, Daniel and Gelman, Andrew and Yao, Yuling and Gabry, Jonah},
  journal = {Journal of Machine Learning Research}, volume = {25}, number = {72}, pages = {1--58}, year = {2024}
}""",
    "chen1998smoothing": """@techreport{chen1998smoothing,
  title       = {An Empirical Study of Smoothing Techniques for Language Modeling},
  author      = {Chen, Stanley F. and Goodman, Joshua},
  institution = {Harvard University}, number = {TR-10-98}, year = {1998}
}""",
    "devlin2019bert": """@inproceedings{devlin2019bert,
  title     = {{BERT}: Pre-training of Deep Bidirectional Transformers for Language Understanding},
  author    = {Devlin, Jacob and Chang, Ming-Wei and Lee, Kenton and Toutanova, Kristina},
  booktitle = {Proceedings of the 2019 Conference of the North American Chapter of the Association for Computational
               Linguistics: Human Language Technologies},
  pages     = {4171--4186}, year = {2019}
}""",
    "lafferty2001crf": """@inproceedings{lafferty2001crf,
  title     = {Conditional Random Fields: Probabilistic Models for Segmenting and Labeling Sequence Data},
  author    = {Lafferty, John and McCallum, Andrew and Pereira, Fernando},
  booktitle = {Proceedings of the Eighteenth International Conference on Machine Learning},
  pages     = {282--289}, year = {2001}
}""",
    "hu2019transducer": """@inproceedings{hu2019transducer,
  title     = {Neural {CRF} Transducers for Sequence Labeling},
  author    = {Hu, Kai and Ou, Zhijian and Hu, Min and Feng, Junlan},
  booktitle = {{IEEE} International Conference on Acoustics, Speech and Signal Processing}, year = {2019}
}""",
    "wang2018trf": """@article{wang2018trf,
  title   = {Learning Trans-Dimensional Random Fields with Applications to Language Modeling},
  author  = {Wang, Bin and Ou, Zhijian and Tan, Zhiqiang},
  journal = {IEEE Transactions on Pattern Analysis and Machine Intelligence}, volume = {40}, number = {4},
  pages   = {876--890}, year = {2018}
}""",
    "martin1998exchange": """@article{martin1998exchange,
  title   = {Algorithms for Bigram and Trigram Word Clustering},
  author  = {Martin, Sven and Liermann, J{\\"o}rg and Ney, Hermann},
  journal = {Speech Communication}, volume = {24}, number = {1}, pages = {19--37}, year = {1998}
}""",
    "ou2024energy": """@article{ou2024energy,
  title   = {Energy-Based Models with Applications to Speech and Language Processing},
  author  = {Ou, Zhijian},
  journal = {Foundations and Trends in Signal Processing}, volume = {18}, number = {1--2}, pages = {1--199},
  year    = {2024}
}""",
}

_OF_FIELDS = {
    "ou2024energy": "random-field language models, the features of Table 3.2",
    "wang2018trf": "trans-dimensional random fields",
    "martin1998exchange": "word classes by exchange",
    "gutmann2010nce": "the objective: binary noise-contrastive estimation",
    "lawson2019energy": "the certificate: the law that resampling induces",
    "nowozin2018debiasing": "log Z from above, and the jackknife",
    "vehtari2024pareto": "k̂, the diagnostic of the weights' tail",
}


def cite(run: Run[Any]) -> str:
    """Return the BibTeX of the methods that the run has used."""
    return "\n\n".join(_ENTRIES[key] for key in methods(run.recipe)) + "\n"


def _of_tagger(recipe: TaggingRecipe) -> dict[str, str]:
    law = recipe.tagger.law if isinstance(recipe.tagger, NeuralTagger) else recipe.tagger.kind
    if law in ("crf", "features"):
        return {"lafferty2001crf": "the law of tags: a linear-chain conditional random field"}
    if law in ("rnnt", "transducer"):
        return {
            "hu2019transducer": "the law of tags: a prediction network over all tags before",
            "ou2024energy": "its training",
        }
    return {"ou2024energy": "the law of tags, among its relatives"}


def methods(recipe: Recipe) -> dict[str, str]:
    """Return the key of each paper to cite, and what of it is used."""
    used: dict[str, str] = {}
    if isinstance(recipe, TaggingRecipe):
        return _of_tagger(recipe)
    if isinstance(getattr(recipe, "base", None), NgramBase):
        used["chen1998smoothing"] = "the base: interpolated modified Kneser-Ney smoothing"
    if not isinstance(recipe, ResidualRecipe) or recipe.energy is None:
        return used | (_OF_FIELDS if isinstance(recipe, RandomFieldRecipe) else {})
    used["deng2020residual"] = "the residual energy, and the upper and lower estimates of perplexity"
    match recipe.training.objective:
        case BinaryNCE(kind="conditional"):
            used["ma2018nce"] = "the objective: noise-contrastive estimation of conditional models"
        case BinaryNCE():
            used["gutmann2010nce"] = "the objective: binary noise-contrastive estimation"
        case RankingNCE():
            used["gutmann2010nce"] = "noise-contrastive estimation"
            used["ma2018nce"] = "the objective: its ranking form, for conditional models"
    parts = recipe.energy.split()
    infilled = any(isinstance(source, InfilledNegatives) for source in recipe.negatives.sources)
    if infilled:
        used["devlin2019bert"] = "masked language models"
    for part in parts:
        used |= part.citations()
    if infilled or recipe.training.objective.kind == "conditional" or len(parts) > 1:
        used["ou2024energy"] = "products of energies, conditional and infilled noise"
    used["nowozin2018debiasing"] = "Eq. 4 and the jackknife estimate of log Z"
    used["lawson2019energy"] = "the certificate: the law that resampling induces"
    used["vehtari2024pareto"] = "k̂, the diagnostic of the weights' tail"
    return used
