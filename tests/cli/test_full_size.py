"""The networks of the papers at full size, from checkpoint files in the libraries' own formats."""

import shutil
from collections import Counter

import diffusers
import pytest
import timm
import torch
from command_line import document, invoke
from safetensors.torch import save_file

import normscope
from normscope.curves.known import CURVES

torchaudio = pytest.importorskip("torchaudio", exc_type=Exception)
pytestmark = pytest.mark.slow
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


@pytest.fixture
def folder(tmp_path):
    """A folder that is removed afterwards: checkpoints take gigabytes, and pytest keeps its folders."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def save_vit(folder):
    save_file(timm.create_model("vit_base_patch16_224").state_dict(), folder / "weights.safetensors")


def save_wav2vec2(bundle):
    def save(folder):
        torch.save(torchaudio.models.wav2vec2_model(**bundle._params).state_dict(), folder / "weights.pth")

    return save


def save_dit(folder):
    diffusers.DiTTransformer2DModel(**DIT_XL).bfloat16().save_pretrained(folder / "dit")
    (folder / "dit" / "diffusion_pytorch_model.safetensors").rename(folder / "weights.safetensors")


CASES = {
    "vit_b16": (save_vit, "weights.safetensors", {"LayerNorm": 25}, {"pre-norm": 24, "final": 1}),
    "wav2vec2_large": (
        save_wav2vec2(torchaudio.pipelines.WAV2VEC2_LARGE),
        "weights.pth",
        {"LayerNorm": 50, "GroupNorm": 1},
        {"post-norm": 49, None: 2},
    ),
    "wav2vec2_large_lv60k": (
        save_wav2vec2(torchaudio.pipelines.WAV2VEC2_LARGE_LV60K),
        "weights.pth",
        {"LayerNorm": 57, "layer_norm": 1},  # of the waveform, as one token
        {"pre-norm": 48, "final": 1, None: 9},
    ),
    "dit_xl": (save_dit, "weights.safetensors", {"LayerNorm": 57}, {"pre-norm": 56, "final": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_network_of_the_papers(name, folder):
    save, file, kinds, placements = CASES[name]
    save(folder)
    step = "--timesteps 980, --guidance 1" if name == "dit_xl" else ""
    run = f"{name} --weights {file} --device cpu --verify {step}"
    invoke(f"capture {run} --limit 1 -o seen.safetensors", cwd=folder)
    sites = normscope.load_capture(folder / "seen.safetensors").sites
    assert Counter(site.kind for site in sites) == kinds
    assert Counter(site.placement for site in sites) == placements
    fits = document("fit seen.safetensors", cwd=folder)["fits"]
    assert len(fits) == 2 * len(sites)
    assert all(fit["weights"].startswith(f"file {file} (sha256 ") for fit in fits)
    assert all(0 < fit["r2"] <= 1 for fit in fits if fit["nothing"] != "one token")


def test_every_view_of_a_vit(folder):
    run = "vit_b16 --weights random --device cpu --limit 2 --layers 0,8,16,24 --per-channel --diagonal"
    invoke(f"capture {run} -o seen.safetensors", cwd=folder)
    fits = document("fit seen.safetensors --func all", cwd=folder)["fits"]
    assert len(fits) == (len(CURVES) - 1) * 4  # derf is erf with one free parameter more
    assert all(0 < fit["r2"] <= 1 for fit in fits if fit["curve"] in ("tanh", "isru", "erf"))
    channels = document("fit seen.safetensors --per channel --layers 2", cwd=folder)["fits"]
    assert len(channels) == 2 * 2 * 768 and sum(fit["converged"] for fit in channels) > 0.99 * len(channels)
    assert len(document("stats seen.safetensors", cwd=folder)["sites"]) == 4
    (drawn,) = document("plot seen.safetensors -o .", cwd=folder)["figures"]
    (view,) = document("gradient seen.safetensors --layers 4 -o .", cwd=folder)["figures"]
    both = document("compare seen.safetensors seen.safetensors --layers 4 -o .", cwd=folder)
    rows = [row for row in both["sites"] if row["r2_of_first"] is not None]
    assert len(rows) == 2 * 4
    # The curve fitted there explains its own pairs, evaluated at points a sixteenth of an octave apart and at all.
    assert all(row["r2_of_first"] == pytest.approx(row["r2"], abs=1e-5) for row in rows)
    assert all((folder / file).stat().st_size > 50_000 for file in (drawn["file"], view["file"], both["figure"]))
