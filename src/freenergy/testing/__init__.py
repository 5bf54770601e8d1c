"""Public checks: does my class play its role? One check per role; each raises an AssertionError.

    from freenergy.testing import check_language_model, check_sample_only
    check_language_model(my_lm, contexts=[[1, 2], [3]], length=2)

``law`` gives the exact law of a sampler by walking every random branch; ``World`` is a tabular world whose sums are all
known; ``freenergy.testing.networks`` and ``freenergy.testing.runs`` make tiny transformers and tiny runs for tests.
"""

from freenergy.testing.enumerating import EnumeratingRng as EnumeratingRng
from freenergy.testing.enumerating import World as World
from freenergy.testing.enumerating import branches as branches
from freenergy.testing.enumerating import law as law
from freenergy.testing.label_paths import collapsed as collapsed
from freenergy.testing.label_paths import enumerate_ctc as enumerate_ctc
from freenergy.testing.label_paths import enumerate_hmm as enumerate_hmm
from freenergy.testing.models import check_energy as check_energy
from freenergy.testing.models import check_language_model as check_language_model
from freenergy.testing.models import check_sample_only as check_sample_only
from freenergy.testing.structured import Enumerated as Enumerated
from freenergy.testing.structured import enumerate_chain as enumerate_chain
from freenergy.testing.structured import enumerate_higher_order as enumerate_higher_order
from freenergy.testing.structured import enumerate_segments as enumerate_segments
from freenergy.testing.targets import check_estimator as check_estimator
from freenergy.testing.targets import check_kernel as check_kernel
from freenergy.testing.targets import check_sampler as check_sampler
from freenergy.testing.training import check_noise as check_noise
from freenergy.testing.training import check_objective as check_objective
