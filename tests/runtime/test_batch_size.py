"""`batch_size="auto"`: the network says how many inputs it takes at once."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import MemoryEndedError, UsageError
from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import LoadOptions
from normscope.models.inputs.numbered_inputs import TensorInputs
from normscope.runtime import network as running
from normscope.runtime.network import largest_batch

CPU = torch.device("cpu")


def inputs(number: int, **options) -> TensorInputs:
    tensors = torch.randn(number, 4, generator=torch.Generator().manual_seed(0))
    samples = [Sample(f"source {i}", i, i) for i in range(number)]
    one_by_one = options.pop("one_by_one", False)
    made = LoadOptions("random", None, options.get("limit"), 3, 0, CPU, torch.float32)
    return TensorInputs(tensors, samples, f"{number} samples", made, one_by_one=one_by_one)


class Tight(nn.Module):
    def __init__(self, at_most: int = 10**6) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(4), nn.Dropout(0.5)
        self.at_most, self.sizes = at_most, []

    def forward(self, x):
        assert not self.training and not torch.is_grad_enabled()
        assert torch.equal(x, x[:1].expand_as(x))  # the first sample, again and again
        self.sizes.append(len(x))
        torch.rand(3)
        if len(x) > self.at_most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.dropout(self.norm(x))


@pytest.mark.parametrize(
    ("at_most", "number", "size", "because", "sizes"),
    [
        (5, 64, 4, "memory ends at 8", [1, 2, 4, 8]),
        (5, 6, 4, "memory ends at 6", [1, 2, 4, 6]),
        (6, 6, 6, "all inputs in one", [1, 2, 4, 6]),
        (10**6, 1, 1, "all inputs in one", [1]),
        (1, 7, 1, "memory ends at 2", [1, 2]),
        (10**6, 2000, 32, "more are not tried", [1, 2, 4, 8, 16, 32]),
    ],
)
def test_sizes_double_until_memory_ends(at_most, number, size, because, sizes):
    module, some = Tight(at_most), inputs(number)
    assert (*largest_batch(module, some), module.sizes) == (size, because, sizes)


def test_a_single_sample_that_does_not_fit_is_an_error():
    with pytest.raises(MemoryEndedError, match="with 1 sample"):
        largest_batch(Tight(0), inputs(4))


def test_inputs_that_are_taken_one_at_a_time_stay_so():
    module = Tight()
    assert largest_batch(module, inputs(4, one_by_one=True)) == (1, "these inputs are taken one at a time")
    assert module.sizes == []


def test_the_network_is_left_as_found():
    module = Tight(5).train()
    torch.manual_seed(3)
    truth = torch.rand(4)
    torch.manual_seed(3)
    largest_batch(module, inputs(64))
    assert torch.equal(torch.rand(4), truth)
    assert module.training and module.dropout.training and torch.is_grad_enabled()


def test_a_slow_network_is_not_made_to_try_larger_ones(monkeypatch):
    monkeypatch.setattr(running, "_LONGEST", 0)
    assert largest_batch(Tight(), inputs(4)) == (1, "one takes 0 s already")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's memory is measured")
def test_on_a_gpu_memory_ends_before_it_is_taken():
    class Growing(nn.Module):  # takes a thirtieth of the GPU for each sample, and returns it
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), device="cuda"))

        def forward(self, x):
            return torch.ones(len(x), torch.cuda.mem_get_info()[1] // 30 // 4, device="cuda").sum(1) * self.scale

    assert largest_batch(Growing(), inputs(256)) == (8, "memory ends at 16")


def test_load_sets_what_fits_also_to_learn_from():
    network = normscope.load("demo_vit", limit=24, batch_size="auto", device="cpu")
    assert [len(batch.samples) for batch in network.inputs] == [24]
    assert network.calibration.batch_size == 24


def test_what_is_neither_a_number_nor_auto_is_refused(tmp_path):
    with pytest.raises(UsageError, match="batch_size is 'large'; it has to be a number, or 'auto'"):
        normscope.load("demo_vit", batch_size="large")
    (tmp_path / "mine.py").write_text("import torch\ndef make(): return torch.nn.LayerNorm(4), [torch.ones(2, 4)]\n")
    with pytest.raises(UsageError, match="decides how large its batches are: batch_size can have no effect"):
        normscope.load(f"py:{tmp_path / 'mine.py'}:make", batch_size="auto")


REAL = """
    import resource, sys, logging
    import timm, torch
    import normscope
    from normscope.inputs.batch import Sample
    from normscope.inputs.loaded_model import LoadOptions
    from normscope.models.inputs.numbered_inputs import TensorInputs

    logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", depth=2, mlp_ratio=32.0, num_classes=0).eval()
    samples = [Sample(f"image {i}", i, i) for i in range(40)]
    options = LoadOptions("random", None, None, 32, 0, torch.device("cpu"), torch.float32)
    images = TensorInputs(torch.randn(40, 3, 224, 224), samples, "40 images", options)

    def counts(inputs):
        return {name: stats.moments[:, 0].sum() for name, stats in normscope.capture(network, inputs).stats.items()}

    counts(images)  # threads are started, and what is compiled is
    truth = counts(images)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    try:
        torch.empty(ROOM * 2, dtype=torch.uint8)
    except RuntimeError:
        print("the limit holds", flush=True)
    seen = counts(images)
    assert all(seen[name] == truth[name] == 40 * 197 * 192 for name in truth), (seen, truth)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold a process to RLIMIT_AS")
def test_a_real_lack_of_memory_splits_batches_and_counts_are_right():
    code = textwrap.dedent(REAL).replace("ROOM", str(160 * 2**20))
    # Each thread's own arena reserves more of the address space than there is room.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    # For one image the wide layer takes 197 · 6144 · 4 bytes, for 32 images 155 MB, and its activation as much.
    said = "Memory ended with 32 samples in a batch; from here on they are taken 16 at a time."
    assert done.stdout.startswith("the limit holds") and said in done.stdout
