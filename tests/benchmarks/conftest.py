"""What benchmarks run of normscope, other tests cover."""

import pytest


@pytest.fixture(autouse=True)
def without_coverage(uncovered):
    pass
