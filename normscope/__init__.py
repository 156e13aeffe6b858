"""See what the normalization layers of a pretrained network really do, and what happens when they are replaced.

>>> import normscope
>>> network = normscope.load("demo_vit")
>>> seen = normscope.capture(network, layers=4)
>>> fits = normscope.fit(seen, "tanh,isru")
>>> len(fits)
8
"""

from typing import Any

import lazy_loader

from normscope.runtime.records import Tabled

__version__ = "0.1.0"

# __init__.pyi is the only list of public names: for type checkers, for `normscope.<TAB>`, and for imports on first use.
# `normscope --help` must not wait for torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _table(records: Any) -> Any:
    """Return the tables that the command line prints, as :func:`normscope.table` does."""
    return __getattr__("table")(records)


Tabled.table = _table
