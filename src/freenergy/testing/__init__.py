"""Public checks: does my class play its role? And an Rng that walks every branch."""

from freenergy.testing.enumerating import EnumeratingRng as EnumeratingRng
from freenergy.testing.enumerating import branches as branches
from freenergy.testing.enumerating import law as law
