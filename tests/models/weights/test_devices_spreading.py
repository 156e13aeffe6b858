"""A network that accelerate has spread does, to the bit, what it does on one device."""

import gc
import itertools
import sys
import tempfile
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.utils import modeling
from command_line import document
from networks import save_llama
from torch import nn
from transformers.integrations import accelerate as of_transformers

import normscope
from normscope.cli.output import Output
from normscope.errors import ModelError, UsageError
from normscope.models.weights.devices import blocks, places, spread
from normscope.norms.trace import find_norms
from normscope.runtime.spread import at_hand

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
        for place in (modeling, of_transformers):
            own = place.get_max_memory
            monkeypatch.setattr(
                place, "get_max_memory", lambda given=None, own=own: own(given or {"cpu": kilobytes * 1024})
            )

    return leave


@pytest.fixture
def named(tmp_path):
    """Return what loads a network of a name; for llama, of a tiny one as transformers saves it."""

    def found(name):
        if name == "factory":
            (tmp_path / "net.py").write_text(FACTORY)
            return {"name": f"py:{tmp_path / 'net.py'}:make"}
        if name != "llama":
            return {"name": name, "weights": "random" if name.startswith("timm:") else "pretrained", "limit": 3}
        return {"name": f"transformers:{tmp_path}", "data": save_llama(tmp_path, layers=4)}

    return found


def file_of(network, path):
    normscope.save_capture(normscope.capture(network, verify=True, by_gamma=True, per_channel=True), path)
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weights"), [*itertools.product(ON_DISK, [None]), ("llama", "random"), ("llama", "model.safetensors")]
)
def test_the_capture_is_the_same_to_the_bit(room, named, tmp_path, name, weights):
    given = named(name)
    if weights is not None:
        given["weights"] = tmp_path / weights if weights.endswith("safetensors") else weights
    whole = normscope.load(device="cpu", **given)
    room(ON_DISK[name])
    apart = normscope.load(device_map="auto", **given)
    held = [tensor.is_meta for tensor in apart.module.parameters()]
    assert any(held) and not all(held)
    assert places(apart.module) == ["cpu", "disk"]
    assert file_of(whole, tmp_path / "whole.safetensors") == file_of(apart, tmp_path / "apart.safetensors")
    assert [tensor.is_meta for tensor in apart.module.parameters()] == held


def test_norms_outside_of_blocks_and_of_unknown_classes_have_their_weights(room, named, tmp_path):
    given = named("factory")
    whole = normscope.load(device="cpu", **given)
    room(30)
    apart = normscope.load(device_map="auto", **given)
    assert apart.module.odd.weight.is_meta
    assert blocks(apart.module) == ["Block"]
    found = find_norms(apart.module, next(iter(apart.inputs)))
    assert [site.kind for site in found.sites[-2:]] == ["OddNorm", "BatchNorm"]
    assert file_of(whole, tmp_path / "whole.safetensors") == file_of(apart, tmp_path / "apart.safetensors")


def test_every_output_names_the_places(room, capsys):
    room(700)
    for where, options in (("cpu and disk", {"device_map": "auto"}), ("cpu", {"device": "cpu"})):
        Output().introduce(normscope.load("demo_vit", **options))
        assert f" on {where} in torch.float32" in " ".join(capsys.readouterr().err.split())


