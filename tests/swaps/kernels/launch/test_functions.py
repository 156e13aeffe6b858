"""The kernels' functions in Triton's interpreter, over the whole range of their dtypes, against float64."""

import functools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from truth import BY_NUMPY, GPU, SLOPES

from normscope.swaps.kernels.loops import derivative, function

pytestmark = [
    pytest.mark.skipif(GPU, reason="the bounds are those of the interpreter's arithmetic"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
BLOCK = 65_536
ULP = 2.0**-23  # of float32, relative, at most
PRECISE = {"tanh": 2 * ULP, "isru": 2 * ULP, "erf": ULP}  # relative: roundings counted, of 2⁻²⁴ each
# tanh: u²/3 up to |u| = 2⁻⁷, and 2⁻²³ over |u| beyond: less than half a unit of half precision.
CHEAP = PRECISE | {"tanh": 2.1e-5}
# Of an exponential that underflows at 88: its argument is rounded twice, its error 88 times as large, or 2 · 88 · 2⁻²⁴.
DERIVATIVE = {"tanh": 1.1e-5, "isru": 4 * ULP, "erf": 1.1e-5}
UNDERFLOWS = 2.0**-120  # results below may have become zero
KINDS = ["f precise", "f cheap", "slope"]


@functools.cache
def points(kind):
    """Every number of half precision; of float32, every exponent with 512 mantissas, and more where curves bend."""
    patterns = np.arange(2**16, dtype=np.uint16)
    if kind != "float32":
        half = (patterns.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat16" else patterns.view(np.float16)
        return half.astype(np.float32)
    draw = np.random.default_rng(5)
    exponents = np.concatenate([np.repeat(np.arange(255), 512), np.repeat(np.arange(120, 132), 20_000)])
    patterns = exponents.astype(np.uint32) << 23 | draw.integers(2**23, size=len(exponents), dtype=np.uint32)
    return np.sort(patterns.view(np.float32))


@triton.jit
def apply(u, y, n, slope: tl.constexpr, curve: tl.constexpr, precise: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    own = tl.load(u + at, mask=at < n, other=0)
    tl.store(y + at, derivative(own, curve) if slope else function(own, curve, precise), mask=at < n)


def computed(points, of, curve):
    x = torch.from_numpy(points)
    y = torch.full_like(x, torch.nan)
    apply[(triton.cdiv(len(x), BLOCK),)](x, y, len(x), of == "slope", curve, of == "f precise", BLOCK)
    return y.numpy()


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("curve", BY_NUMPY)
def test_the_error_is_bounded_over_the_whole_range(curve, of, kind):
    """Relative where the truth is not about to underflow; below, the result is as small."""
    u = points(kind)[np.isfinite(points(kind))]
    y, expected = computed(u, of, curve).astype(float), (SLOPES if of == "slope" else BY_NUMPY)[curve](u.astype(float))
    small = np.abs(expected) < UNDERFLOWS
    assert (np.abs(y[small]) <= 2 * UNDERFLOWS).all()
    bound = {"slope": DERIVATIVE, "f precise": PRECISE, "f cheap": CHEAP}[of][curve] * np.abs(expected)
    if (curve, of, kind) == ("tanh", "f precise", "float32"):  # two units in the last place, below 1, not above
        bound = 2 * np.spacing(np.nextafter(np.abs(expected).astype(np.float32), np.float32(0)))
    assert (np.abs(y - expected) <= bound)[~small].all()


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("curve", BY_NUMPY)
def test_functions_are_odd_bounded_and_monotonic_up_to_infinity(curve, of):
    u = points("bfloat16")
    y, slope = computed(u, of, curve), of == "slope"
    assert np.isnan(y[np.isnan(u)]).all() and np.isfinite(y[~np.isnan(u)]).all()
    positive, negative = (half[np.isfinite(np.split(u, 2)[0])] for half in np.split(y, 2))  # bits of one sign each
    assert np.array_equal(negative, positive if slope else -positive)
    far, zero = np.abs(u) >= 1e20, u == 0
    assert far.sum() > 10_000 and zero.sum() == np.isinf(u).sum() == 2
    assert (y[far] == (0 if slope else np.sign(u[far]))).all()
    at_zero = SLOPES[curve](0.0) if slope else 0
    assert (np.abs(y[zero] - at_zero) <= (ULP if slope else 0)).all()  # 2/√π is no float32
    one = 1 + (ULP if curve == "isru" else 0)  # u times a root that was rounded upwards
    assert (positive >= 0).all() and (positive <= (2 / np.sqrt(np.pi) + ULP if slope else one)).all()
    steps = np.diff(positive.astype(float)) * (-1 if slope else 1)
    assert (steps >= -4 * ULP * positive[1:]).all()  # neighbours may be closer than the error, twice 2 ulp
