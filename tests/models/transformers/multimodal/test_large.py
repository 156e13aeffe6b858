"""A vision transformer and a Whisper at full size, of a folder's configuration alone: random weights, as said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import normscope

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc"),
    pytest.mark.usefixtures("uncovered"),  # tiny networks run the same lines
]
# What the system counts for a process (ru_maxrss) begins with the memory of the one that started it; VmHWM does not.
REPORTING_ITS_PEAK = """
import atexit, pathlib
lines = lambda: pathlib.Path("/proc/self/status").read_text().splitlines()
atexit.register(lambda: pathlib.Path("peak").write_text(next(line for line in lines() if line.startswith("VmHWM"))))
from normscope.__main__ import main
main()
"""
WHISPER_SMALL = {  # arXiv 2212.04356, table 1
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "vocab_size": 51865,
}


def a_vit(folder, tokenizer):
    config = transformers.ViTConfig(num_labels=1000, architectures=["ViTForImageClassification"])  # ViT-Base
    config.save_pretrained(folder)
    transformers.ViTImageProcessor().save_pretrained(folder)


def a_whisper(folder, tokenizer):
    config = transformers.WhisperConfig(**WHISPER_SMALL, architectures=["WhisperForConditionalGeneration"])
    config.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("make", "weights", "sites", "gibibytes"),
    [(a_vit, 86.6e6, 25, 3), (a_whisper, 241.7e6, 62, 4)],  # float32 weights take 0.3 and 0.9 of these
)
def test_a_configuration_at_full_size(tmp_path, tokenizer, capfd, make, weights, sites, gibibytes):
    folder = tmp_path / "network"
    make(folder, tokenizer)
    command = ["capture", f"transformers:{folder}", "--weights", "random", "--verify", "-o", "seen.safetensors"]
    environment = os.environ | {"PYTHONPATH": str(Path(normscope.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", REPORTING_ITS_PEAK, *command, "--limit", "2"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "random weights, seed 0" in done.stderr
    peak = int((tmp_path / "peak").read_text().split()[1]) / 2**20
    with capfd.disabled():
        print(f"\n  {make.__name__}: peak memory {peak:.1f} GiB", end="")
    assert peak < gibibytes
    seen = normscope.load_capture(tmp_path / "seen.safetensors")
    assert len(seen.sites) == sites and seen.n_samples == 2 and {site.d for site in seen.sites} == {768}
    loaded = normscope.load(f"transformers:{folder}", weights="random", limit=1, device="cpu").module
    assert sum(parameter.numel() for parameter in loaded.parameters()) == pytest.approx(weights, rel=0.01)
    named = json.loads((folder / "config.json").read_text())["architectures"]
    assert [type(loaded).__name__] == named
