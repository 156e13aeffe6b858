"""Doctests are looked for in every module; those that import Triton can only be where it is."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["normscope/pairs/binning/cuda*.py"]
