"""Derivatives of the formulas of norms; tests/test_theory.py checks the formulas themselves."""

import pytest
import torch
from torch.func import jacrev, vmap

from normscope.norms.formulas import FORMS


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("eps", [1e-5, 0.7])
def test_the_jacobian_of_every_form_is_its_derivative(name, eps):
    form = FORMS[name]
    rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3
    rows = rows * torch.tensor([0.01, 0.3, 1, 3, 30], dtype=torch.float64)[:, None]
    truth = vmap(jacrev(lambda row: form(row[None], eps)[0][0]))(rows)
    torch.testing.assert_close(form.diagonal(rows, eps), truth.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-12)
    rstd, pull, z = form.jacobian(rows, eps)
    eye = torch.eye(9, dtype=torch.float64)
    closed = rstd[:, :, None] * (eye - form.centred / 9 - pull[:, :, None] * z[:, None, :])
    torch.testing.assert_close(closed, truth, rtol=1e-9, atol=1e-12)
