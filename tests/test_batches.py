import torch

from normscope.batches import Batch, Sample, as_batches


def test_only_tensors_of_samples_are_narrowed():
    samples = tuple(Sample(f"s{i}", i, i) for i in range(3))
    batch = Batch((torch.arange(6).view(3, 2), 7), {"table": torch.zeros(5), "y": torch.arange(3)}, samples)
    first = batch.first_sample()
    assert first.args[0].tolist() == [[0, 1]]
    assert first.args[1] == 7
    assert (first.kwargs["table"].shape, first.kwargs["y"].tolist()) == ((5,), [0])
    assert first.samples == samples[:1]


def test_only_floating_tensors_change_their_dtype():
    batch = next(as_batches([(torch.zeros(2), torch.arange(2))])).to(torch.device("cpu"), torch.bfloat16)
    assert [tensor.dtype for tensor in batch.args] == [torch.bfloat16, torch.int64]
