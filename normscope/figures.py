"""Figures of all records: S-curves (also ``normscope.plot``), depth, tails, gradients, drift, speed, comparisons."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("normscope", __file__)
