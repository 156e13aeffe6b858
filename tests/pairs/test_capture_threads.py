"""Captures of networks that run in several threads: each pass counts once."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from networks import network_of
from torch import nn

import normscope
from normscope.inputs.batch import as_batches
from normscope.norms.trace import find_norms

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


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


def test_a_thread_that_outlives_a_pass_is_no_longer_watched():
    block = network_of(lambda self, x: F.rms_norm(x, (8,)))
    with ThreadPoolExecutor(1) as pool:
        model = network_of(lambda self, x: block(x) + pool.submit(self.block, x).result(), block=block)
        assert [site.calls for site in find_norms(model, next(as_batches([X]))).sites] == [2]
        assert pool.submit(torch._C._len_torch_function_stack).result() == 0


def test_a_second_capture_of_a_network_waits_for_the_first():
    model, began, order = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), threading.Event(), []

    def batches():
        yield X
        began.set()
        time.sleep(0.2)
        order.append("first")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(normscope.capture, model, batches())
        assert began.wait(20)
        second = normscope.capture(model, [X])
        order.append("second")
    assert order == ["first", "second"]
    assert first.result().stats["1"].n_pairs == second.stats["1"].n_pairs == X.numel()
    assert model.training