def test_a_network_that_fits_stays_on_one_device(room):
    room(10_000)
    network = normscope.load("demo_vit", device_map="auto", dtype="bf16")
    assert places(network.module) == ["cpu"]
    assert {tensor.dtype for tensor in network.module.parameters()} == {torch.bfloat16}


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


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        Path(arguments[0], "begun.dat").write_bytes(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(accelerate.big_modeling, "offload_state_dict", full)
    with pytest.raises(ModelError, match=r"The disk has no room .* \(No space left on device\); TMPDIR"):
        spread_row()
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_a_block_is_refused(room):
    room(100)
    with pytest.raises(ModelError, match="Not even one block of this VisionTransformer fits into memory"):
        normscope.load("demo_vit", device_map="auto")


SWAPS = {"factory": ("dyt",), "demo_vit": ("free", "rmsnorm"), "demo_dit": ("dyt",), "llama": ("dyt",)}


@pytest.mark.parametrize(
    "name", [name if name == "factory" else pytest.param(name, marks=pytest.mark.slow) for name in SWAPS]
)
def test_swaps_their_drift_and_their_folders_are_the_same_to_the_bit(room, named, tmp_path, name):
    given = named(name)
    whole = normscope.load(device="cpu", **given)
    seen = normscope.capture(whole, by_gamma=True)
    room({"factory": 30, **ON_DISK}[name])
    apart = normscope.load(device_map="auto", **given)
    places_before = {key: value.device for key, value in apart.module.state_dict().items()}
    assert {device.type for device in places_before.values()} == {"cpu", "meta"}
    for func in SWAPS[name]:
        moved, saved = [], []
        for network in (whole, apart):
            modules = normscope.replacements(network, func, seen)
            report = normscope.drift(network, replacements=modules, one_at_a_time=False, cumulative=False)
            moved.append([(row.site, row.at, row.relative_l2) for row in report.rows])
            with normscope.swap(network, func, seen):
                folder = normscope.save_swapped(network.module, tmp_path / func, whole.about)
                saved.append([path.read_bytes() for path in sorted(folder.iterdir())])
        assert moved[0] == moved[1]
        assert saved[0] == saved[1]
        assert {key: value.device for key, value in apart.module.state_dict().items()} == places_before


@pytest.mark.slow
def test_the_commands_write_and_print_what_they_do_on_one_device(room, tmp_path):
    told = {}
    for where, spreading in (("cpu", "--device cpu"), ("disk", "--device-map auto")):
        if where == "disk":
            room(700)
        swapped = document(f"swap demo_vit --limit 4 --keep 2 -o {tmp_path / where} {spreading}")
        bench = "swap-bench demo_vit --limit 4 --layers 0,1,final --func dyt,rmsnorm"
        quick = "--quick" if where == "cpu" else ""
        measured = document(f"{bench} -o {tmp_path} {spreading} {quick}")
        told[where] = (swapped["sites"], swapped["keep"], swapped["quality"], measured["drift"])
        assert bool(measured["speed"]) == (where == "cpu")
    assert told["cpu"] == told["disk"]
    assert normscope.load_swapped(tmp_path / "disk") is not None
    tensors = [(tmp_path / where / "model.safetensors").read_bytes() for where in told]
    assert tensors[0] == tensors[1]


def test_what_changes_weights_takes_one_device(room, tmp_path):
    whole = normscope.load("demo_vit", device="cpu", limit=2)
    seen = normscope.capture(whole.module, whole.inputs, by_gamma=True, about=whole.about)
    room(700)
    apart = normscope.load("demo_vit", device_map="auto", limit=2)
    for action in (
        lambda: normscope.swap(apart, "dyt", seen, init="calibrated"),
        lambda: normscope.bench(apart, curves="dyt", quick=True),
        lambda: normscope.simplify(apart),
    ):
        with pytest.raises(ModelError, match="is not possible: accelerate spreads this VisionTransformer over devices"):
            action()
    normscope.swap(whole.module, "dyt", seen)
    normscope.save_swapped(whole.module, tmp_path / "new", whole.about, func="dyt", init="fit")
    with pytest.raises(UsageError, match="is a swap, which needs its network on one device: leave device_map out"):
        normscope.load("demo_vit", weights=tmp_path / "new", device_map="auto")


def test_what_cannot_be_spread(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ModelError, match=r"pip install 'accelerate>=1.2'\."):
        patch.setitem(sys.modules, "accelerate", None)
        normscope.load("demo_vit", device_map="auto")
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"Several processes cannot spread a network"):
        normscope.load("demo_vit", device_map="auto")


def test_nothing_is_computed_with_weights_that_are_nowhere():
    norm = nn.LayerNorm(4, device="meta")
    accelerate.hooks.add_hook_to_module(norm, accelerate.hooks.ModelHook())
    with pytest.raises(ModelError, match="no access to the weights of a LayerNorm"), at_hand(norm, (), {}):
        pass
