"""Numbers that the page computes by itself are Python's: curves and R²."""

import re

import pytest
import torch

import normscope
from normscope.curves.known import CURVES

SITES = ("first", "second", "groups")
WIDE = torch.cat([-torch.logspace(-9, 3, 60).flip(0), torch.zeros(1), torch.logspace(-9, 3, 60)]).double()
R2 = """const {amplitude, alpha, shift} = explored.values;
    return r2Of(open.site.drawn.nodes, explored.f, amplitude, alpha, shift)"""
OF_A_SITE = "const site = open.capture.sites.find(({name}) => name === arguments[0]); const {nodes} = site.drawn;"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def every(seen):
    return normscope.fit(seen, "all,derf,mine=x/(1+abs(x)**3)**(1/3)")


@pytest.fixture(scope="module")
def page(browser, seen, every, tmp_path_factory):
    return browser.open(normscope.report(seen, every).save(tmp_path_factory.mktemp("every") / "every.html"))


@pytest.mark.parametrize("name", CURVES)
def test_functions_are_pythons(page, name):
    curve = CURVES[name]
    here = page.run("const f = functionOf(arguments[0]); return arguments[1].map(f)", name, WIDE.tolist())
    # Both round differently by a few units in the last place; erf is a series here.
    torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), curve.function(WIDE), rtol=1e-13, atol=1e-300)


def test_a_users_function_is_read_between_sampled_points(page, every):
    curve = next(fit.function for fit in every if fit.curve == "mine")
    u = torch.cat([WIDE, torch.linspace(-5, 5, 777, dtype=torch.float64), torch.tensor([-1e5, 1e5]).double()])
    here = page.run("const f = functionOf('mine'); return arguments[0].map(f)", u.tolist())
    torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), curve.function(u), rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("site", SITES)
def test_r2_is_that_of_the_fit(page, every, site):
    for fit in every[site]:
        script = f"{OF_A_SITE} return r2Of(nodes, functionOf(arguments[1]), ...arguments[2])"
        here = page.run(script, site, fit.curve, [fit.amplitude, fit.alpha, fit.shift])
        assert abs(here - fit.r2) < (1e-5 if fit.curve == "mine" else 1e-9), fit


def test_the_explorer_moves_fits_and_comes_back(browser, pages, fits):
    page = browser.open(pages.one, "#view=explorer&site=second&curve=isru")
    fit = fits["second", "isru"]
    assert abs(page.run(R2) - fit.r2) < 1e-9
    page.run("""const slider = document.getElementById("slider-alpha"); slider.value = 900;
        slider.dispatchEvent(new Event("input"))""")
    assert page.run(R2) < fit.r2 - 0.01 and page.run("return explored.values.alpha") > 2 * fit.alpha
    page.run("const f = document.getElementById('field-amplitude'); f.value = 3; f.dispatchEvent(new Event('change'))")
    assert page.run("return explored.values.amplitude") == 3
    page.click("#reset")
    assert page.run("return Object.values(explored.values)") == [fit.amplitude, fit.alpha, fit.shift]
    named, formula = page.texts("#formula-shown")[0].split(", f = ")
    assert formula == fit.function.formula
    amplitude, alpha, sign, shift = re.fullmatch(r"y ≈ ([\d.]+)·f\(([\d.]+)x ([+−]) (.+)\)", named).groups()
    written = [float(amplitude), float(alpha), float(shift.replace("−", "-")) * (-1 if sign == "−" else 1)]
    assert written == pytest.approx([fit.amplitude, fit.alpha, fit.shift], rel=1e-3)
    assert page.texts("#outcome")[0].startswith(f"R² {fit.r2:.4f} · fitted {fit.r2:.4f} · held-out {fit.r2_cv:.4f}")
    fields = page.run("return [...document.querySelectorAll('.knobs [type=number]')].map((field) => field.value)")
    assert [float(field) for field in fields] == pytest.approx(written, rel=1e-3) and max(map(len, fields)) < 12


def test_the_explorer_offers_the_fitted_curves(browser, pages, fits):
    page = browser.open(pages.one, "#view=explorer&site=first")
    assert page.texts("#curve option") == [fit.curve for fit in fits["first"]]
    page.run("""const list = document.getElementById("curve"); list.value = "mine";
        list.dispatchEvent(new Event("change"))""")
    assert abs(page.run(R2) - fits["first", "mine"].r2) < 1e-5
