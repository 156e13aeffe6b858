"""Every norm of the libraries against its own forward: the table's rows, what is tried, and what is skipped."""

import importlib
import inspect
import logging
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from networks import network_of
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from normscope.errors import ModelError
from normscope.inputs.batch import as_batches
from normscope.norms import recognition
from normscope.norms.kinds import NormKind
from normscope.norms.known import NORMS
from normscope.norms.recognition import kind_of
from normscope.norms.trace import find_norms
from normscope.norms.verification import excess

WIDTH = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(2, 5, WIDTH), (2, WIDTH, 5, 3), (2, 5, 4, WIDTH), (2, WIDTH, 6), (2, WIDTH, 3, 4, 5), (7, WIDTH)]
WIDTHS = {
    *("hidden_size", "dim", "num_channels", "num_features", "channels", "normalized_shape", "normalization_shape"),
    *("embedding_dim", "in_channels", "c_in", "feat_size", "n", "width", "size"),
}
OTHERS = {"num_groups": 4, "group_size": WIDTH, "num_heads": 4, "eps": 1e-6, "channel_dim": 1}
CONFIG = SimpleNamespace(num_groups=4, hidden_act="silu", hidden_size=WIDTH, eps=1e-6, d_model=WIDTH, norm_eps=1e-5)
WHERE = {
    "torch": "nn/modules/*.py",
    "torchvision": "[omt]*/**/*.py",
    "torchaudio": "models/**/*.py",
    "timm": "*/**/*.py",
    "diffusers": "[mp]*/**/*.py",
    "transformers": "models/*/modeling_*.py",
}


