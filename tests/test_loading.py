"""Swapped networks that were saved are loaded by name, with the same outputs to the bit."""

import pytest
import torch
from networks import save_llama

import normscope
from normscope.cli.output import Output
from normscope.errors import ModelError

FACTORY = """
import torch
from torch import nn

def make():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
    return net, [torch.randn(6, 4) for _ in range(2)]
"""


@pytest.fixture
def llama(tmp_path):
    return {"name": f"transformers:{tmp_path}", "data": save_llama(tmp_path)}


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "net.py").write_text(FACTORY)
    return {"name": f"py:{tmp_path / 'net.py'}:make", "seed": 3}


def saved(folder, curve="dyt", layers="all", **options):
    """Load a network, swap and save it."""
    network = normscope.load(device="cpu", **options)
    sites = normscope.find_norms(network.module, next(iter(network.inputs))).sites
    normscope.swap(network.module, curve, sites, layers=layers, init="paper")
    normscope.save_swapped(network.module, folder, network.about, func=curve, init="paper")
    return network


@torch.no_grad()
def assert_same_outputs(mine, theirs, batches):
    compared = 0
    for batch in batches:
        outputs = [own.outputs.read(own.module(*batch.args, **batch.kwargs), batch) for own in (mine, theirs)]
        assert torch.equal(*outputs)
        assert bool(outputs[0].isfinite().all())
        compared += 1
    assert compared


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"name": "demo_vit", "limit": 8},
        {"name": "demo_vit", "limit": 8, "dtype": "bfloat16"},
        {"name": "demo_wav2vec2", "limit": 2},
        {"name": "demo_dit", "limit": 2, "timesteps": 2},
        {"name": "timm:test_convnext", "weights": "random", "seed": 5, "limit": 2},
        "llama",
        "factory",
    ],
    ids=str,
)
def test_loaded_again_it_gives_the_same_outputs(options, tmp_path, request):
    options = dict(request.getfixturevalue(options) if isinstance(options, str) else options)
    network = saved(tmp_path / "swap", **options)
    batches = list(network.inputs)
    rest = {key: value for key, value in options.items() if key not in ("weights", "seed")}
    again = normscope.load(weights=tmp_path / "swap", device="cpu", **rest)
    assert_same_outputs(again, network, batches)
    assert again.provenance.kind == ("random" if options.get("weights") == "random" else "file")
    assert again.provenance.description.startswith("swap swap (dyt in place of ")
    assert not again.module.training
    if not options["name"].startswith("py:"):
        del rest["name"]
        alone = normscope.load_swapped(tmp_path / "swap", device="cpu", **rest)
        assert alone.name == options["name"]
        assert_same_outputs(alone, network, batches)


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """A network whose last norm was swapped, and its folder."""
    folder = tmp_path_factory.mktemp("saved") / "swap"
    return saved(folder, name="demo_vit", layers="final", limit=4), folder


def test_weights_are_described_by_the_swap_and_its_origin(swapped, capsys):
    network, folder = swapped
    again = normscope.load_swapped(folder, limit=4, device="cpu")
    Output(quiet=True).introduce(again)
    assert capsys.readouterr().err == ""
    description = again.about["weights"]
    assert "dyt in place of 1 norm, of " + network.about["weights"] in description
    assert "random" not in description


def test_code_runs_only_where_it_is_named(factory, tmp_path, monkeypatch):
    saved(tmp_path / "swap", **factory)
    with pytest.raises(ModelError, match=r"whose code runs only where you name it: normscope\.load\('py:"):
        normscope.load_swapped(tmp_path / "swap")
    monkeypatch.chdir(tmp_path)
    assert normscope.load("py:net.py:make", weights="swap").name == "py:net.py:make"  # the same file, by another path


def with_name(swapped, folder, name):
    """Save a swap under another name of its model."""
    network, _ = swapped
    normscope.save_swapped(network.module, folder, network.about | {"model": name}, func="dyt", init="fit")
    return folder


def test_swaps_of_another_model_and_other_folders_are_refused(swapped, tmp_path):
    hub = with_name(swapped, tmp_path / "hub", "transformers:google/vit")
    for name, weights, message in (
        ("demo_dit", swapped[1], "The swap in .*swap is of demo_vit, not of demo_dit"),
        ("transformers:other/vit", hub, "is of transformers:google/vit, not of transformers:other/vit"),
        ("demo_vit", tmp_path, "are a folder"),
    ):
        with pytest.raises(ModelError, match=message):
            normscope.load(name, weights=weights)
    with pytest.raises(ModelError, match=r"no swap\.json"):
        normscope.load_swapped(tmp_path)


@pytest.mark.parametrize("name", ["", "demo", "timm:no_such", "transformers:nowhere/é", "x\0", "py:"])
def test_other_names_in_swap_json_are_refused(swapped, name, tmp_path):
    folder = with_name(swapped, tmp_path / "swap", name)
    for load in (normscope.load_swapped, lambda folder: normscope.load("demo_vit", weights=folder)):
        with pytest.raises(ModelError):
            load(folder)
