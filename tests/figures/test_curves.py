"""The figure of the curves: each line is its curve."""

import numpy as np
import pytest
import torch

from normscope.errors import UsageError
from normscope.figures.depth import ALPHAS, plot_curves
from normscope.fits.curves.known import BUILT_IN, CURVES


def shown(figure):
    return [ax for ax in figure.axes if ax.get_visible()]


def test_every_curve_has_a_panel_with_its_formula_and_three_scales():
    figure = plot_curves()
    figure.draw_without_rendering()
    axes = shown(figure)
    assert [ax.get_title(loc="left") for ax in axes] == [curve.name for curve in BUILT_IN]
    for ax, curve in zip(axes, BUILT_IN, strict=True):
        written = " ".join(text.get_text() for text in reversed(ax.texts))
        assert written == f"f(u) = {curve.formula}"
        for line, alpha in zip(ax.lines, ALPHAS, strict=False):
            x = torch.from_numpy(np.asarray(line.get_xdata()))
            np.testing.assert_array_equal(line.get_ydata(), curve.function(alpha * x))
        assert all(text.get_window_extent().y0 >= ax.get_window_extent().y1 for text in ax.texts)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["α = 0.5", "α = 1", "α = 2"]


def test_curves_can_be_chosen_and_made():
    axes = shown(plot_curves("dyt,mine=x/(1+abs(x))", width=5.5))
    assert [ax.get_title(loc="left") for ax in axes] == [CURVES["tanh"].name, "mine"]
    assert axes[1].texts[0].get_text() == "f(u) = u/(1+abs(u))"
    with pytest.raises(UsageError, match="no curve 'tangh'"):
        plot_curves("tangh")
