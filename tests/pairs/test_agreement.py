"""Ranks that found different batch sizes take the smallest, so that their chunks are the same."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from normscope.pairs.ranks import Ranks, agree_on_batches


class Told(Ranks):
    def told(self, message):
        return [message, 8, None]


def test_the_smallest_is_taken():
    for own, agreed in ((16, 8), (4, 4)):
        inputs = SimpleNamespace(batch_size=own)
        agree_on_batches(inputs, Told(0, 3))
        assert inputs.batch_size == agreed
    agree_on_batches([1, 2], Told(0, 3))  # a list of batches has none
    loader = torch.utils.data.DataLoader([1, 2], batch_size=8)  # whose batch size cannot be set
    agree_on_batches(loader, Told(0, 3))
    assert loader.batch_size == 8
    alone = SimpleNamespace(batch_size=16)
    agree_on_batches(alone, Ranks())
    assert alone.batch_size == 16


@pytest.mark.slow
def test_two_ranks_of_different_memory_count_every_input_once(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            import normscope
            from normscope.pairs.capture import captured
            from normscope.pairs.ranks import joined
            from normscope.runtime.processes import Place

            network = normscope.load("demo_vit", device="cpu")
            place = Place.from_environment()
            network.inputs.batch_size = (16, 5)[place.rank]
            with joined(place, torch.device("cpu")) as ranks:
                seen = captured(network, ranks=ranks)
            network.inputs.batch_size = 5
            truth = normscope.capture(network.module, network.inputs)
            assert seen.n_samples == truth.n_samples == 64
            for name, stats in truth.stats.items():
                assert torch.equal(seen.stats[name].moments[:, 0], stats.moments[:, 0]), name
            print("agreed")
            """
        )
    )
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone", str(script)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agreed") == 2
