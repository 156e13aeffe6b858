import pytest
import timm
import torch

from normscope.errors import ModelError
from normscope.models.registry import load


def parameters(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_random_weights_are_those_of_timm_under_the_seed():
    torch.manual_seed(5)
    expected = timm.create_model("test_vit")
    loaded = load("timm:test_vit", weights="random", seed=5, device="cpu", limit=1)
    other = load("timm:test_vit", weights="random", seed=6, device="cpu", limit=1)
    assert torch.equal(parameters(loaded.module), parameters(expected))
    assert not torch.equal(parameters(other.module), parameters(expected))


@pytest.mark.parametrize("name", ["demo_vit", "timm:test_vit"])
def test_random_state_is_left_as_found(name):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    list(load(name, weights="random", seed=3, device="cpu", limit=2).inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_architecture_without_pretrained_weights():
    with pytest.raises(ModelError, match=r"timm has no pretrained weights for timm:test_maxvit\."):
        load("timm:test_maxvit", device="cpu")


def test_weights_that_are_on_no_hub():
    with pytest.raises(ModelError, match=r"not on a model hub but at https://github.com/.*--weights FILE"):
        load("timm:gcvit_xxtiny", device="cpu")


def test_vit_b16_at_full_size():
    model = load("vit_b16", weights="random", device="cpu", limit=2)
    with torch.no_grad():
        logits = model.module(next(iter(model.inputs)).args[0])
    assert logits.shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.module.parameters()) == 86_567_656
