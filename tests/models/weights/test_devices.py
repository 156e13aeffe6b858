import pytest
import torch

from normscope.errors import DeviceError, UsageError
from normscope.models.weights.devices import resolve_device, resolve_dtype


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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
    with pytest.raises(DeviceError, match=r"There are: cuda:0, cuda:1, cpu\."):
        resolve_device("cuda:2")


@pytest.mark.parametrize("processes", [1, 8])
def test_devices_of_a_machine_without_gpus(no_gpu, monkeypatch, processes):
    if processes > 1:
        started_by_torchrun(monkeypatch, 1)
    assert resolve_device("auto") == torch.device("cpu")
    for spec in ("cuda", "cuda:0", "mps"):
        with pytest.raises(DeviceError, match=f"There is no device '{spec}' on this machine. There are: cpu."):
            resolve_device(spec)
    for malformed in ("gpu", "cuda:", "cuda:x", "cpu:0", "CUDA", "", "cuda:-1"):
        with pytest.raises(UsageError, match="A device is auto, cpu, cuda, cuda:N or mps"):
            resolve_device(malformed)


def started_by_torchrun(monkeypatch, local_rank):
    given = {"TORCHELASTIC_RUN_ID": "none", "RANK": 4 + local_rank, "WORLD_SIZE": 8, "LOCAL_RANK": local_rank}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("spec", ["auto", "cuda"])
@pytest.mark.parametrize("local_rank", [0, 1])
def test_each_of_several_processes_has_a_gpu_of_its_own(two_gpus, monkeypatch, spec, local_rank):
    started_by_torchrun(monkeypatch, local_rank)
    assert resolve_device(spec) == torch.device(f"cuda:{local_rank}")
    assert resolve_device("cpu") == torch.device("cpu")


def test_several_processes_do_not_share_a_gpu(two_gpus, monkeypatch):
    started_by_torchrun(monkeypatch, 2)
    for spec in ("auto", "cuda"):
        with pytest.raises(DeviceError, match=r"There are 2 GPUs on this machine and none for its process number 3: s"):
            resolve_device(spec)
    assert resolve_device("cpu") == torch.device("cpu")
    started_by_torchrun(monkeypatch, 0)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    started_by_torchrun(monkeypatch, 1)
    with pytest.raises(UsageError, match=r"cannot share cuda:1: --device cuda gives each a GPU of its own\."):
        resolve_device("cuda:1")
    with pytest.raises(DeviceError, match="There is no device 'cuda:2' on this machine"):
        resolve_device("cuda:2")


def test_dtypes():
    dtypes = {"float16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {name: resolve_dtype(name) for name in dtypes} == dtypes and resolve_dtype("keep") is None
    sentences = {"half": "There is no dtype 'half'", "double": "There are: float32", "kept": "Did you mean 'keep'"}
    for name, sentence in (sentences | {"flaot32": "Did you mean 'float32'"}).items():
        with pytest.raises(UsageError, match=sentence):
            resolve_dtype(name)


def test_the_reason_is_torchs_own(no_gpu, monkeypatch):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", init)
    for spec in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match=r"There are: cpu\. torch reports: The NVIDIA driver .* is too old"):
            resolve_device(spec)
