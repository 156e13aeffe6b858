"""Calls and networks that are unusual, and work; or are refused with what to do, in the terms of Python."""

import pytest
import torch
from networks import network_of
from torch import nn

import normscope
from normscope.errors import ModelError, NormscopeError

WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


@pytest.fixture(scope="module")
def seen(model):
    return normscope.capture(model, [X])


def test_load_takes_torchs_own_dtype_and_device():
    network = normscope.load("demo_vit", limit=2, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert {(weight.dtype, weight.device.type) for weight in network.module.parameters()} == {(torch.bfloat16, "cpu")}


def test_fit_takes_the_path_of_a_capture(seen, tmp_path):
    path = tmp_path / "seen.safetensors"
    normscope.save_capture(seen, path)
    assert normscope.fit(path, "tanh") == normscope.fit(str(path), "tanh") == normscope.fit(seen, "tanh")


REFUSED = {
    "a function as curve": (lambda model, seen: normscope.fit(seen, torch.tanh), "tanh.* is no curve.*mine=x/"),
    "one among curves": (lambda model, seen: normscope.fit(seen, ["isru", torch.tanh]), "tanh.* is no curve"),
    "a function to swap in": (lambda model, seen: normscope.swap(model, torch.tanh, seen), "tanh.* is no curve"),
    "no model": (lambda model, seen: normscope.capture(None), r"model is None\. Pass a torch\.nn\.Module"),
    "no model with batches": (lambda model, seen: normscope.capture(None, [X]), "model is None"),
    "a name for a model": (lambda model, seen: normscope.capture("demo_vit"), "model is 'demo_vit'.*normscope.load"),
    "no model to swap in": (lambda model, seen: normscope.swap(None, "dyt", seen), "model is None"),
    **{
        f"a capture of a narrower {type(norm).__name__}": (
            lambda model, seen, norm=norm: normscope.swap(nn.Sequential(nn.Identity(), norm), "dyt", seen),
            f"has 12 channels, but {WIDTH} in the capture",
        )
        for norm in (nn.LayerNorm(12), nn.LayerNorm(12, elementwise_affine=False), nn.BatchNorm1d(12))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_arguments(model, seen, case):
    call, said = REFUSED[case]
    with pytest.raises(NormscopeError, match=said) as raised:
        call(model, seen)
    assert "--" not in str(raised.value)


def test_a_batch_norm_without_running_statistics_is_skipped_and_others_are_captured():
    bare = nn.BatchNorm1d(WIDTH, track_running_stats=False)
    seen = normscope.capture(nn.Sequential(nn.Linear(WIDTH, WIDTH), bare, nn.LayerNorm(WIDTH)), [X])
    assert [(norm.name, "over the whole batch" in norm.reason) for norm in seen.skipped] == [("1", True)]
    assert seen.stats["2"].n_pairs == X.numel()


def test_norms_within_vmap_are_skipped_and_others_are_captured():
    norms = {"within": nn.LayerNorm(WIDTH), "after": nn.LayerNorm(WIDTH)}
    seen = normscope.capture(network_of(lambda self, x: self.after(torch.vmap(self.within)(x)), **norms), [X])
    assert [(norm.name, "torch.vmap" in norm.reason) for norm in seen.skipped] == [("within", True)]
    assert seen.stats["after"].n_pairs == X.numel()


@pytest.mark.parametrize("sizes", [(5, 5), (5, 6)], ids=["of one size", "of two sizes"])
def test_forward_gets_whole_lists_of_pictures(sizes):
    pictures = [torch.randn(3, 4, size) for size in sizes]
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 1), nn.GroupNorm(2, WIDTH))
    forward = lambda model, batch: [model(picture[None]) for picture in batch]  # noqa: E731
    seen = normscope.capture(model, [pictures, pictures], forward=forward)
    assert seen.stats["1"].n_pairs == 2 * WIDTH * 4 * sum(sizes)
    assert seen.n_samples == 2  # a list is one


def test_a_norm_that_takes_its_input_by_name_alone_is_replaced():
    def normalized(self, *, hidden):
        return nn.functional.layer_norm(hidden, self.weight.shape, self.weight, None, 1e-5)

    norm = network_of(normalized, "KeywordNorm", weight=nn.Parameter(torch.ones(WIDTH)))
    model = network_of(lambda self, x: self.norm(hidden=x), norm=norm)
    with normscope.swap(model, "dyt", normscope.capture(model, [X]), init="paper"):
        torch.testing.assert_close(model(X), (0.5 * X).tanh())


def test_torchscript_without_a_norm_may_be_part_of_a_network():
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(WIDTH))
    model = nn.Sequential(torch.jit.script(plain), nn.LayerNorm(WIDTH))
    seen = normscope.capture(model, [X])
    expected = normscope.capture(nn.Sequential(plain, model[1]), [X])
    assert torch.equal(seen.stats["1"].moments, expected.stats["1"].moments)
    with normscope.swap(model, "dyt", seen, init="paper"):
        assert model(X).shape == X.shape


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, WIDTH), nn.RMSNorm(WIDTH)])
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model.eval(), X)])
def test_torchscript_with_a_norm_is_refused(norm, make):
    model = nn.Sequential(make(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)), nn.LayerNorm(WIDTH))
    with pytest.raises(ModelError, match="TorchScript"):
        normscope.capture(model, [X])


def test_norms_called_as_operators_are_reported():
    def forward(self, x):
        x = torch.ops.aten.layer_norm(x, [WIDTH])
        x = torch.ops.aten.rms_norm.default(x, [WIDTH])
        x = torch.ops.aten.native_group_norm(x, None, None, len(x), WIDTH, 1, 2, 1e-5)[0]
        return self.norm(x / torch.ops.aten.linalg_vector_norm(x))

    seen = normscope.capture(network_of(forward, norm=nn.LayerNorm(WIDTH)), [X])
    assert [norm.kind for norm in seen.skipped] == ["layer_norm", "rms_norm", "native_group_norm"]


@pytest.mark.parametrize("name", ["transformers:~/nowhere", "diffusers:./nowhere"])
def test_a_missing_folder_is_no_repository(name):
    with pytest.raises(ModelError, match=r"There is no folder '[.~]/nowhere'"):
        normscope.load(name)
