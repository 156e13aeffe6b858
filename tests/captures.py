"""Captures in tests: beside their raw pairs, compared with others, and as earlier versions stored them."""

import dataclasses

import numpy as np
import torch

from normscope.pairs.capture import captured
from normscope.pairs.recorder import CaptureOptions
from normscope.pairs.storage import pack
from normscope.pairs.sums.binning import PAIR_GRID

SUMS = 1e-12  # float64 sums of at most 1e7 terms each, added in another order


def assert_same_tensors(tensors, expected):
    """Counts and samples to the bit, float64 sums up to their rounding; those that cancel are as exact as the rest."""
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        exact = tensor.dtype != torch.float64 or name.endswith("rank")
        scale = 0.0 if exact or not tensor.numel() else float(tensor.abs().max())
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=SUMS * scale, msg=lambda text, n=name: n + text)


COUNTS = ("density", "channel_extremes", "token_offsets", "token_scales", "nonfinite_tokens")


def assert_same_counts(ours, truth, rtol=2**-23):
    """Counts and drawn tokens and pairs to the bit; y and 1/σ are rounded to float32 from sums of another order."""
    for name in COUNTS:
        assert torch.equal(getattr(ours, name), getattr(truth, name)), name
    assert torch.equal(ours.moments[:, 0], truth.moments[:, 0])
    for sample in ("tokens", "largest", "pairs"):
        for field in dataclasses.fields(getattr(truth, sample)):
            mine, theirs = (getattr(getattr(stats, sample), field.name) for stats in (ours, truth))
            if field.name in ("y", "rstd"):
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-12)
            else:
                assert torch.equal(mine, theirs), (sample, field.name)


def assert_same_capture(seen, expected):
    """Compare the whole, its parts, and the sources of each site."""
    assert seen.n_samples == expected.n_samples and seen.stats.keys() == expected.stats.keys()
    for name, stats in expected.stats.items():
        assert seen.stats[name].sources == stats.sources and seen.stats[name].fold_by == stats.fold_by
    assert_same_tensors(*(pack(dataclasses.replace(capture, parts={}))[1] for capture in (seen, expected)))
    assert seen.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        assert_same_capture(seen.parts[name], part)


def observed(network, batches=None, *, about=None, layers="all", **summing):
    """Return a capture, and the raw x and y of each site, float64 ``(tokens, d)``."""
    raw = {}

    def observe(site, x, y):
        raw.setdefault(site.name, []).append((x.double().clone(), y.double().clone()))

    seen = captured(network, batches, CaptureOptions(observe=observe, **summing), about=about, layers=layers)
    return seen, {name: tuple(map(torch.cat, zip(*rows, strict=True))) for name, rows in raw.items()}


def moments_of(x, y):
    """Bin raw pairs, as float32 holds x: ``(6, bins)``."""
    x, y = np.asarray(x, np.float32), np.asarray(y, float)
    bins = PAIR_GRID.index(torch.from_numpy(x)).numpy()
    x = x.astype(float)
    weights = (None, x, y, x * x, x * y, y * y)
    return torch.stack([torch.from_numpy(np.bincount(bins, w, PAIR_GRID.size)).double() for w in weights])
