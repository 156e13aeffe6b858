"""The operators in what torch does with operators, on the GPU: opcheck, autograd, compiled and exported programs."""

from __future__ import annotations

from on_gpu import suite
from on_gpu.parts import Found, Part, Setting

OPERATORS = "tests/swaps/kernels/test_operators.py"
COMPILED = "tests/swaps/kernels/test_compiled.py"
# What runs in the interpreter says nothing of a GPU.
OF_A_GPU = "not kernels_themselves"
PARTS = {  # which tests on a GPU and in a rehearsal, and the seconds they may take
    "operators in opcheck": (OPERATORS, "opcheck", "opcheck and dtype0-isru", 360),
    "operators in eager mode": (OPERATORS, "not opcheck", "gradients or dtype", 300),
    "operators compiled": (COMPILED, f"{OF_A_GPU} and not replayed", "one_graph_serves or exported", 300),
    "operators in graphs": (COMPILED, "replayed", "one_graph_serves", 420),
}


def parts(setting: Setting) -> list[Part]:
    """Return the parts that show that torch can do with the operators what it does with its own."""
    return [Part(name, run, (name,), seconds=own[-1]) for name, own in PARTS.items()]


def run(setting: Setting, name: str) -> Found:
    file, on_gpu, rehearsed, _ = PARTS[name]
    return suite.tested(setting, [file], rehearsed if setting.rehearsal else on_gpu, name)
