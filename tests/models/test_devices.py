import pytest
import torch

from normscope.errors import DeviceError, UsageError
from normscope.models.devices import resolve_device, resolve_dtype


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("spec", "device"), [("auto", "cuda:0"), ("cuda", "cuda"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_devices_of_a_machine_with_gpus(two_gpus, spec, device):
    assert resolve_device(spec) == torch.device(device)


def test_auto_without_gpu_is_the_cpu(no_gpu):
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("spec", ["cuda", "cuda:0", "mps"])
def test_missing_device_is_named_with_those_present(no_gpu, spec):
    with pytest.raises(DeviceError, match=f"There is no device '{spec}' on this machine. There are: cpu."):
        resolve_device(spec)


def test_index_beyond_the_last_gpu(two_gpus):
    with pytest.raises(DeviceError, match=r"There are: cuda:0, cuda:1, cpu\."):
        resolve_device("cuda:2")


@pytest.mark.parametrize("spec", ["gpu", "cuda:", "cuda:x", "cpu:0", "CUDA", "", "cuda:-1"])
def test_malformed_device(spec):
    with pytest.raises(UsageError, match="A device is auto, cpu, cuda, cuda:N or mps"):
        resolve_device(spec)


def test_dtypes():
    assert resolve_dtype("float16") is torch.float16
    with pytest.raises(UsageError, match="Did you mean 'float32'"):
        resolve_dtype("flaot32")
    with pytest.raises(UsageError, match="There are: float32, bfloat16, float16"):
        resolve_dtype("double")
