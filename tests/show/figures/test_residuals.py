"""What a curve leaves of E[y|x], and its band, against the raw pairs and against means drawn again."""

import dataclasses
import math
import re

import matplotlib.text
import numpy as np
import pytest
import torch
from artists import shown
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from torch import nn

import normscope
from normscope.fits.curve_fit import CurveFit
from normscope.show.figures.panel_data import residuals
from normscope.show.figures.scurves import plot
from normscope.show.figures.style import STYLES

N_SOURCES, N_TOKENS, D = 8, 50, 32


class Bent(CurveFit):
    """A fit of a curve that is not built in."""

    def __call__(self, x):
        return 1.05 * self.amplitude * torch.tanh(self.alpha * x.double() + self.shift)


def capture_of(x, names=("norm",), **about):
    model = nn.ModuleDict({name: nn.LayerNorm(x.shape[-1]) for name in names})
    model.forward = lambda x: [norm(x * (i + 1)) for i, norm in enumerate(model.values())]
    return normscope.capture(model, [x], about={"model": "m", "weights": "w", "data": "d", **about})


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_SOURCES, N_TOKENS, D, generator=generator)
    x[..., 3] *= 12  # tails, that an inset's centre leaves out
    return x


@pytest.fixture(scope="module")
def seen(tokens):
    return capture_of(tokens)


@pytest.fixture(scope="module")
def fits(seen):
    return normscope.fit(seen)


def made(fits, curve, kind=CurveFit, **changes):
    known = {field.name: getattr(fits[0], field.name) for field in dataclasses.fields(fits[0])}
    function = dataclasses.replace(fits[0].function, name=curve)
    return kind(**{**known, "curve": curve, "function": function, **changes})


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def line_of(ax, curve, looks=None):
    colour, dashes = (looks or STYLES["light"].looks())[curve]
    like = Line2D([], [], color=colour, ls=dashes)
    return next(
        line
        for line in ax.get_lines()
        if (line.get_color(), line.get_linestyle(), line._unscaled_dash_pattern)
        == (colour, like.get_linestyle(), like._unscaled_dash_pattern)
    )


def test_residuals_are_the_mean_of_what_is_left_of_the_raw_pairs(tokens, seen, fits):
    x = tokens.double().flatten()
    y = nn.functional.layer_norm(tokens.double(), (D,), eps=1e-5).flatten()
    groups = residuals(seen.stats["norm"].moments, fits, width=0.5)
    # A group reaches from halfway below its first bin to its last: bins are 1/64 of |x| wide, and so much may the
    # raw pairs' group be off. In the middle of a group of hundreds of pairs that moves its mean by far less.
    for fit, off in zip(fits, groups.off, strict=True):
        left = (y - fit(x)).numpy()
        for low in (-1.0, -0.5, 0.0, 0.5, 1.0):
            own = (x >= low).numpy() & (x < low + 0.5).numpy()
            (group,) = np.flatnonzero((groups.x >= low) & (groups.x < low + 0.5))
            assert off[group] == pytest.approx(left[own].mean(), abs=0.01)
            assert abs(off[group]) < 0.2


def test_groups_contain_enough_pairs_within_their_width(seen):
    moments = seen.stats["norm"].moments
    one_pair = residuals(moments, (), width=0.25, least_count=1)
    assert (np.diff(np.floor(one_pair.x / 0.25)) >= 1).all()
    assert len(residuals(moments, (), width=0.25, least_count=10**9).x) == 1
    many = residuals(moments, (), width=1e-9, least_count=1000)
    assert 6 <= len(many.x) <= N_SOURCES * N_TOKENS * D // 1000
    whole = moments.sum((0, 2))
    assert residuals(moments, (), 1e9, 10**9).x[0] == pytest.approx(float(whole[1] / whole[0]), abs=1e-12)


@pytest.mark.parametrize("counts", [[100] * 8, [10, 400, 90, 200, 300, 50, 150, 20]], ids=["even", "uneven"])
def test_the_band_is_as_wide_as_means_of_so_many_folds_spread(counts):
    generator = np.random.default_rng(0)
    n = np.array(counts, float)
    means = generator.normal(size=(4000, len(n)))  # of each fold, all of variance 1: what differs between folds
    pooled = (means * n).sum(1) / n.sum()
    errors = []
    for own in means:
        moments = torch.zeros(len(n), 6, 1, dtype=torch.float64)
        moments[:, 0, 0], moments[:, 2, 0] = torch.from_numpy(n), torch.from_numpy(n * own)
        errors.append(float(residuals(moments, (), 1.0).error[0]))
    # 4000 draws know their spread to 1.1 %, and the mean of their variances to 1 to 2 %.
    assert math.sqrt(np.mean(np.square(errors))) == pytest.approx(pooled.std(), rel=0.06)


