"""ViT-B/16 at full size: random weights, and the same from a checkpoint file in timm's format."""

import os
import subprocess
import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

import normscope

CHECKOUT = Path(normscope.__file__).parents[1]


def test_vit_b16_from_a_checkpoint_file(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        network = timm.create_model("vit_base_patch16_224").eval()
    for parameter in network.parameters():
        parameter.data.mul_(1.5)  # weights that no seed makes
    save_file(network.state_dict(), tmp_path / "vit.safetensors")
    command = [sys.executable, "-m", "normscope", "capture", "vit_b16", "--weights", "vit.safetensors"]
    done = subprocess.run(
        [*command, "-o", "seen.safetensors", "--limit", "2", "--verify"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = normscope.load_capture(tmp_path / "seen.safetensors")
    inputs = normscope.load("vit_b16", weights="random", limit=2, device="cpu").inputs
    expected = normscope.capture(network, inputs)
    assert len(seen.sites) == 25
    assert seen.about["weights"].startswith("file vit.safetensors (sha256 ")
    for site in seen.sites:
        ours, theirs = seen.stats[site.name], expected.stats[site.name]
        assert ours.n_pairs == theirs.n_pairs == 2 * 197 * 768
        # The sums of two forward passes of the same float32 network, in another number of threads.
        assert torch.allclose(ours.moments.sum((0, 2)), theirs.moments.sum((0, 2)), rtol=1e-3, atol=1.0)


def test_vit_b16_with_random_weights_runs_whole(tmp_path):
    network = normscope.load("vit_b16", weights="random", limit=1, device="cpu")
    seen = normscope.capture(network.module, network.inputs, layers=4, about=network.about, verify=True)
    assert [site.index for site in seen.sites] == [0, 8, 16, 24]
    figure = normscope.plot(seen, normscope.fit(seen))
    assert "weights: random weights, seed 0" in figure.get_suptitle()
