"""Exact distributions over label sequences: every sum is computed, none is estimated.

    p(y) = exp(score(y)) / Z,        score(y) = Σ_t φ_t(y_t) + Σ_t ψ_t(y_{t−1}, y_t),        Z = Σ_y exp(score(y))

``LinearChain`` is the conditional random field of taggers; ``HigherOrderChain`` looks further back and ``SegmentChain``
labels segments. All play the role of ``StructuredDistribution``. ``LabelPaths`` sums over the paths that spell a label
sequence on frames: CTC, CTC-CRF, LF-MMI; ``rnnt_log_prob`` is the transducer's sum.
"""

from freenergy.structured.allowed import Allowed as Allowed
from freenergy.structured.allowed import bio as bio
from freenergy.structured.allowed import bioes as bioes
from freenergy.structured.chain import LinearChain as LinearChain
from freenergy.structured.ctc import LabelPaths as LabelPaths
from freenergy.structured.ctc import ctc_log_score as ctc_log_score
from freenergy.structured.ctc import padded_labels as padded_labels
from freenergy.structured.distribution import NO_LABEL as NO_LABEL
from freenergy.structured.distribution import StructuredDistribution as StructuredDistribution
from freenergy.structured.distribution import Taggings as Taggings
from freenergy.structured.higher_order import HigherOrderChain as HigherOrderChain
from freenergy.structured.label_automaton import LabelAutomaton as LabelAutomaton
from freenergy.structured.label_graph import LabelGraph as LabelGraph
from freenergy.structured.label_paths import FramePaths as FramePaths
from freenergy.structured.label_search import AutomatonScorer as AutomatonScorer
from freenergy.structured.label_search import LanguageModelScorer as LanguageModelScorer
from freenergy.structured.label_search import PrefixBeam as PrefixBeam
from freenergy.structured.label_search import greedy as greedy
from freenergy.structured.rnnt import rnnt_log_prob as rnnt_log_prob
from freenergy.structured.segment_sums import INSIDE as INSIDE
from freenergy.structured.segments import SegmentChain as SegmentChain
from freenergy.structured.segments import spans as spans
