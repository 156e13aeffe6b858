"""A network that accelerate has spread does, to the bit, what it does on one device."""

import gc
import sys
import tempfile

import accelerate
import pytest
import torch
from accelerate.utils import modeling
from networks import save_llama
from torch import nn
from transformers.integrations import accelerate as of_transformers

import normscope
from normscope.cli.output import Output
from normscope.errors import ModelError, UsageError
from normscope.models.weights.devices import blocks, device_names, spread
from normscope.norms.trace import find_norms
from normscope.runtime.spread import gathered

ON_DISK = {"demo_vit": 700, "demo_wav2vec2": 700, "demo_dit": 1200, "timm:test_convnext": 700, "llama": 40}  # kB
FACTORY = """
import torch
from torch import nn

class Odd(nn.Module):  # an RMSNorm under a name that no table knows
    def __init__(self, d):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(d) + 0.5), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))

class OddNorm(Odd):
    pass

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.past = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return x + nn.functional.linear(self.inner(self.norm(x)), self.past.weight)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.odd, self.mean = OddNorm(32), nn.BatchNorm1d(32)
        nn.init.normal_(self.mean.running_mean)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.mean(self.odd(x))

def make():
    torch.manual_seed(0)
    return Net(), [torch.randn(40, 32)]
"""


@pytest.fixture
def room(monkeypatch):
    """Leave accelerate so many kilobytes of the CPU's memory, and no GPU."""

    def leave(kilobytes):
        for module in (modeling, of_transformers):
            usual = module.get_max_memory
            monkeypatch.setattr(
                module, "get_max_memory", lambda given=None, usual=usual: usual(given or {"cpu": kilobytes * 1024})
            )

    return leave


@pytest.fixture
def named(tmp_path):
    """Return what loads a network of a name; for llama, of a tiny one as transformers saves it."""

    def options_of(name):
        if name == "factory":
            (tmp_path / "net.py").write_text(FACTORY)
            return {"name": f"py:{tmp_path / 'net.py'}:make"}
        if name != "llama":
            return {"name": name, "weights": "random" if name.startswith("timm:") else "pretrained", "limit": 3}
        return {"name": f"transformers:{tmp_path}", "data": save_llama(tmp_path, layers=4)}

    return options_of


def file_of(network, path):
    normscope.save_capture(normscope.capture(network, by_gamma=True), path)
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weights"), [("demo_wav2vec2", None), ("timm:test_convnext", None), ("llama", None), ("llama", "random")]
)
def test_the_capture_is_the_same_to_the_bit(room, named, tmp_path, name, weights):
    given = named(name)
    if weights is not None:
        given["weights"] = weights
    whole = normscope.load(device="cpu", **given)
    room(ON_DISK[name])
    apart = normscope.load(device_map="auto", **given)
    held = [tensor.is_meta for tensor in apart.module.parameters()]
    assert any(held) and not all(held)
    assert device_names(apart.module) == ["cpu", "disk"]
    assert file_of(whole, tmp_path / "whole.safetensors") == file_of(apart, tmp_path / "apart.safetensors")
    assert [tensor.is_meta for tensor in apart.module.parameters()] == held


def test_norms_outside_of_blocks_and_of_unknown_classes_are_captured(room, named, tmp_path):
    given = named("factory")
    whole = normscope.load(device="cpu", **given)
    room(30)
    apart = normscope.load(device_map="auto", **given)
    assert apart.module.odd.weight.is_meta
    assert blocks(apart.module) == ["Block"]
    sites = find_norms(apart.module, next(iter(apart.inputs))).sites
    assert [site.kind for site in sites[-2:]] == ["OddNorm", "BatchNorm"]
    assert file_of(whole, tmp_path / "whole.safetensors") == file_of(apart, tmp_path / "apart.safetensors")


def test_outputs_name_the_devices(room, capsys):
    room(700)
    for where, options in (("cpu and disk", {"device_map": "auto"}), ("cpu", {"device": "cpu"})):
        Output().introduce(normscope.load("demo_vit", **options))
        assert f" on {where} in torch.float32" in " ".join(capsys.readouterr().err.split())


def test_a_network_that_fits_stays_on_one_device(room):
    room(10_000)
    network = normscope.load("demo_vit", device_map="auto", dtype="bf16")
    assert device_names(network.module) == ["cpu"]


def spread_row():
    return spread(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.device("cpu"), {"cpu": 50_000})


def test_the_folder_goes_with_the_network(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module = spread_row()
    (folder,) = tmp_path.iterdir()
    assert {path.suffix for path in folder.iterdir()} == {".dat", ".json"}
    del module
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "func"), [("factory", "dyt"), pytest.param("llama", "dyt", marks=pytest.mark.slow)])
def test_swaps_their_drift_and_their_folders_are_the_same_to_the_bit(room, named, tmp_path, name, func):
    given = named(name)
    whole = normscope.load(device="cpu", **given)
    fits = normscope.fit(normscope.capture(whole, by_gamma=True), func)
    room({"factory": 30, **ON_DISK}[name])
    apart = normscope.load(device_map="auto", **given)
    devices = {key: value.device for key, value in apart.module.state_dict().items()}
    assert {device.type for device in devices.values()} == {"cpu", "meta"}
    rows, files = [], []
    for network in (whole, apart):
        modules = normscope.replacements(network, func, fits)
        report = normscope.drift(network, replacements=modules, one_at_a_time=False, cumulative=False)
        rows.append([(row.site, row.at, row.relative_l2) for row in report.rows])
        with normscope.swap(network, func, fits):
            folder = normscope.save_swapped(network.module, tmp_path / func, whole.about)
            files.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert rows[0] == rows[1] and files[0] == files[1]
    assert {key: value.device for key, value in apart.module.state_dict().items()} == devices


def test_changes_of_weights_take_one_device(room, tmp_path):
    room(700)
    apart = normscope.load("demo_vit", device_map="auto", limit=2)
    for action in (lambda: normscope.bench(apart, curves="dyt", quick=True), lambda: normscope.simplify(apart)):
        with pytest.raises(ModelError, match="is not possible: accelerate spreads this VisionTransformer over devices"):
            action()
    whole = normscope.load("demo_vit", device="cpu", limit=2)
    normscope.swap(whole, "dyt", normscope.capture(whole, layers=1))
    normscope.save_swapped(whole.module, tmp_path / "new", whole.about)
    with pytest.raises(UsageError, match="is a swap, which needs its network on one device: leave device_map out"):
        normscope.load("demo_vit", weights=tmp_path / "new", device_map="auto")
    room(100)
    with pytest.raises(ModelError, match="Not even one block of this VisionTransformer fits into memory"):
        normscope.load("demo_vit", device_map="auto")


def test_refusals_of_a_device_map(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ModelError, match=r"pip install 'accelerate>=1.2'\."):
        patch.setitem(sys.modules, "accelerate", None)
        normscope.load("demo_vit", device_map="auto")
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"Several processes cannot spread a network"):
        normscope.load("demo_vit", device_map="auto")


def test_weights_without_values_are_refused():
    norm = nn.LayerNorm(4, device="meta")
    accelerate.hooks.add_hook_to_module(norm, accelerate.hooks.ModelHook())
    with pytest.raises(ModelError, match="no access to the weights of a LayerNorm"), gathered(norm, (), {}):
        pass
