import pytest

from freenergy.structured import kernels


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Plain torch only: compiling takes seconds, and tests/runs/structured repeats the laws for the compiled sums."""
    monkeypatch.setattr(kernels, "kernels", lambda: None)
