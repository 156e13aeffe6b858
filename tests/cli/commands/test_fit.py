"""`normscope fit` at every level and in every form, as a user calls it, beside the same in Python."""

import pytest
from command_line import document, invoke, words

import normscope
from normscope.fits.layerwise import layerwise
from normscope.fits.scale import token_slopes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("levels")
    sites = "--layers 'blocks.0.*,blocks.4.*,norm'"
    invoke(f"capture demo_vit --limit 8 {sites} --per-channel --by-gamma -q -o seen.safetensors", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    return normscope.load_capture(folder / "seen.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("--func all,free,best", {"curves": "all,free,best"}),
        ("--per channel --layers 2", {"per": "channel"}),
        ("--pool kind", {"pool": "kind"}),
        ("--amplitude theory", {"amplitude": "theory"}),
        ("--theory", {"theory": True}),
        ("--alpha 1", {"alpha": 1.0}),
        ("--shift", {"shift": True}),
        ("--func derf --no-shift", {"curves": "derf", "shift": False}),
        ("--weights-by gamma", {"weights_by": "gamma"}),
        ("--weights-by x", {"weights_by": "x"}),
        ("--func 'mine=x/(1+abs(x)**3)**(1/3)'", {"curves": "mine=x/(1+abs(x)**3)**(1/3)"}),
    ],
)
def test_json_is_the_result_of_python(folder, seen, arguments, options):
    fits = document(f"fit seen.safetensors {arguments}", cwd=folder)["fits"]
    chosen = seen.only(2) if "--layers" in arguments else seen
    assert fits == [fit.as_dict() for fit in normscope.fit(chosen, **options)]


def test_tables_explain_fits_and_intervals(folder):
    def table(arguments):
        return words(invoke(f"fit seen.safetensors -q {arguments}", cwd=folder, COLUMNS="1000").stdout)

    sites = table("--layers 2 --func tanh,sigmoid,best")
    assert "±: half of the 95% interval, a jackknife over folds by source" in sites
    assert "A·f(αx + s)" in sites and "*: the best" in sites and "it would be tanh" in sites
    assert "mean R² (of all pairs) over 2 sites" in sites
    channels = table("--per channel --layers 1 --func tanh")
    assert "64" in channels and "medians, 5th and 95th percentiles over the channels" in channels
    assert "Each token is a line, exactly" in table("--per token")
    assert "A, α from theory" in table("--layers 1 --theory --func tanh")


def test_slopes_and_means_are_those_of_python(folder, seen):
    slopes = document("fit seen.safetensors --per token", cwd=folder)["slopes"]
    assert slopes == [fit.as_dict() for fit in token_slopes(seen)]
    means = document("fit seen.safetensors --layers 3", cwd=folder)["layerwise"]
    assert means == [{"model": "demo_vit", **layerwise(normscope.fit(seen.only(3))).as_dict()}]


def test_a_model_is_captured_with_the_sums_that_its_fits_need(folder):
    few = "fit demo_vit --limit 8 --layers 1"
    assert document(f"{few} --weights-by gamma --func tanh", cwd=folder)["fits"][0]["weights_by"] == "gamma"
    assert len(document(f"{few} --per channel --func tanh", cwd=folder)["fits"]) == 64
