"""Four pretrained networks through every command; scripts/fetch_pretrained.py brings them."""

import numpy as np
import pytest
import torch
from command_line import document, invoke
from networks import sums_of

import normscope
from normscope.fits.spikes import stream_of
from normscope.models.weights.repository import COPIES, copy_of

REPOSITORIES = {copy.name: repository for repository, copy in COPIES.items()}
# The number of norms, their kind, d and placements, and the limit of samples that keeps a test below a minute.
NETWORKS = {
    "dinov2_small": (25, "LayerNorm", 384, {"pre-norm", "final"}, 3),
    "smollm2_135m": (61, "LlamaRMSNorm", 576, {"pre-norm", "final"}, 4),
    "smart_turn": (9, "LayerNorm", 384, {"pre-norm", "final"}, 4),
    "minilm": (13, "LayerNorm", 384, {"post-norm"}, 8),
}
pytestmark = pytest.mark.slow


def fetched(name):
    if not copy_of(REPOSITORIES[name]).is_dir():
        pytest.skip(f"python scripts/fetch_pretrained.py {name} has not been run")
    if name == "smart_turn":
        pytest.importorskip("torchaudio", exc_type=Exception)
    return name


@pytest.fixture(scope="module", params=NETWORKS)
def name(request):
    return fetched(request.param)


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name)
    limit = NETWORKS[name][-1]
    invoke(f"capture {name} --limit {limit} --verify --diagonal --device cpu -o seen.safetensors", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    return normscope.load_capture(folder / "seen.safetensors")


def test_norms_and_origin_are_reported(name, seen):
    number, kind, d, placements, limit = NETWORKS[name]
    assert len(seen.sites) == number and not seen.skipped and seen.n_samples == limit
    assert {(site.kind, site.d) for site in seen.sites} == {(kind, d)}
    assert {site.placement for site in seen.sites} == placements
    copy = COPIES[REPOSITORIES[name]]
    origin = f"{REPOSITORIES[name]}, {copy.origin}" if copy.origin else REPOSITORIES[name]
    assert seen.about["weights"] == f"{origin} (sha256 {copy.sha256[:12]})"


def test_sums_match_hooks_on_the_last_norm(name, seen):
    """Against the norm's own inputs, in float64."""
    network = normscope.load(name, device="cpu", limit=NETWORKS[name][-1])
    site = seen.sites[-1]
    norm, rows = network.module.get_submodule(site.name), []
    hook = norm.register_forward_pre_hook(lambda module, args: rows.append(args[0].double()))
    x = []
    with torch.no_grad():
        for batch in network.inputs:
            network.module(**batch.kwargs)
            x.append(rows.pop()[slice(None) if batch.valid is None else batch.valid].reshape(-1, site.d))
    hook.remove()
    x = torch.cat(x)
    y = x if "RMS" in site.kind else x - x.mean(1, keepdim=True)
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps)
    sums = seen.stats[site.name].moments.sum((0, 2)).double()
    np.testing.assert_allclose(sums[[0, 3, 4, 5]], sums_of(x, y)[[0, 3, 4, 5]], rtol=1e-4)
    report = normscope.check(seen, eps=1e-3)
    step = (x.max() - x.min()) / 255
    error = float(((x / step).round() * step - x).norm() / x.norm())
    assert report["int8"].sites[-1]["tensor"] == pytest.approx(error, rel=0.05)
    centred = x if "RMS" in site.kind else x - x.mean(1, keepdim=True)
    other = centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-3)
    assert report["eps"].sites[-1]["0.001"] == pytest.approx(float((other - y).norm() / y.norm()), rel=0.1)
    half = x.half()
    assert ("x²" in report["float16"].sites[-1]["overflows"]) == bool(half.square().isinf().any())


