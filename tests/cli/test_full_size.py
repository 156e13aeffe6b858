"""The networks of the papers at full size, from checkpoint files in the libraries' own formats, as a user runs them."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import diffusers
import pytest
import timm
import torch
from command_line import document
from safetensors.torch import save_file

import normscope
from normscope.curves.known import CURVES

torchaudio = pytest.importorskip("torchaudio", exc_type=Exception)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc"),
    pytest.mark.usefixtures("uncovered"),  # tiny networks run the same lines
]
CHECKOUT = Path(normscope.__file__).parents[1]
DIT_XL = {  # DiT-XL/2 at 256×256 of arXiv 2212.09748, table 1 and appendix A, in diffusers' words
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "sample_size": 32,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}
# What the system counts for a process (ru_maxrss) begins with the memory of the one that started it; VmHWM does not.
REPORTING_ITS_PEAK = """
import atexit, pathlib
lines = lambda: pathlib.Path("/proc/self/status").read_text().splitlines()
atexit.register(lambda: pathlib.Path("peak").write_text(next(line for line in lines() if line.startswith("VmHWM"))))
from normscope.__main__ import main
main()
"""


@pytest.fixture
def folder(tmp_path):
    """A folder that is gone afterwards: checkpoints take gigabytes, and pytest keeps its folders."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def normscope_in(folder, capfd, line):
    """Run a command in a process of its own, print its peak memory, and return what it printed."""
    command = [sys.executable, "-c", REPORTING_ITS_PEAK, *line.split()]
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=out, stderr=err, timeout=600)
        out.seek(0)
        err.seek(0)
        assert done.returncode == 0, err.read()
        peak = int((folder / "peak").read_text().split()[1])
        with capfd.disabled():
            print(f"\n  {line[:60]}: peak memory {peak / 2**20:.1f} GiB", end="")
        return out.read()


def a_vit(folder):
    save_file(timm.create_model("vit_base_patch16_224").state_dict(), folder / "weights.safetensors")


def a_wav2vec2(bundle):
    def make(folder):
        torch.save(torchaudio.models.wav2vec2_model(**bundle._params).state_dict(), folder / "weights.pth")

    return make


def a_dit(folder):
    diffusers.DiTTransformer2DModel(**DIT_XL).save_pretrained(folder / "dit")
    (folder / "dit" / "diffusion_pytorch_model.safetensors").rename(folder / "weights.safetensors")


CASES = {
    "vit_b16": (a_vit, "weights.safetensors", {"LayerNorm": 25}, {"pre-norm": 24, "final": 1}),
    "wav2vec2_large": (
        a_wav2vec2(torchaudio.pipelines.WAV2VEC2_LARGE),
        "weights.pth",
        {"LayerNorm": 50, "GroupNorm": 1},
        {"post-norm": 49, None: 2},
    ),
    "wav2vec2_large_lv60k": (
        a_wav2vec2(torchaudio.pipelines.WAV2VEC2_LARGE_LV60K),
        "weights.pth",
        {"LayerNorm": 57, "layer_norm": 1},  # of the waveform, as one token
        {"pre-norm": 48, "final": 1, None: 9},
    ),
    "dit_xl": (a_dit, "weights.safetensors", {"LayerNorm": 57}, {"pre-norm": 56, "final": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_network_of_the_papers(name, folder, capfd):
    make, file, kinds, placements = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        make(folder)
    step = "--timesteps 980, --guidance 1" if name == "dit_xl" else ""
    run = f"{name} --weights {file} --device cpu --verify {step}"
    normscope_in(folder, capfd, f"capture {run} --limit 1 -o seen.safetensors")
    sites = normscope.load_capture(folder / "seen.safetensors").sites
    assert Counter(site.kind for site in sites) == kinds
    assert Counter(site.placement for site in sites) == placements
    is_drawn_and_fitted(folder, kinds, f"file {file} (sha256 ")


def is_drawn_and_fitted(folder, kinds, weights):
    """Go on from the capture in this process, which has imported everything already."""
    fits = document("fit seen.safetensors", cwd=folder)["fits"]
    assert len(fits) == 2 * sum(kinds.values())
    assert all(found["weights"].startswith(weights) for found in fits)
    assert all(0 < found["r2"] <= 1 for found in fits if found["nothing"] != "one token")
    (drawn,) = document("plot seen.safetensors --layers 4 -o .", cwd=folder)["figures"]
    assert len(drawn["sites"]) == 4
    assert (folder / drawn["file"]).stat().st_size > 100_000


def test_every_view_of_a_vit(folder, capfd):
    run = "vit_b16 --weights random --device cpu --limit 2 --layers 0,8,16,24 --per-channel --diagonal"
    normscope_in(folder, capfd, f"capture {run} -o seen.safetensors")
    fits = document("fit seen.safetensors --func all", cwd=folder)["fits"]
    assert len(fits) == (len(CURVES) - 1) * 4  # derf is erf with one free parameter more
    assert all(0 < found["r2"] <= 1 for found in fits if found["curve"] in ("tanh", "isru", "erf"))
    channels = document("fit seen.safetensors --per channel --layers 2", cwd=folder)["fits"]
    assert len(channels) == 2 * 2 * 768 and sum(found["converged"] for found in channels) > 0.99 * len(channels)
    assert len(document("stats seen.safetensors", cwd=folder)["sites"]) == 4
    (view,) = document("gradient seen.safetensors --layers 4 -o .", cwd=folder)["figures"]
    both = document("compare seen.safetensors seen.safetensors --layers 4 -o .", cwd=folder)
    against = [row for row in both["sites"] if row["r2_of_first"] is not None]
    assert len(against) == 2 * 4
    # The curve fitted there explains its own pairs, evaluated at points a sixteenth of an octave apart and at all.
    assert all(row["r2_of_first"] == pytest.approx(row["r2"], abs=1e-5) for row in against)
    assert all((folder / file).stat().st_size > 50_000 for file in (view["file"], both["figure"]))
