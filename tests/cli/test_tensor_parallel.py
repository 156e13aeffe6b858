"""``--tp``: captures by ranks that share the weights of one network, in real processes on loopback.

This file is also the program of the ranks: one launch, which forks them once all is imported and compiled.
"""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import normscope

sys.path.append(str(Path(__file__).parents[1]))
from command_line import invoke, words
from networks import save_llama

pytestmark = pytest.mark.slow

CHECKOUT = Path(normscope.__file__).parents[1]
COMMAND = "capture transformers:{} --device cpu --data lines.txt --batch-size 1 --verify"
SIZES = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
NETWORKS = {
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 8, "num_key_value_heads": 2},  # which normalizes heads
    "BertForMaskedLM": {},  # for which there is no plan
}
RANKS = {"LlamaForCausalLM": (2, 4), "Qwen3ForCausalLM": (2,), "BertForMaskedLM": (2,)}  # of a network, out of four


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save the networks, and run the commands on all ranks."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("networks")
    for name, sizes in NETWORKS.items():
        save_llama(folder / name)
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        network = kind(kind.config_class(**SIZES, **sizes))
        for parameter in network.parameters():
            torch.nn.init.uniform_(parameter, 0.1, 1.0)
        network.save_pretrained(folder / name)
    (folder / "lines.txt").write_text(
        "one two three\nthree two\ntwo two one three\n"
    )  # an odd number, for two networks
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def run_ranks():
    """Capture the networks in this process, and then by four ranks with the environment that torchrun gives them."""
    for name in NETWORKS:
        invoke(f"{COMMAND.format(name)} -o {name}.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"TORCHELASTIC_RUN_ID": "tp", "WORLD_SIZE": "4", **address}
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(str(rank),)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4


def run_rank(rank):
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    for name, sizes in RANKS.items():
        for tp in sizes:
            done = invoke(f"{COMMAND.format(name)} -o {name}{tp}.safetensors --tp {tp}", status=None)
            Path(f"{name}{tp} {rank}.json").write_text(json.dumps([done.exit_code, done.stderr]))


def said(folder, name, rank):
    return json.loads((folder / f"{name} {rank}.json").read_text())


@pytest.mark.parametrize(("name", "tp"), [("LlamaForCausalLM", 2), ("LlamaForCausalLM", 4), ("Qwen3ForCausalLM", 2)])
def test_ranks_that_share_weights_count_each_input_once(folder, name, tp):
    assert [said(folder, f"{name}{tp}", rank)[0] for rank in range(4)] == [0] * 4
    assert [said(folder, f"{name}{tp}", rank)[1].count("loading") for rank in range(4)] == [1, 0, 0, 0]
    together, alone = (normscope.load_capture(folder / f"{file}.safetensors") for file in (f"{name}{tp}", name))
    of_heads = [site.name for site in alone.sites if site.name.endswith(("q_norm", "k_norm"))]
    assert together.about == alone.about and together.n_samples == 3 and bool(of_heads) == (name[0] == "Q")
    assert [norm.name for norm in together.skipped if "some of the heads" in norm.reason] == of_heads
    whole = [(site.name, site.kind) for site in alone.sites if site.name not in of_heads]
    assert [(site.name, site.kind) for site in together.sites] == whole
    for site in together.sites:
        shared, stats = together.stats[site.name], alone.stats[site.name]
        assert (shared.n_pairs, shared.n_tokens) == (stats.n_pairs, stats.n_tokens)
        # 1e-5: ranks add their parts of each linear layer in float32, in another order than one process does.
        for ours, theirs in zip(shared.channel_sums, stats.channel_sums, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_what_has_no_plan_is_refused(folder):
    for rank in range(4):
        status, error = said(folder, "BertForMaskedLM2", rank)
        assert status == 3 and "have no tp_plan in transformers (BertForMaskedLM): leave --tp out" in words(error)
    assert not (folder / "BertForMaskedLM2.safetensors").exists()


if __name__ == "__main__":
    run_ranks()
