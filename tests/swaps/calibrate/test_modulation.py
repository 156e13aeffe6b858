"""Scales and shifts of adaLN: told by their values, and fitted where they can undo all that a function cannot know."""

import copy

import pytest
import torch
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.swaps.calibrate.calibrate import calibrate
from normscope.swaps.calibrate.modulation import Modulation, best_for_each_sample, modulation_of


class Modulated(nn.Module):
    """A norm whose output is scaled and shifted by what a linear layer makes of the sample's class."""

    def __init__(self):
        super().__init__()
        self.ada, self.norm, self.head = nn.Linear(4, 24), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 3)

    def forward(self, x, of_class):
        shift, _, scale = self.ada(of_class)[:, None].chunk(3, dim=-1)
        return self.head(self.norm(x) * (1 + scale) + shift)


def of_classes(number=10, size=8):
    """Tokens of mean zero, whose σ is that of their sample's class: 0.5, 1, 2 or 4."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])
    batches = []
    for n in range(number):
        classes = torch.randint(0, 4, (size,), generator=generator)
        orders = torch.stack([torch.randperm(8, generator=generator) for _ in range(size * 6)])
        x = signs[orders].reshape(size, 6, 8) * 2.0 ** (classes[:, None, None] - 1)
        samples = tuple(Sample(f"{i}", i, i) for i in range(n * size, (n + 1) * size))
        batches.append(Batch((x, nn.functional.one_hot(classes, 4).float()), samples=samples))
    return batches


def test_what_knows_the_class_undoes_what_depends_on_it():
    torch.manual_seed(0)
    original, learn, found = Modulated().requires_grad_(False), of_classes(), {}
    for refit in ("norms", "neighbours"):
        swapped = copy.deepcopy(original)
        swapped.norm = normscope.PointwiseFunction("linear", 8, alpha=0.5)
        report = calibrate(original, swapped, learn, refit=refit)
        found[refit] = report.after
    assert [one.path for one in report.modules] == ["norm", "ada", "head"]
    # Scales are held to the present ones by a fiftieth of a channel's variance, and a ridge shrinks.
    assert found["neighbours"] < 0.25 * found["norms"] and found["norms"] > 0.1
    assert torch.equal(swapped.ada.weight[8:16], original.ada.weight[8:16])  # the part that modulates nothing


def test_the_parts_are_told_by_their_values():
    torch.manual_seed(0)
    y, given = torch.randn(3, 7, 4), torch.randn(3, 16)
    parts = given[:, None].split(4, dim=-1)
    layers = [("other", torch.randn(3, 16)), ("ada", given)]
    assert modulation_of(y, y * (1 + parts[1]) + parts[3], layers) == Modulation("ada", 4, 12)
    assert modulation_of(y, y * parts[1] + parts[3], layers) is None
    assert modulation_of(y, y, layers) is None
    assert modulation_of(y[:, 0], y[:, 0], layers) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_best_scale_is_that_of_a_straight_line_held_to_the_present_one(seed):
    """As a straight line through the tokens and, far out, tokens that lie on the present one."""
    torch.manual_seed(seed)
    given, wanted, present = torch.randn(2, 50, 3), torch.randn(2, 50, 3), torch.randn(2, 3)
    scale, shift = best_for_each_sample(given, wanted, present)
    held = 0.02 * given.double().var(1, correction=0).mean(0)
    for n in range(2):
        for c in range(3):
            x, z = given[n, :, c].double(), wanted[n, :, c].double()
            rows = torch.stack([x - x.mean(), torch.ones(50).double()], 1)
            far = torch.tensor([[float((50 * held[c]).sqrt()), 0.0]], dtype=torch.float64)
            aimed = torch.cat([z, far[:, 0] * (1 + present[n, c].double())])
            line = torch.linalg.lstsq(torch.cat([rows, far]), aimed[:, None]).solution.flatten()
            torch.testing.assert_close(scale[n, c] + 1, line[0], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(shift[n, c], line[1] - line[0] * x.mean(), rtol=1e-9, atol=1e-12)
