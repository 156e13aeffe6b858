"""Curves are told apart, however many there are, and one curve looks the same wherever it is drawn."""

import re
from itertools import combinations

import matplotlib.colors
import numpy as np
import pytest
from PIL import Image

from normscope.show.figures.curves import plot_curves
from normscope.show.figures.sheet import save_figure
from normscope.show.figures.style import STYLES

# Machado, Oliveira and Fernandes (2009), severity 1.0: what is left of linear RGB.
SEEN_WITH = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, vision):
    """CIE L*a*b* of what is seen of an sRGB colour."""
    rgb = np.array(matplotlib.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    part = XYZ @ np.clip(np.array(vision) @ linear, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(part > 0.008856, np.cbrt(part), 7.787 * part + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one, other):
    return min(np.linalg.norm(lab(one, vision) - lab(other, vision)) for vision in SEEN_WITH.values())


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_curves_colours_differ_with_any_colour_vision(style):
    # 2.3 is what is just noticed side by side; thin lines need several times that.
    assert min(difference(one, other) for one, other in combinations(style.curves, 2)) > 14
    assert min(difference(curve, style.background) for curve in style.curves) > 40
    behind = (*style.channels, style.ink, style.faint)
    assert min(difference(curve, other) for curve in style.curves for other in behind) > 10


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_no_two_of_48_curves_look_alike(style):
    names = [f"curve_{number}" for number in range(48 - len(style.looks()))]
    looks = style.looks(names)
    assert len(looks) == len({repr(look) for look in looks.values()}) == 48
    assert set(names) <= set(looks)
    assert len(style.looks([f"curve_{number}" for number in range(100)])) > 100  # more begin again


def test_a_curve_looks_the_same_beside_others():
    style = STYLES["light"]
    alone, together = style.looks(["mine"]), style.looks(["isru", "mine", "yours", "tanh"])
    assert alone.items() <= together.items()
    assert together["tanh"] == ("#D55E00", "-")
    colour, (_, dashes) = together["isru"]
    assert colour == "#0072B2" and len(dashes) == 2


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_curves_that_are_compared_have_hues_of_their_own_and_nothing_else_has_them(style):
    looks = style.looks(["mine"])
    compared = ("tanh", "isru", "derf", "hardtanh", "linear", "sigmoid", "arctan", "softsign")
    assert len({looks[curve][0] for curve in compared}) == len(compared)
    assert len({str(looks[curve][1]) for curve in compared[:4]}) == 4
    assert looks["derf"][0] == looks["erf"][0] and looks["mine"][0] not in (looks["tanh"][0], looks["isru"][0])
    assert {colour for colour, _ in looks.values()} == set(style.curves)
    assert not {*style.curves} & {*style.channels, style.ink, style.faint, style.background}


def test_formulas_are_of_the_font_also_where_they_are_drawn_later(tmp_path):
    """Besides its letters an SVG names families of signs, such as roots, that few fonts have in every size."""
    path = save_figure(plot_curves("tanh,isru", font="DejaVu Serif"), tmp_path / "curves.svg", {})
    families = set(re.findall(r"font(?:-family)?: ([^;\"]*)", path.read_text(encoding="utf-8")))
    assert any("Serif" in family for family in families)
    assert {family for family in families if "Serif" not in family and "STIX" not in family} == set()


def test_both_ways_to_write_a_figure_have_200_dots_an_inch(tmp_path):
    figure = plot_curves("tanh", width=2)
    figure.savefig(tmp_path / "ours.png")
    for path in (tmp_path / "ours.png", save_figure(figure, tmp_path / "theirs.png")):
        with Image.open(path) as image:
            assert image.width == 400
    figure.savefig(tmp_path / "small.png", dpi=50)
    with Image.open(tmp_path / "small.png") as image:
        assert image.width == 100
