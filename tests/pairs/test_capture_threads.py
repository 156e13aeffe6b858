"""Captures of networks that several threads run: each pass counts once, and only those of the capture do."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from networks import network_of
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.inputs.batch import as_batches
from normscope.pairs.norms.trace import find_norms

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class Meeting(nn.Module):
    """An identity, at which a pass of the thread that made it waits until ``meanwhile`` has run in another thread."""

    def __init__(self, meanwhile):
        super().__init__()
        self.meanwhile, self.owner, self.errors = meanwhile, threading.current_thread(), []
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._serve, daemon=True).start()  # older than any pass

    def __deepcopy__(self, memo):
        return nn.Identity()

    def _serve(self):
        while self._asked.acquire(timeout=20):
            try:
                self.meanwhile()
            except BaseException as error:  # pytest.fail among them
                self.errors.append(error)
            self._answered.release()

    def forward(self, x):
        if threading.current_thread() is self.owner:
            self._asked.release()
            assert self._answered.acquire(timeout=20)
        return x


class MeetingNorm(nn.LayerNorm):
    """A LayerNorm within whose call another thread runs."""

    def __init__(self, width, meanwhile):
        super().__init__(width)
        self.meeting = Meeting(meanwhile)

    def forward(self, x):
        return self.meeting(super().forward(x))


class Parallel(nn.Module):
    """nn.DataParallel on the CPU, which torch has for accelerators alone: replicas, one thread each, gathered."""

    def __init__(self, module, replicas):
        super().__init__()
        self.module, self.replicas = module, replicas

    def forward(self, x):
        if len(x) == 1:
            return self.module(x)
        outputs = {}

        def work(number, replica, part):
            with torch.no_grad():
                outputs[number] = replica(part)

        parts = enumerate(x.chunk(self.replicas))
        threads = [threading.Thread(target=work, args=(i, replicated(self.module), part)) for i, part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([outputs[i] for i in range(len(threads))])


def replicated(module):
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, replicated(child))
    for name, parameter in module.named_parameters(recurse=False):
        setattr(replica, name, parameter.detach())
    return replica


def in_a_new_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("around", [lambda run: run(), in_a_new_thread], ids=["old thread", "new thread"])
@pytest.mark.parametrize("within", [False, True], ids=["before the norm", "within the norm"])
def test_passes_of_other_threads_are_not_counted(around, within):
    ran = []

    def meanwhile():
        around(lambda: ran.append(model(X)))

    norm = MeetingNorm(8, meanwhile) if within else nn.LayerNorm(8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity() if within else Meeting(meanwhile), norm)
    seen = normscope.capture(model, [X, X])
    assert len(ran) == 3  # once while norms were found, once a batch
    assert seen.stats["2"].n_pairs == 2 * X.numel()
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_threads_that_a_pass_starts_are_counted():
    block, start = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), threading.Thread.start
    alone, parallel = (normscope.capture(model, [X]) for model in (block, Parallel(copy.deepcopy(block), 3)))
    stats, expected = parallel.stats["module.1"], alone.stats["1"]
    assert stats.n_pairs == expected.n_pairs == X.numel()
    assert threading.Thread.start is start
    torch.testing.assert_close(stats.moments.sum(0), expected.moments.sum(0), rtol=1e-12, atol=1e-12)


def test_calls_of_norm_functions_in_threads_are_counted_likewise():
    block = nn.Sequential(nn.Linear(8, 8), network_of(lambda self, x: F.rms_norm(x, (8,))))
    parallel = normscope.capture(Parallel(copy.deepcopy(block), 3), [X], verify=True)
    assert {name: stats.n_pairs for name, stats in parallel.stats.items()} == {"module.1:rms_norm.0": X.numel()}
    ran = []
    model = nn.Sequential(block, Meeting(lambda: ran.append(model(X))), nn.Linear(8, 8))
    seen = normscope.capture(model, [X, X])
    assert len(ran) == 3
    assert seen.stats["0.1:rms_norm.0"].n_pairs == 2 * X.numel()


def test_a_thread_that_outlives_a_pass_is_no_longer_watched():
    block = network_of(lambda self, x: F.rms_norm(x, (8,)))
    with ThreadPoolExecutor(1) as pool:
        model = network_of(lambda self, x: block(x) + pool.submit(self.block, x).result(), block=block)
        assert [site.calls for site in find_norms(model, next(as_batches([X]))).sites] == [2]
        assert pool.submit(torch._C._len_torch_function_stack).result() == 0


def test_a_second_capture_of_the_same_network_is_refused():
    """Of the whole, of a part and of what holds it; a copy may be captured, and the first capture goes on."""
    copied = []

    def meanwhile():
        copied.append(normscope.capture(copy.deepcopy(model), [X]).stats["2"].n_pairs)
        for again in (model, model[2], nn.Sequential(model)):
            with pytest.raises(UsageError, match=r"Another thread is capturing this \w+, or a part of it"):
                normscope.capture(again, [X])

    model = nn.Sequential(nn.Linear(8, 8), Meeting(meanwhile), nn.LayerNorm(8))
    seen = normscope.capture(model, [X])
    assert not model[1].errors
    assert copied == [X.numel()] * 2
    assert seen.stats["2"].n_pairs == X.numel()
    assert all(module.training for module in model.modules())
    model[1] = nn.Identity()
    in_a_new_thread(lambda: copied.append(normscope.capture(model, [X])))  # it is free again
    assert len(copied) == 3
