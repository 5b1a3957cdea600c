"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

# A deadline measures the machine: first calls import, and two tests run at a time.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes with one thread, as in the engine's process: their number moves the last bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
