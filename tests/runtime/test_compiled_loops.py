"""The listener that reports the compilation of normscope's loops."""

import numba

import normscope.runtime.compiled_loops  # noqa: F401 - which listens to numba


def test_functions_without_a_module_compile():
    made = {}
    exec("def added(x): return x + 1", made)  # noqa: S102 - its __module__ is None
    assert made["added"].__module__ is None
    assert numba.njit(made["added"])(3) == 4
