"""LayerNorm and RMSNorm against what their definitions imply."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.norms.recognition import layer_norm, rms_norm

rows = st.integers(2, 40).flatmap(
    lambda d: st.lists(st.floats(-1e4, 1e4, width=32), min_size=d, max_size=d).filter(lambda row: np_std(row) > 1e-2)
)


def np_std(row):
    mean = sum(row) / len(row)
    return math.sqrt(sum((x - mean) ** 2 for x in row) / len(row))


@given(rows)
def test_layer_norm_keeps_its_bound_and_its_line(row):
    x = torch.tensor([row], dtype=torch.float32)
    y, rstd = layer_norm(x, 1e-6)
    d = len(row)
    # float32 rounds x − mean to 2⁻²⁴ of the largest |x|, which the division by σ magnifies.
    slack = 4 * 2.0**-24 * (1 + float(x.abs().max()) * float(rstd))
    assert float(y.abs().max()) <= math.sqrt(d - 1) * (1 + 1e-5) + slack
    line = (x.double() - x.double().mean()) * rstd.double()
    assert torch.allclose(y.double(), line, rtol=1e-4, atol=8 * slack)


@given(rows, st.integers(0, 1))
def test_dyisru_with_the_other_elements_in_its_constant_is_rms_norm(row, i):
    """arXiv 2503.21708: with C = Σ_{j≠i} x_j² + d·eps, √d·x_i/√(x_i² + C) is RMSNorm in x_i."""
    eps, d = 1e-6, len(row)
    x = torch.tensor(row, dtype=torch.float64)
    constant = x.square().sum() - x[i].square() + d * eps
    y, _ = rms_norm(x[None], eps)
    assert torch.allclose(y[0, i], math.sqrt(d) * x[i] / (x[i].square() + constant).sqrt(), rtol=1e-9, atol=1e-12)
