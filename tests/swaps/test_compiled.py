"""Swaps in networks that torch compiles or fuses, against copies that it does not; and bench, which times the first."""

import pytest
import torch
from networks import residual
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.swaps.drift.drift import drift
from normscope.swaps.pointwise import DyT
from normscope.swaps.replace import Swap


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(residual(nn.LayerNorm(8), 8), residual(nn.LayerNorm(8), 8), nn.LayerNorm(8))


class Compiler:
    """A backend of torch.compile that counts the graphs that run, and takes no time."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


def whole(model, compiler):
    return torch.compile(model, backend=compiler), {}


def whole_in_place(model, compiler):
    model.compile(backend=compiler)
    return model, {}


def block_in_place(model, compiler):
    model[0].compile(backend=compiler)
    return model, {}


def block(model, compiler):
    model[0] = torch.compile(model[0], backend=compiler)
    return model, {"0.norm": "0._orig_mod.norm"}


def norm(model, compiler):
    model[0].norm = torch.compile(model[0].norm, backend=compiler)
    return model, {"0.norm": "0.norm._orig_mod"}


ways = pytest.mark.parametrize(
    "compiled", [whole, whole_in_place, block_in_place, block, norm], ids=lambda way: way.__name__
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def x():
    return torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))


def dyts(paths):
    return {paths.get(path, path): DyT(8, alpha=0.3) for path in ("0.norm", "1.norm", "2")}


@ways
def test_swaps_recompile_and_drift_of_compiled_parts_is_that_of_an_uncompiled_copy(x, compiled):
    plain, compiler = network().eval(), Compiler()
    model, paths = compiled(network().eval(), compiler)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
            with Swap(model, dyts(paths)), Swap(plain, dyts({})):
                before, swapped = compiler.runs, plain(x)
                assert torch.equal(model(x), swapped) and compiler.runs > before
            assert not torch.equal(model(x), swapped)
    before = compiler.runs
    report = drift(model, [x[:3], x[3:]], dyts(paths))
    known = drift(plain, [x[:3], x[3:]], dyts({}))
    assert compiler.runs == before
    assert [row.relative_l2 for row in report.rows] == [row.relative_l2 for row in known.rows]
    assert [row.site for row in report.rows] == [paths.get(row.site, row.site) for row in known.rows]
    assert report.all.relative_l2.min > 0


def test_drift_of_a_padded_encoder_is_that_of_one_without_nested_tensors():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    fused, plain = (nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested) for nested in (True, False))
    plain.load_state_dict(fused.state_dict())
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    samples = tuple(Sample(f"text {i}", i, i) for i in range(3))
    batch = Batch((torch.randn(3, 5, 8),), {"src_key_padding_mask": padding}, samples, valid=~padding)
    swapped = {"layers.0.norm1": DyT(8), "layers.0.norm2": DyT(8)}
    report, known = (drift(model, [batch], swapped) for model in (fused, plain))
    assert report.rows == known.rows and report.all.relative_l2.min > 0


def test_healing_runs_compiled_parts_uncompiled(x):
    x = torch.randn(40, 5, 8, generator=torch.Generator().manual_seed(2))
    healed = []
    for compiled in (False, True):
        original, swapped, compiler = network(), network(), Compiler()
        normscope.swap(swapped, "dyt", normscope.capture(original, [x]), init="paper")
        if compiled:
            original.compile(backend=compiler)
            swapped[0].compile(backend=compiler)
        report = normscope.heal(original, swapped, [x[:32]], [x[32:]], steps=8)
        assert compiler.runs == 0
        healed.append((report.drifts, [value.tolist() for value in swapped.state_dict().values()]))
    assert healed[0] == healed[1]
