"""Doctests are looked for in every module; those that import Triton can only be where it is."""

import os
from importlib.util import find_spec

# As the command line does before torch is imported: threads that spin while they wait take the suite minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores leave one thread for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

WITH_TRITON = ["pairs/binning/cuda*", "swaps/kernels/f*", "swaps/kernels/l*"]
collect_ignore_glob = [] if find_spec("triton") else [f"normscope/{path}.py" for path in WITH_TRITON]
