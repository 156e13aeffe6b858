"""Large tensors, streams and CUDA graphs: on a GPU alone, at most 26 GB at once. A rehearsal runs tiny tensors."""

import pytest
import torch
from torch import Tensor
from truth import BY_NUMPY, DEVICE, GPU, for_a_gpu, hold_in_pieces, made_by_kernels, numbers, on_a_gpu, parameters

pytestmark = for_a_gpu
ALL = "alpha shift weight bias"
HALF = torch.bfloat16
DTYPES = (torch.float32, HALF, torch.float16)
SHAPES = ((25216, 768), (4096, 4096), (32768, 4096), (131072, 1152)) if GPU else ((24, 16),)
MANY = 70_000 if GPU else 30  # more than the 65,535 programs that a grid has on its second and third axis
FULL = 2**31 if GPU else 2**12
LONG = 200_000_000  # clocks: a tenth of a second
ADDITIONS = 512  # that meet a term: in its register and across a tile


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return numbers(shape, dtype, seed, drawn_on=DEVICE)  # the CPU would take minutes


@pytest.fixture(autouse=True)
def free_memory():
    if GPU:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("curve", BY_NUMPY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "each"), [*((shape, "weight bias") for shape in SHAPES), (SHAPES[0], ALL)], ids=str)
def test_shapes_of_networks(shape, each, dtype, curve):
    own = parameters(curve, shape[1:], dtype, each)
    hold_in_pieces(curve, drawn(shape, dtype), own, drawn(shape, dtype, 1), additions=ADDITIONS)


MANIES = {  # sizes of x and of the channels, and axes behind them
    "rows": ((MANY, 40), (40,), 0),
    "rows of one element": ((MANY, 1), (1,), 0),
    "images": ((MANY, 3, 2, 5), (3,), 2),
    "channels": ((3, MANY), (MANY,), 0),
    "pixels": ((2, 3, MANY), (3,), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", MANIES)
def test_more_than_a_grid_has_on_its_other_axes(name, dtype):
    shape, channels, behind = MANIES[name]
    own = parameters("isru", channels, dtype, ALL)
    hold_in_pieces("isru", drawn(shape, dtype), own, drawn(shape, dtype, 1), behind, ADDITIONS)


@pytest.mark.parametrize(
    "shape",
    [(FULL - 5, 1), (FULL - 8,), (FULL + 40,), (FULL + 40, 1), (FULL // 5 + 9, 5), (FULL // 64 + 3, 64)],
    ids=str,
)
def test_about_2_to_the_31_elements(shape):
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, dy = torch.empty(shape, dtype=HALF, device=DEVICE), torch.empty(shape, dtype=HALF, device=DEVICE)
    for tensor in (x, dy):
        some = torch.randn((FULL >> 7) + 3, generator=generator, device=DEVICE).mul_(2).to(HALF)
        for piece in tensor.view(-1).split(len(some)):
            piece.copy_(some[: len(piece)])
    hold_in_pieces("tanh", x, parameters("tanh", shape[1:] or (1,), HALF), dy, additions=2**14)


ON_STREAMS = {  # x, the channels' sizes, axes behind them
    "rows": lambda seed: (numbers((3001, 768), HALF, seed), (768,), 0),
    "odd rows": lambda seed: (numbers((1999, 37), seed=seed), (37,), 0),
    "images": lambda seed: (numbers((16, 24, 14, 14), HALF, seed), (24,), 2),
}
each_shape = pytest.mark.parametrize("name", ON_STREAMS)


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def results(name: str, x: Tensor, dy: Tensor) -> list[Tensor]:
    _, shape, behind = ON_STREAMS[name](0)
    return list(made_by_kernels("tanh", x, parameters("tanh", shape, x.dtype, ALL), behind, dy).values())


@on_a_gpu
@each_shape
def test_the_same_bits_every_time_and_on_another_stream_without_waiting(name):
    (x, *_), (dy, *_) = ON_STREAMS[name](0), ON_STREAMS[name](1)
    expected = results(name, x, dy)
    assert all(same_bits(expected, results(name, x, dy)) for _ in range(20))
    late_x, late_dy = (torch.empty_like(tensor).fill_(torch.nan) for tensor in (x, dy))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10 * LONG)
        late_x.copy_(x)
        late_dy.copy_(dy)
        before = torch.cuda.Event()
        before.record()
        made = results(name, late_x, late_dy)
        assert not before.query()
    stream.synchronize()
    assert same_bits(expected, made)


@on_a_gpu
@each_shape
def test_replayed_from_a_graph_with_other_numbers(name):
    (x, *_), (dy, *_) = ON_STREAMS[name](0), ON_STREAMS[name](1)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        results(name, x, dy)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = results(name, x, dy)
    for seed in (10, 20):
        x.copy_(ON_STREAMS[name](seed)[0])
        dy.copy_(ON_STREAMS[name](seed + 1)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(made, results(name, x, dy))
