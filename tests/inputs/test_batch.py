import pytest
import torch
from networks import numbered_samples

from normscope.errors import DataError
from normscope.inputs.batch import Batch, as_batches


def test_first_sample_divides_only_tensors_of_samples():
    samples = numbered_samples(3)
    batch = Batch((torch.arange(6).view(3, 2), 7), {"table": torch.zeros(5), "y": torch.arange(3)}, samples)
    first = batch.first_sample()
    assert first.args[0].tolist() == [[0, 1]]
    assert first.args[1] == 7
    assert (first.kwargs["table"].shape, first.kwargs["y"].tolist()) == ((5,), [0])
    assert first.samples == samples[:1]


def test_an_axis_of_one_serves_every_sample():
    (batch,) = as_batches([{"position_ids": torch.arange(5)[None], "x": torch.zeros(8, 5, 16)}])
    assert len(batch.samples) == 8


def test_entries_without_a_number_of_samples_are_refused():
    with pytest.raises(DataError, match="have 4 and 8 entries along axis 0"):
        list(as_batches([(torch.zeros(4, 2), torch.zeros(8, 2))]))
    with pytest.raises(DataError, match="has no tensor whose axis 0 counts samples"):
        list(as_batches([(2, "text")]))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
def test_arrays_of_numpy_are_refused_with_their_conversion(wrap):
    with pytest.raises(DataError, match=r"Pass its arrays as tensors: torch\.from_numpy\(x\)\.$"):
        list(as_batches([wrap(torch.zeros(4, 2).numpy())]))


def test_first_divides_nested_arguments():
    (batch,) = as_batches([{"x": torch.arange(4), "more": {"y": torch.arange(4), "size": (2, 2)}}])
    first = batch.first(3)
    assert first.kwargs["more"]["y"].tolist() == first.kwargs["x"].tolist() == [0, 1, 2]
    assert first.kwargs["more"]["size"] == (2, 2)
    assert len(batch.first(9).samples) == 4


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_in_every_kind_of_batch(layout):
    parts = [torch.ones(3, 4), torch.ones(2, 4)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    samples = numbered_samples(2)
    for entry in (x, (x,), {"x": x}, Batch((x,), samples=samples), Batch(kwargs={"more": {"x": x}}, samples=samples)):
        with pytest.raises(DataError, match=r"padded = x\.to_padded_tensor\(0\.0\).*args=\(padded,\), samples=samples"):
            list(as_batches([entry]))
    padded = x.to_padded_tensor(0.0)
    (batch,) = as_batches([Batch(args=(padded,), samples=samples, valid=padded[..., 0] != 0)])
    assert batch.valid.sum(1).tolist() == [3, 2]
