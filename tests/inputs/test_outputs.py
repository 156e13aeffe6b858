from collections import OrderedDict

import pytest
import torch

from normscope.errors import ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Outputs, first_tensor, without_variances

FLOATS, WHOLE = torch.randn(2, 3), torch.tensor([3, 3])


@pytest.mark.parametrize(
    "returned",
    [FLOATS, (FLOATS, WHOLE), [WHOLE, FLOATS], OrderedDict(lengths=WHOLE, logits=FLOATS), (None, FLOATS, FLOATS + 1)],
)
def test_first_tensor(returned):
    assert first_tensor(returned, Batch()) is FLOATS
    assert Outputs().read(returned, Batch()) is FLOATS


@pytest.mark.parametrize(("returned", "kind"), [(WHOLE, "Tensor"), ((), "tuple"), ("text", "str"), (None, "NoneType")])
def test_nothing_to_compare(returned, kind):
    with pytest.raises(ModelError, match=rf"returned a {kind} that holds no floating-point tensor to compare\."):
        first_tensor(returned, Batch())


@pytest.mark.parametrize("shape", [(4, 2, 2), (6,), (3, 4, 2, 2)])
def test_variances_are_left_out_where_there_are_some(shape):
    latents = torch.randn(2, *shape)
    batch = Batch(kwargs={"hidden_states": latents})
    doubled = torch.cat([latents, torch.randn_like(latents)], dim=1)
    assert torch.equal(without_variances((doubled,), batch), latents)
    assert torch.equal(without_variances({"sample": latents}, batch), latents)