def test_groups_of_a_single_fold_have_no_band():
    moments = torch.zeros(3, 6, 2, dtype=torch.float64)
    moments[:, 0] = torch.tensor([[200.0, 200.0], [0, 200], [0, 200]])
    moments[:, 1] = moments[:, 0] * torch.tensor([-1.0, 1.0])
    moments[:, 2] = moments[:, 0] * torch.tensor([[1.0], [2.0], [3.0]])
    error = residuals(moments, (), 1.0).error
    assert math.isnan(error[0])
    assert error[1] == pytest.approx(1 / math.sqrt(3), rel=1e-12)  # of the means 1, 2 and 3, whose sd is 1


def test_the_row_shows_every_curve_over_the_band_within_its_own_limits(seen, fits):
    figure = plot(seen, fits, color="density,residual")
    density, residual = shown(figure)
    assert density.get_xlim() == residual.get_xlim()
    assert (density.get_ylabel(), residual.get_ylabel()) == ("output y", "E[y|x] − fit")
    reach = -residual.get_ylim()[0]
    for fit in fits:
        line = line_of(residual, fit.curve)
        y = np.asarray(line.get_ydata())
        assert np.abs(y).max() <= reach and len(y) >= 10
        assert np.abs(y).max() < 0.5 * density.get_ylim()[1]
        assert f"{fit.curve} {fit.rmse:.3g}" in [text.get_text() for text in residual.texts]
    assert max(np.abs(line_of(residual, fit.curve).get_ydata()).max() for fit in fits) > 0.8 * reach
    (band,) = (c for c in residual.collections if isinstance(c, PolyCollection))
    groups = residuals(seen.stats["norm"].moments, (), np.ptp(residual.get_xlim()) / 120)
    heights = band.get_paths()[0].vertices[:, 1]
    assert [heights.min(), heights.max()] == pytest.approx(2 * np.nanmax(groups.error) * np.array([-1, 1]))
    assert "±2 standard errors of E[y|x], folds by source" in texts(figure)


def test_residuals_are_an_optional_row_without_bounds(seen, fits):
    assert "E[y|x] − fit" not in texts(plot(seen, fits))
    alone = texts(plot(seen, fits, color="residual"))
    assert "E[y|x] − fit" in alone
    assert not [text for text in alone if "bound" in text or "all pairs" in text or "99%" in text]
    assert [text for text in texts(plot(seen, fits, color="residual,token")) if "bound" in text]


@pytest.mark.parametrize("case", ["no folds", "no fits", "constant", "no pairs"])
def test_sites_without_residuals_are_drawn(case, recwarn):
    x = torch.randn(1 if case == "no folds" else 4, 40, 8, generator=torch.Generator().manual_seed(0))
    seen = capture_of(x * {"constant": 0.0, "no pairs": math.nan}.get(case, 1.0))
    fits = [] if case == "no fits" else normscope.fit(seen)
    figure = plot(seen, fits, color="residual")
    figure.draw_without_rendering()
    said = texts(figure)
    assert [str(warning.message) for warning in recwarn] == []
    assert (case in ("no fits", "constant")) == ("±2 standard errors of E[y|x], folds by source" in said)
    assert ("nothing to fit" in said) == (case in ("constant", "no pairs"))
    low, high = shown(figure)[0].get_ylim()
    assert -math.inf < low < 0 < high < math.inf


def test_the_best_four_of_many_are_drawn_in_four_colours_and_the_others_listed(seen, fits):
    shifts = {8: 0.0}  # of the others, what was fitted
    many = [made(fits, f"curve_{i}", Bent, r2=0.5 + i / 100, shift=shifts.get(i, fits[0].shift)) for i in range(9)]
    figure = plot(seen, [*many, fits[0]], color="density,residual", width=4)
    density, residual = shown(figure)
    drawn = ["curve_6", "curve_7", "curve_8", fits[0].curve]  # R² 0.56, 0.57, 0.58 and a fit's
    assert fits[0].r2 > 0.58
    for ax in (density, residual):
        of_curves = [text for text in ax.texts if re.fullmatch(r"(?!ceiling)\w+ 0?\.\d+", text.get_text())]
        assert sorted(text.get_text().split()[0] for text in of_curves) == sorted(drawn)
        assert len({text.get_color() for text in of_curves}) == 4
    lines = [line for line in residual.get_lines() if len(line.get_xdata()) > 2]
    assert len(lines) == len({line.get_color() for line in lines}) == 4
    written = " ".join(texts(figure)).replace("\n", " ")
    assert "6 curves of smaller mean R² not drawn" in figure.caption
    formula = fits[0].function.formula
    assert f"curve_7: A·f(αx+s), f(u) = {formula}" in written and f"curve_8: A·f(αx), f(u) = {formula}" in written
