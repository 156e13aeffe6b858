"""`normscope fit` at every level and in every form, as a user calls it, beside the same in Python."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

import normscope
from normscope.cli import app


def run(*arguments, cwd):
    """Call the command in this process, which has torch loaded."""
    with contextlib.chdir(cwd):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "1000"})
    return SimpleNamespace(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def words(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("levels")
    done = run(
        "capture",
        "demo_vit",
        "--limit",
        "16",
        "--per-channel",
        "--by-gamma",
        "-q",
        "-o",
        "seen.safetensors",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    plain = run("capture", "demo_vit", "--limit", "8", "--layers", "1", "-q", "-o", "plain.safetensors", cwd=folder)
    assert plain.returncode == 0, plain.stderr
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    return normscope.load_capture(folder / "seen.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--func", "all,free,best"), {"curves": "all,free,best"}),
        (("--per", "channel", "--layers", "2"), {"per": "channel"}),
        (("--pool", "kind"), {"pool": "kind"}),
        (("--amplitude", "theory"), {"amplitude": "theory"}),
        (("--theory",), {"theory": True}),
        (("--alpha", "1"), {"alpha": 1.0}),
        (("--shift",), {"shift": True}),
        (("--func", "derf", "--no-shift"), {"curves": "derf", "shift": False}),
        (("--weights-by", "gamma"), {"weights_by": "gamma"}),
        (("--weights-by", "x"), {"weights_by": "x"}),
        (("--func", "mine=x/(1+abs(x)**3)**(1/3)"), {"curves": "mine=x/(1+abs(x)**3)**(1/3)"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_command_prints_what_python_gives(folder, seen, arguments, options):
    done = run("fit", "seen.safetensors", "--json", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    chosen = seen.only(2) if "--layers" in arguments else seen
    assert json.loads(done.stdout)["fits"] == [found.as_dict() for found in normscope.fit(chosen, **options)]


def test_the_tables_say_what_was_fitted_and_how_sure_it_is(folder):
    table = words(
        run("fit", "seen.safetensors", "-q", "--layers", "4", "--func", "tanh,derf,sigmoid,best", cwd=folder).stdout
    )
    assert "±: half of the 95 % interval, a jackknife over folds by source" in table
    assert "A·f(αx + s)" in table and "*: the best" in table and "it would be tanh" in table
    assert "mean R² over 4 sites" in table
    channels = words(run("fit", "seen.safetensors", "-q", "--per", "channel", "--layers", "2", cwd=folder).stdout)
    assert "64" in channels and "medians, 5th and 95th percentiles over the channels" in channels
    tokens = words(run("fit", "seen.safetensors", "-q", "--per", "token", cwd=folder).stdout)
    assert "Each token is a line, exactly" in tokens
    theory = words(run("fit", "seen.safetensors", "-q", "--layers", "2", "--theory", cwd=folder).stdout)
    assert "A, α from theory" in theory


def test_slopes_of_tokens_as_json(folder, seen):
    document = json.loads(run("fit", "seen.safetensors", "--per", "token", "--json", cwd=folder).stdout)
    assert document["slopes"] == [found.as_dict() for found in normscope.token_slopes(seen)]


def test_one_curve_everywhere_against_the_best_at_each_site(folder, seen):
    document = json.loads(run("fit", "seen.safetensors", "--layers", "3", "--json", cwd=folder).stdout)
    assert document["layerwise"] == [
        {"model": "demo_vit", **normscope.layerwise(normscope.fit(seen.only(3))).as_dict()}
    ]


def test_advice_as_yaml(folder, seen):
    done = run("fit", "seen.safetensors", "--advise", "-o", "advice.yaml", cwd=folder)
    assert "blocks.*.norm1" in done.stdout and "0.5 (all but language" in done.stdout
    document = yaml.safe_load((folder / "advice.yaml").read_text())
    expected = normscope.advise(normscope.fit(seen), seen.sites, family="vision")
    assert document["advice"] == [found.as_dict() for found in expected]


def test_a_model_is_captured_with_the_sums_that_its_fits_need(folder):
    done = run("fit", "demo_vit", "--limit", "8", "--layers", "1", "--weights-by", "gamma", "--json", cwd=folder)
    assert done.returncode == 0 and json.loads(done.stdout)["fits"][0]["weights_by"] == "gamma"
    done = run("fit", "demo_vit", "--limit", "8", "--layers", "1", "--per", "channel", "--csv", cwd=folder)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 + 2 * 64