def test_every_command_on_the_capture(name, folder, seen):
    number = NETWORKS[name][0]
    names = {site.name for site in seen.sites}
    fits = document("fit seen.safetensors --func tanh,isru,linear", cwd=folder)["fits"]
    assert len(fits) == 3 * number and {fit["site"] for fit in fits} == names
    assert {card["site"] for card in document("stats seen.safetensors", cwd=folder)["sites"]} == names
    views = document("gradient seen.safetensors --layers 4 -o out", cwd=folder)["gradient"]
    assert len({view["site"] for view in views}) == 4
    invoke("plot seen.safetensors --layers 4 -o out", cwd=folder)
    invoke("compare seen.safetensors seen.safetensors --layers 4 -o out", cwd=folder)
    invoke("report seen.safetensors --layers 4 -o out", cwd=folder)
    written = sorted(path.name for path in (folder / "out").iterdir())
    assert any(path.endswith("-scurves.png") for path in written) and any(path.endswith(".html") for path in written)


def test_layers_and_drift_of_the_network_itself(name, tmp_path):
    listed = document(f"layers {name} --device cpu", cwd=tmp_path)
    assert len(listed["sites"]) == NETWORKS[name][0]
    last = listed["sites"][-1]["name"]
    bench = f"swap-bench {name} --device cpu --limit 4 --layers {last} --quick --func dyt,rmsnorm"
    assert document(bench, cwd=tmp_path)["drift"]


# The norms that become RMSNorms exactly, and those whose γ and β move: not the final norms, whose output is returned.
SIMPLIFIED = {"dinov2_small": (25, 24), "smollm2_135m": (0, 61), "smart_turn": (9, 8), "minilm": (1, 0)}


def test_simplify_of_the_network_itself(name, tmp_path):
    norms = document(f"simplify {name} --device cpu --limit 1 -o exact", cwd=tmp_path)["norms"]
    assert (sum(norm["exact"] for norm in norms), sum(bool(norm["folded"]) for norm in norms)) == SIMPLIFIED[name]
    assert (tmp_path / "exact").is_dir()


def test_smart_turn_is_straight_at_first_and_an_s_at_last():
    """As an independent measurement on all frames of the eight recordings found it."""
    seen = normscope.capture(normscope.load(fetched("smart_turn"), device="cpu"))
    fits = normscope.fit(seen.only("0,8"), "tanh")
    first, last = fits
    assert [first.r2_cv, last.r2_cv] == pytest.approx([0.994, 0.950], abs=5e-4)
    assert last.amplitude == pytest.approx(10.1, abs=0.1) and last.alpha == pytest.approx(0.060, abs=1e-3)
    assert seen.stats[last.site].n_pairs == 8 * 400 * 384


def test_smollm2_continues_and_is_judged_by_perplexity():
    network = normscope.load(fetched("smollm2_135m"), device="cpu")
    assert type(network.module).__name__ == "LlamaForCausalLM" and network.task.measure == "perplexity"


# Per network: the spike's first norm and writer, channel, positions and last massive norm; the module that writes.
SPIKES = {
    "smart_turn": ("layers.3.self_attn_layer_norm", "FFN of layers.2", 375, [61, 62], None, "layers.2.fc2"),
    "smollm2_135m": (
        *("model.layers.12.input_layernorm", "FFN of model.layers.11", 507, [0]),
        *("model.layers.28.post_attention_layernorm", "model.layers.11.mlp"),
    ),
}


@pytest.mark.parametrize("name", SPIKES)
def test_the_largest_spike_is_what_the_named_sublayer_writes(name):
    """Against a hook on that sublayer: its output at the spike's tokens is nearly all of x at the next norm."""
    born, writer, channel, positions, last_massive, path = SPIKES[name]
    network = normscope.load(fetched(name), device="cpu", limit=8)
    seen = normscope.capture(network)
    spike = max(stream_of(seen).spikes, key=lambda spike: spike.ratio)
    assert (spike.site, spike.written_by, spike.channel, spike.last) == (born, writer, channel, seen.sites[-1].name)
    assert sorted(spike.positions) == [(position, seen.n_samples) for position in positions]
    assert (spike.massive or (None, None))[1] == last_massive
    assert spike.cosine > 0.99 and spike.removed_by is None
    written = []
    hook = network.module.get_submodule(path).register_forward_hook(lambda _, __, output: written.append(output))
    with torch.no_grad():
        for batch in network.inputs:
            network.module(*batch.args, **batch.kwargs)
    hook.remove()
    outputs = torch.cat([output[:, positions, channel].flatten() for output in written])
    reach = float(seen.stats[born].reach[channel])
    assert float(outputs.abs().max()) == pytest.approx(reach, rel=0.02)
