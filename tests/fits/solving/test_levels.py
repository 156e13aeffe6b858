"""What is fitted at once; the levels themselves are held to raw pairs in tests/fits/test_fit.py."""

import pytest

from normscope.fits.solving.levels import kind_of_site


@pytest.mark.parametrize(
    ("name", "kind"),
    [("blocks.11.norm1", "blocks.*.norm1"), ("norm", "norm"), ("0", "*"), ("a1.b2.3.4", "a1.b2.*.*")],
)
def test_numbers_between_dots_make_no_kind(name, kind):
    assert kind_of_site(name) == kind