def built(norm_type: type[nn.Module]) -> nn.Module:
    """Make a norm of 16 channels with weights, biases and running statistics as training leaves them."""
    values = {}
    for name, parameter in list(inspect.signature(norm_type.__init__).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return trained(norm_type(WIDTH))
        if name == "config":
            values[name] = CONFIG
        elif name in WIDTHS and not (name == "dim" and isinstance(parameter.default, int)):
            values[name] = WIDTH
        elif name in OTHERS and (parameter.default is parameter.empty or name == "num_groups"):
            values[name] = OTHERS[name]
    return trained(norm_type(**values))


def trained(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, values in [*module.named_parameters(), *module.named_buffers()]:
        if values.is_floating_point():
            around = 0 if "bias" in name else 1
            values.data = around + 0.3 * torch.randn(values.shape, generator=generator)
        if "running_var" in name:
            values.data = values.data.abs() + 0.1
    return module.eval()


def outlying(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Activations with a mean off zero, and a few that are far larger than the others."""
    x = 0.7 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x.view(-1)[::97] *= 30
    return x.to(dtype)


def accepted(module: nn.Module) -> list[tuple[int, ...]]:
    """Shapes that the module takes and gives back."""

    def takes(shape: tuple[int, ...]) -> bool:
        try:
            output = module(torch.randn(shape))
        except Exception:  # whatever foreign code raises on shapes that it is not made for
            return False
        return isinstance(output, torch.Tensor) and output.shape == shape

    return [shape for shape in SHAPES if takes(shape)]


@cache
def norm_classes() -> dict[str, type[nn.Module]]:
    """Every module class of the libraries with norm in its name; only files that define one are imported."""
    pytest.importorskip("torchaudio", exc_type=Exception)
    logging.disable(logging.WARNING)
    found = {}
    for library, pattern in WHERE.items():
        root = Path(importlib.import_module(library).__file__).parent
        for path in sorted(root.glob(pattern)):
            if re.search(r"^class \w*norm\w*\(", path.read_text(), re.IGNORECASE | re.MULTILINE):
                name = ".".join([library, *path.relative_to(root).with_suffix("").parts])
                for key, value in vars(importlib.import_module(name)).items():
                    own = isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == name
                    if own and re.search("norm", key, re.IGNORECASE):
                        found[f"{name}.{key}"] = value
    logging.disable(logging.NOTSET)
    return found


def class_named(full_name: str) -> type[nn.Module]:
    module, _, name = full_name.rpartition(".")
    return getattr(pytest.importorskip(module, exc_type=Exception), name)


REASONS = [name for name, row in NORMS.items() if isinstance(row, str)]
ROWS = [name for name in NORMS if name not in REASONS and not name.endswith(".PointwiseFunction")]


@pytest.mark.filterwarnings("ignore:input's size at dim")
@pytest.mark.parametrize("name", ROWS)
def test_a_row_reproduces_the_output_of_its_class(name):
    module = built(class_named(name))
    shapes = accepted(module)
    assert shapes, "no shape that it takes"
    for shape in shapes:
        for dtype in DTYPES:
            module.to(dtype)
            x = outlying(shape, dtype)
            features = getattr(module, "num_features", None)
            kind = kind_of(module)
            if features is None or kind.groups is None or kind.channels(module, x) == features:
                assert excess(kind, module, x, module(x)) <= 1, (shape, dtype)


@pytest.mark.parametrize("name", ["torch.nn.modules.normalization.GroupNorm", *ROWS[:2], *ROWS[9:28:3]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_row_is_seen_in_every_dtype(name, dtype):
    module = built(class_named(name)).to(dtype)
    shape = accepted(module.float())[0]
    module.to(dtype)
    x = outlying(shape, dtype)
    kind = kind_of(module)
    wrong = {"weight for 1 + weight": lambda module, y: kind.affine(module, y) + y, "no bias or weight": lambda m, y: y}
    for affine in wrong.values():
        assert excess(replace(kind, affine=affine), module, x, module(x)) > 1


def test_a_missing_activation_and_a_wrong_axis_are_seen():
    for dtype in DTYPES:
        for name, row in NORMS.items():
            kind = row if not callable(row) and not isinstance(row, str) else None
            if kind is not None and kind.activation is not None and ".layers." in name:
                module = built(class_named(name))
                shape = accepted(module)[0]
                x = outlying(shape, dtype)
                module.to(dtype)
                assert excess(replace(kind, activation=None), module, x, module(x)) > 1, name
        square = outlying((2, WIDTH, WIDTH, WIDTH), dtype)
        for name in ("LayerNorm2d", "RmsNorm2d", "SimpleNorm2d"):
            module = built(class_named(f"timm.layers.norm.{name}")).to(dtype)
            kind = replace(kind_of(module), axes=lambda module, ndim: (-1,))
            assert excess(kind, module, square, module(square)) > 1, name


def test_refusals_say_why():
    for name in REASONS:
        norm_type = class_named(name)
        assert recognition.refusal(norm_type.__new__(norm_type)) == NORMS[name]
        assert len(NORMS[name]) > 30
    without = nn.BatchNorm2d(4, track_running_stats=False)
    assert "whole batch" in recognition.refusal(without)


# What no form reproduces, of classes that can be made of a width alone and called with one tensor.
SKIPPED = {
    "MuseSparkTextInputScaledRMSNorm",  # it weighs its input
    "MiniMaxH3VideoGroupNorm",  # frame by frame
    "VoxtralRealtimeTextAdaRmsNorm",  # a scale for a norm, out of two linear layers
    "GlobalResponseNorm",  # of Wuerstchen's pipeline
}
NOT_CALLED_ALONE = re.compile(
    "_NormBase|_BatchNorm|_InstanceNorm"  # bases
    "|SoftNormBottleneck|StableUnCLIPImageNormalizer"  # methods, but no forward
    "|HYV4UnweightedRMSNorm|StableLmLayerNormPerHead"  # one number for a token; a norm a head
    r"|\w+RMSNormGated"
)
NO_NORM = re.compile(r"\w*AdaLayerNormSingle|RobertaPreLayerNormPooler")
NOT_MADE = {  # of more than a width and parts that are told by their names
    *("ChameleonLayerNorm", "Gemma3nAudioCumulativeGroupNorm"),  # weights a head; statistics of all frames so far
    *("Emu3VQVAEGroupNorm", "ZayaQKNorm"),  # two tensors in; and two out
    *("NormFreeBlock", "NormalCell", "ZoeDepthAttractorLayerUnnormed"),  # no norms
    *("Sapiens2ForNormalEstimation", "Tipsv2DptForNormalEstimation"),  # of surface normals
    "RobertaPreLayerNormPreTrainedModel",
}


def outcome(norm_type: type[nn.Module]) -> str:
    """Say what becomes of a class that is in no row with a reason."""
    if issubclass(norm_type, LazyModuleMixin):
        return "becomes another class"
    if any(isinstance(NORMS.get(f"{each.__module__}.{each.__qualname__}"), str) for each in norm_type.__mro__):
        return "row"
    try:
        module = built(norm_type)
    except (AttributeError, TypeError, ValueError):
        parts = re.search(r"\w*[nN]orm\w*\(|nn\.(Linear|Conv)|norm_layer|NORMS", inspect.getsource(norm_type.__init__))
        return "made of parts" if parts and norm_type.__name__ not in NOT_MADE else "not made"
    if not recognition.is_norm(module):
        return "made of parts" if any(map(recognition.is_norm, module.modules())) else "no norm"
    shapes = accepted(module)
    for shape in shapes:
        kinds = [kind_by_call(module, shape, dtype) for dtype in DTYPES]
        if all(kinds):
            return "site"
    return "skipped" if shapes else "not called alone"


def kind_by_call(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> NormKind | None:
    x, model = outlying(shape, dtype), nn.Sequential(module, nn.LayerNorm(shape[-1])).to(dtype)
    try:
        kind = find_norms(model, next(as_batches([x]))).kinds.get("0")
    except ModelError:  # EsmFold2LayerNorm takes half precision on a GPU only
        return kind_by_call(module.float(), shape, torch.float32)
    assert kind is None or excess(kind, module, x, module(x)) <= 1, (type(module), shape, dtype)
    return kind


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_norm_of_the_libraries_is_accounted_for():
    outcomes = {name: outcome(norm_type) for name, norm_type in norm_classes().items()}

    def of(which: str) -> set[str]:
        return {name.rpartition(".")[2] for name, found in outcomes.items() if found == which}

    assert of("skipped") == SKIPPED
    assert {name for name in of("not called alone") if not NOT_CALLED_ALONE.fullmatch(name)} == set()
    assert {name for name in of("no norm") if not NO_NORM.fullmatch(name)} == set()
    assert of("not made") == NOT_MADE
    assert sum(found == "site" for found in outcomes.values()) > 320


@pytest.mark.parametrize(
    "name", ["mamba2.modeling_mamba2.MambaRMSNormGated", "qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated"]
)
def test_a_gated_norm_is_skipped_for_its_second_tensor(name):
    norms = {"norm": built(class_named(f"transformers.models.{name}")), "last": nn.LayerNorm(WIDTH)}
    gated = network_of(lambda self, x: self.last(self.norm(x, gate=x.flip(-1))), **norms)
    report = find_norms(gated, next(as_batches([torch.randn(2, 5, WIDTH)])))
    assert [(norm.name, "second tensor" in norm.reason) for norm in report.skipped] == [("norm", True)]
