"""Large tensors, streams and CUDA graphs: on a GPU alone, at most 26 GB at once. A rehearsal runs tiny tensors."""

import os

import pytest
import torch
from truth import BY_NUMPY, DEVICE, GPU, by_kernels, check_in_pieces, numbers, parameters

REHEARSED = os.environ.get("NORMSCOPE_KERNEL_TESTS") == "cpu"
pytestmark = pytest.mark.skipif(not GPU and not REHEARSED, reason="for a GPU alone: too much for the interpreter")
on_a_gpu = pytest.mark.skipif(not GPU, reason="for a GPU alone")
ALL = "alpha shift weight bias"
HALF = torch.bfloat16
SHAPES = ((25216, 768), (32768, 4096), (131072, 1152)) if GPU else ((24, 16),)
MANY = 70_000 if GPU else 30  # more than the 65,535 programs that a grid has on its second and third axis
FULL = 2**31 if GPU else 2**12
ADDITIONS = 512  # of a term: in its register and across a tile


@pytest.mark.parametrize("curve", BY_NUMPY)
@pytest.mark.parametrize("dtype", (torch.float32, HALF, torch.float16), ids=str)
@pytest.mark.parametrize(("shape", "each"), [*((shape, "weight bias") for shape in SHAPES), (SHAPES[0], ALL)], ids=str)
def test_shapes_of_networks(shape, each, dtype, curve):
    x, dy = numbers(shape, dtype, drawn_on=DEVICE), numbers(shape, dtype, 1, drawn_on=DEVICE)
    check_in_pieces(curve, x, parameters(shape[1:], dtype, each), dy, additions=ADDITIONS)


@pytest.mark.parametrize(
    ("shape", "channels", "behind"),
    [((MANY, 40), 40, 0), ((MANY, 3, 2, 5), 3, 2), ((3, MANY), MANY, 0), ((2, 3, MANY), 3, 1)],
)
def test_more_programs_than_a_grid_has_on_its_other_axes(shape, channels, behind):
    x, dy = numbers(shape, HALF, drawn_on=DEVICE), numbers(shape, HALF, 1, drawn_on=DEVICE)
    check_in_pieces("isru", x, parameters((channels,), HALF, ALL), dy, behind, ADDITIONS)


@pytest.mark.parametrize("shape", [(FULL - 8,), (FULL + 40, 1), (FULL // 5 + 9, 5), (FULL // 64 + 3, 64)], ids=str)
def test_about_2_to_the_31_elements(shape):
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, dy = torch.empty(shape, dtype=HALF, device=DEVICE), torch.empty(shape, dtype=HALF, device=DEVICE)
    for tensor in (x, dy):
        some = torch.randn((FULL >> 7) + 3, generator=generator, device=DEVICE).mul_(2).to(HALF)
        for piece in tensor.view(-1).split(len(some)):
            piece.copy_(some[: len(piece)])
    check_in_pieces("tanh", x, parameters(shape[1:] or (1,), HALF), dy, additions=2**14)


def same_bits(results, others):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(results, others, strict=True))


@on_a_gpu
@pytest.mark.parametrize(("shape", "behind"), [((3001, 768), 0), ((1999, 37), 0), ((16, 24, 14, 14), 2)])
def test_the_same_bits_every_time_and_replayed_from_a_graph_on_another_stream(shape, behind):
    x, dy, given = numbers(shape, HALF), numbers(shape, HALF, 1), parameters(shape[1:2], HALF, ALL)

    def results():
        return [result.contiguous() for result in by_kernels("tanh", x, given, behind, dy).values()]

    expected, stream = results(), torch.cuda.Stream()
    assert all(same_bits(expected, results()) for _ in range(20))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert same_bits(expected, results())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = results()
    for seed in (10, 20):
        x.copy_(numbers(shape, HALF, seed))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(replayed, results())
