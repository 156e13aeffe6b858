import re

import pytest
import torch

from normscope.errors import DeviceError, UsageError
from normscope.models.weights.devices import resolve_device, resolve_dtype


def started_by_torchrun(monkeypatch, local_rank):
    given = {"TORCHELASTIC_RUN_ID": "none", "RANK": 4 + local_rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


def test_names_of_devices_and_dtypes():
    dtypes = {"float16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {name: resolve_dtype(name) for name in dtypes} == dtypes and resolve_dtype("keep") is None
    assert resolve_device("cpu") == torch.device("cpu")


DEVICES = "A device is auto, cpu, cuda, cuda:N or mps"
REFUSED = [
    *((resolve_device, name, DEVICES) for name in ("gpu", "cuda:", "cuda:x", "cpu:0", "CUDA", "", "cuda:-1")),
    (resolve_dtype, "half", "There is no dtype 'half'"),
    (resolve_dtype, "double", "There are: float32"),
    (resolve_dtype, "kept", "Did you mean 'keep'"),
    (resolve_dtype, "flaot32", "Did you mean 'float32'"),
]


@pytest.mark.parametrize(("resolve", "name", "sentence"), REFUSED)
def test_refusals(resolve, name, sentence):
    with pytest.raises(UsageError, match=sentence):
        resolve(name)


@pytest.mark.parametrize("spec", ["cuda:999", "mps"])
def test_a_missing_device_is_refused_with_torchs_reason(spec):
    with pytest.raises((AssertionError, RuntimeError)) as reason:
        torch.empty(0, device=spec)
    sentence = re.escape(re.split(r"\. |\.?\n", str(reason.value))[0])
    with pytest.raises(
        DeviceError, match=f"The device '{spec}' is not available: {sentence}. Take --device auto or cpu"
    ):
        resolve_device(spec)


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
def test_several_processes_take_a_gpu_each(monkeypatch):
    started_by_torchrun(monkeypatch, 1)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"The device 'cuda:1' is not available: .* one process per GPU"):
        resolve_device("cuda")
    with pytest.raises(UsageError, match=r"cannot share cuda:1: --device cuda gives each a GPU of its own\."):
        resolve_device("cuda:1")
    started_by_torchrun(monkeypatch, 0)
    with pytest.raises(DeviceError, match="The device 'cuda:1' is not available"):
        resolve_device("cuda:1")
