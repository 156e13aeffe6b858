"""The kernels' functions, run in Triton's interpreter over the whole range of their dtypes, against float64.

Run as a script, in the interpreter, this file fills what the tests compare.
"""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special

triton = pytest.importorskip("triton", reason="Triton is made for Linux alone")

import triton.language as tl  # noqa: E402

from normscope.swaps.kernels import cpu  # noqa: E402
from normscope.swaps.kernels.loops import derivative, function  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
FUNCTIONS = [("f", curve, precise) for curve in ("tanh", "isru", "erf") for precise in (True, False)]
DERIVATIVES = [("f′", curve, True) for curve in ("tanh", "isru", "erf")]
ULP = 2.0**-23  # of float32, relative, at most

# How far off the functions may be, relative: roundings counted, of 2⁻²⁴ each.
PRECISE = {
    "tanh": 2 * ULP,  # what loops._tanh promises
    "isru": 2 * ULP,  # half of those of u² and of 1 + u², that of 1/√, that of the product
    "erf": ULP,
}
# u²/3 up to |u| = 2⁻⁷, and 2⁻²³ over |u| beyond: less than half a unit of half precision.
CHEAP = PRECISE | {"tanh": 2.1e-5}
# Of an exponential that underflows at 88: its argument is rounded twice, its error 88 times as large, or 2 · 88 · 2⁻²⁴.
DERIVATIVE = {"tanh": 1.1e-5, "isru": 4 * ULP, "erf": 1.1e-5}
UNDERFLOWS = 2.0**-120  # what is below may have become zero


def half(kind):
    patterns = np.arange(2**16, dtype=np.uint16)
    return (patterns.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat16" else patterns.view(np.float16)


def spread():
    """Every exponent of float32, and 2,048 mantissas of each; more where the curves bend."""
    draw = np.random.default_rng(5)
    exponents = np.concatenate([np.repeat(np.arange(255), 2048), np.repeat(np.arange(120, 132), 20_000)])
    patterns = exponents.astype(np.uint32) << 23 | draw.integers(2**23, size=len(exponents), dtype=np.uint32)
    return np.sort(patterns.view(np.float32))


def points():
    with np.errstate(invalid="ignore"):
        return {kind: half(kind).astype(np.float32) for kind in ("bfloat16", "float16")} | {"float32": spread()}


def exact(u, of, curve):
    v = u.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if of != "f′":
            isru = np.where(np.isinf(v), np.sign(v), v / np.hypot(v, 1))
            return {"tanh": np.tanh(v), "isru": isru, "erf": special.erf(v)}[curve]
        logistic = special.expit(-2 * np.abs(v))
        return {
            "tanh": 4 * logistic * special.expit(2 * np.abs(v)),
            "isru": np.hypot(v, 1) ** -3.0,
            "erf": 2 / np.sqrt(np.pi) * np.exp(-v * v),
        }[curve]


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    path = tmp_path_factory.mktemp("interpreted") / "values"
    subprocess.run([sys.executable, __file__, path], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    return pickle.loads(path.read_bytes())  # noqa: S301 - our own


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("of", "curve", "precise"), FUNCTIONS + DERIVATIVES)
def test_the_error_is_bounded_over_the_whole_range(computed, of, curve, precise, kind):
    """Relative where the truth is not about to underflow; below, the result is as small."""
    u, y = points()[kind], computed[of, curve, precise, kind].astype(np.float64)
    u, y = u[np.isfinite(u)], y[np.isfinite(u)]
    expected = exact(u, of, curve)
    small = np.abs(expected) < UNDERFLOWS
    assert (np.abs(y[small]) <= 2 * UNDERFLOWS).all()
    bound = (DERIVATIVE if of == "f′" else PRECISE if precise else CHEAP)[curve]
    assert (np.abs(y - expected)[~small] <= bound * np.abs(expected[~small])).all()


def test_tanh_in_float32_is_right_to_two_units_in_the_last_place(computed):
    u = points()["float32"]
    true = np.tanh(u.astype(np.float64))
    unit = np.spacing(np.nextafter(np.abs(true).astype(np.float32), np.float32(0)))  # below 1, not above
    assert (np.abs(computed["f", "tanh", True, "float32"] - true) <= 2 * unit).all()


@pytest.mark.parametrize(("of", "curve", "precise"), FUNCTIONS + DERIVATIVES)
def test_functions_are_odd_bounded_and_monotonic_up_to_infinity(computed, of, curve, precise):
    u, y = points()["bfloat16"], computed[of, curve, precise, "bfloat16"]
    assert np.isnan(y[np.isnan(u)]).all() and np.isfinite(y[~np.isnan(u)]).all()
    positive, negative = (half[np.isfinite(np.split(u, 2)[0])] for half in np.split(y, 2))  # bits of one sign each
    assert np.array_equal(negative, positive if of == "f′" else -positive)
    far, zero = np.abs(u) >= 1e20, u == 0
    limits = np.sign(u[far]) if of == "f" else 0
    assert far.sum() > 10_000 and zero.sum() == np.isinf(u).sum() == 2 and (y[far] == limits).all()
    assert (np.abs(y[zero] - exact(u[zero], of, curve)) <= (ULP if of == "f′" else 0)).all()  # 2/√π is no float32
    one = 1 + (ULP if curve == "isru" else 0)  # u times a root that was rounded upwards
    assert (positive >= 0).all() and (positive <= (one if of == "f" else 2 / np.sqrt(np.pi) + ULP)).all()
    steps = np.diff(positive.astype(np.float64)) * (1 if of == "f" else -1)
    assert (steps >= -4 * ULP * positive[1:]).all()  # neighbours may be closer than the error, twice 2 ulp


def constants():
    """Tuples of numbers in loops.py, as they are written there."""
    text = (ROOT / "normscope/swaps/kernels/loops.py").read_text(encoding="utf-8")
    found = re.findall(r"^(\w+) = tl.constexpr\(\s*\(([^()]*)\)", text, re.MULTILINE)
    return {name: [float(number) for number in numbers.split(",") if number.strip()] for name, numbers in found}


def test_the_coefficients_are_those_that_their_script_makes():
    script = ROOT / "scripts/kernel_coefficients.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    expected = dict(line.split(" ", 1) for line in printed.splitlines())
    ours = constants() | {name: getattr(cpu, name) for name in ("EXPM1", "ERF_OVER", "ERF_UNDER")}
    for name, constant in ours.items():
        # To 1e-4: the last coefficient is what rounding in the search moves most, and still matters least.
        assert constant == pytest.approx([float(number) for number in expected[name].split(",")], rel=1e-4)
    assert len(ours) == 4


BLOCK = 65_536


@triton.jit
def apply(u, y, n, slope: tl.constexpr, curve: tl.constexpr, precise: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    own = tl.load(u + at, mask=at < n, other=0)
    tl.store(y + at, derivative(own, curve) if slope else function(own, curve, precise), mask=at < n)


def run(u, of, curve, precise):
    x = torch.from_numpy(np.ascontiguousarray(u))
    y = torch.full_like(x, torch.nan)
    with np.errstate(over="ignore"):  # u² is infinite where erf is ±1
        apply[(triton.cdiv(len(u), BLOCK),)](x, y, len(u), of == "f′", curve, precise, BLOCK)
    return y.numpy()


if __name__ == "__main__":
    values = {
        (of, curve, precise, kind): run(u, of, curve, precise)
        for of, curve, precise in FUNCTIONS + DERIVATIVES
        for kind, u in points().items()
    }
    Path(sys.argv[1]).write_bytes(pickle.dumps(values))
