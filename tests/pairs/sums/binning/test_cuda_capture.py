"""Captures on a GPU, from a network to a figure, against captures on the CPU; and what ranks tell one another by nccl.

With NORMSCOPE_KERNEL_TESTS=cpu all of it runs on the CPU, the second time with other arithmetic: it shows that it runs.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from captures import COUNTS
from torch import nn

import normscope
from normscope.norms.trace import find_norms
from normscope.pairs.checkpoints import merge_progress
from normscope.pairs.ranks import Ranks
from normscope.pairs.recorder import CaptureOptions, Recorder

DEVICE = os.environ.get("NORMSCOPE_KERNEL_TESTS") or "cuda"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def in_float32():
    """Let no product of matrices be taken of rounded numbers."""
    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn)
    were = [backend.allow_tf32 for backend in kinds]
    for backend in kinds:
        backend.allow_tf32 = False
    yield
    for backend, before in zip(kinds, were, strict=True):
        backend.allow_tf32 = before


def captured(name: str, device: str, limit: int, **arithmetic: bool) -> normscope.Capture:
    network = normscope.load(name, device=device, limit=limit)
    with torch.backends.mkldnn.flags(**arithmetic):
        return normscope.capture(network.module, network.inputs, about=network.about)


@pytest.mark.parametrize(
    ("name", "limit", "library"),
    [("demo_vit", 16, "timm"), ("demo_wav2vec2", 4, "soundfile"), ("demo_dit", 2, "diffusers")],
)
def test_captures_on_gpu_and_cpu_agree(name, limit, library):
    pytest.importorskip(library, reason=f"{library} is not installed, which {name} takes.")
    there, here = captured(name, DEVICE, limit, enabled=False), captured(name, "cpu", limit, enabled=True)
    assert list(there.stats) == list(here.stats)
    for site, stats in here.stats.items():
        ours = there.stats[site]
        assert (ours.n_pairs, ours.n_tokens, int(ours.nonfinite_tokens)) == (stats.n_pairs, stats.n_tokens, 0), site
        # float32 of another order through the network, and a sampler's steps: x is off by some 1e-6 to 1e-5 of its
        # size, and so are sums of squares; those of x and y may cancel, and are measured by them.
        sums, truth = ours.moments.sum((0, 2)), stats.moments.sum((0, 2))
        torch.testing.assert_close(sums[[3, 5]], truth[[3, 5]], rtol=1e-3, atol=0)
        scale = (stats.n_pairs * truth[[3, 5]]).sqrt()
        assert ((sums[[1, 2]] - truth[[1, 2]]).abs() <= 1e-3 * scale).all(), site
    for one, other in zip(normscope.fit(there), normscope.fit(here), strict=True):
        assert (one.site, one.curve, one.n_pairs) == (other.site, other.curve, other.n_pairs)
        assert one.r2 == pytest.approx(other.r2, abs=1e-3), one.site
        if not (one.straight or other.straight):  # by themselves, A and α mean nothing there
            assert one.alpha == pytest.approx(other.alpha, rel=1e-2), one.site


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_of_the_same_x_all_counts_are_the_same(dtype):
    generator = torch.Generator().manual_seed(0)
    batches = [(3 * torch.randn(8, 197, 64, generator=generator)).to(dtype) for _ in range(3)]
    batches[0][1, 3, 5], batches[1][0, 0, 0] = torch.nan, 700.0
    model = nn.Sequential(nn.LayerNorm(64)).to(dtype)
    here = normscope.capture(model, batches).stats["0"]
    there = normscope.capture(model.to(DEVICE), [batch.to(DEVICE) for batch in batches]).stats["0"]
    assert int(here.nonfinite_tokens) == 1 and here.n_tokens == 3 * 8 * 197 - 1
    for name in COUNTS:
        assert torch.equal(getattr(there, name), getattr(here, name)), name
    assert torch.equal(there.moments[:, 0], here.moments[:, 0])
    n, _, _, xx, _, yy = here.moments.unbind(1)
    of_terms = torch.stack([n, (n * xx).sqrt(), (n * yy).sqrt(), xx, (xx * yy).sqrt(), yy], 1)
    gathered = 9 * 2.0**-24 + n[:, None] * 2.0**-31  # in float32: docs/methods.md
    assert ((there.moments - here.moments).abs() <= gathered * of_terms).all()
    for sample in ("tokens", "largest", "pairs"):
        assert torch.equal(getattr(there, sample).key, getattr(here, sample).key), sample


def ran(*command: str, cwd) -> str:
    process = subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-600:]
    return process.stdout


OPTIONS = {
    "one batch": ["--batch-size", "16"],
    "two workers": ["--workers", "2", "--batch-size", "4"],
    "bfloat16": ["--dtype", "bf16"],
    "checkpoints": ["--checkpoint-every", "1", "--batch-size", "2"],
}


@pytest.mark.parametrize("case", OPTIONS)
def test_the_command_captures_and_its_file_is_fitted_and_drawn(case, tmp_path):
    file = "vit.safetensors"
    options = ["--device", DEVICE, "--limit", "16", *OPTIONS[case], "-o", file]
    ran("normscope", "capture", "demo_vit", *options, cwd=tmp_path)
    seen = normscope.load_capture(tmp_path / file)
    assert seen.n_samples == 16
    assert len({stats.n_pairs for name, stats in seen.stats.items() if "blocks" in name}) == 1
    assert len(json.loads(ran("normscope", "fit", file, "--json", cwd=tmp_path))["fits"]) == 2 * len(seen.stats)
    if case == "one batch":
        ran("normscope", "plot", file, "-o", "drawn", cwd=tmp_path)
        assert list(tmp_path.glob("drawn*"))


def test_one_rank_of_torchrun_captures(tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "normscope"]
    ran(*torchrun, "capture", "demo_vit", "--device", DEVICE, "--limit", "8", "-o", "vit.safetensors", cwd=tmp_path)
    assert normscope.load_capture(tmp_path / "vit.safetensors").n_samples == 8


class OneOfThem(int):
    """A number of ranks, one, that is not taken for there being no others: what they tell goes through the backend."""

    def __eq__(self, other):
        return False

    __hash__ = int.__hash__


@pytest.fixture
def ranks(tmp_path):
    device = torch.device("cuda", 0) if DEVICE == "cuda" else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Ranks(0, OneOfThem(1), device)
    dist.destroy_process_group()


def test_gathered_messages_arrive_unchanged(ranks):
    for data in (b"", b"\0\1", bytes(range(256)) * 1000):
        assert list(ranks.gather_bytes(data)) == [data]
    assert ranks.gather({"ä": [1, None]}) == [{"ä": [1, None]}]


def test_progress_of_a_rank_is_merged_by_the_backend(ranks):
    model = nn.Sequential(nn.LayerNorm(16), nn.LayerNorm(16)).to(ranks.device)
    batch = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(0)).to(ranks.device)
    report = find_norms(model, normscope.Batch((batch,)).first_sample())
    recorder = Recorder(model, CaptureOptions(by_gamma=True, per_channel=True), report, report.sites)
    with recorder.hooked(), torch.no_grad():
        recorder.run(normscope.Batch((batch,)))
    before = {name: stats.to("cpu") for name, stats in recorder.progress.capture.parts[""].stats.items()}
    recorder.progress = merge_progress(recorder.progress, ranks)
    for name, stats in recorder.progress.capture.parts[""].stats.items():
        after = stats.to("cpu")
        for total, own in after.sums.items():
            assert torch.equal(own, before[name].sums[total]), total
        assert torch.equal(after.channel_extremes, before[name].channel_extremes)
        assert torch.equal(after.tokens.x, before[name].tokens.x)
        assert torch.equal(after.pairs.channel, before[name].pairs.channel)
