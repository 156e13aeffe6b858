"""``--tp``: captures by ranks that share the weights of one network, in real processes on loopback."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from networks import save_llama

import normscope

pytestmark = pytest.mark.slow

CHECKOUT = Path(normscope.__file__).parents[1]
COMMAND = "capture transformers:. --device cpu --data lines.txt --batch-size 1 --verify -o"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    lines = save_llama(folder)
    lines.write_text("one two three\nthree two\ntwo two one three\n")  # an odd number, for two ranks
    return folder


def start(folder, ranks, line):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "OMP_WAIT_POLICY": "PASSIVE"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, "-m", "normscope", *line.split()]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_weights_count_each_input_once(folder, ranks):
    for line, number in (
        (f"{COMMAND} together.safetensors --force --tp 2", ranks),
        (f"{COMMAND} alone.safetensors --force", 1),
    ):
        done = start(folder, number, line)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("loading") == 1  # one rank reports
    together, alone = (normscope.load_capture(folder / f"{name}.safetensors") for name in ("together", "alone"))
    assert together.about == alone.about and together.n_samples == 3
    assert [(site.name, site.kind) for site in together.sites] == [(site.name, site.kind) for site in alone.sites]
    for name, stats in alone.stats.items():
        shared = together.stats[name]
        assert (shared.n_pairs, shared.n_tokens) == (stats.n_pairs, stats.n_tokens)
        # 1e-5: ranks add their parts of each linear layer in float32, in another order than one process does.
        for ours, theirs in zip(shared.channel_sums, stats.channel_sums, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_what_cannot_be_sharded_is_refused(folder, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_llama(tmp_path)
    cases = {
        "Qwen3ForCausalLM": {"vocab_size": 8, "head_dim": 8},
        "BertForMaskedLM": {"vocab_size": 8},
    }
    sentences = {
        "Qwen3ForCausalLM": "norm of transformers:. would see a part of the heads on each rank",
        "BertForMaskedLM": "have no tp_plan in transformers (BertForMaskedLM): leave --tp out",
    }
    for name, changes in cases.items():
        kind = getattr(transformers, name)
        kind(kind.config_class(**sizes, **changes)).save_pretrained(tmp_path)
        done = start(tmp_path, 2, f"{COMMAND} seen.safetensors --tp 2")
        assert (
            sentences[name] in " ".join(done.stderr.split())
            and "Traceback (most" not in done.stderr.partition("Error:")[0]
        )
        assert not (tmp_path / "seen.safetensors").exists()
