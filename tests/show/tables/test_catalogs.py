"""Tables of curves and models."""

from normscope.curves.known import BUILT_IN, BY_NAME
from normscope.show.tables.catalogs import curves_table


def test_every_name_of_a_curve_is_listed():
    listed = ", ".join(row[0] for row in curves_table(BUILT_IN).rows).replace(" (with s)", "").split(", ")
    assert sorted(listed) == sorted(BY_NAME)
