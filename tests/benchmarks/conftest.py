"""Benchmarks run without coverage: other tests cover what they call."""

import pytest


@pytest.fixture(autouse=True)
def without_coverage(uncovered):
    pass
