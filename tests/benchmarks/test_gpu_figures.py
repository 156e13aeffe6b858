"""What is to be reached on a GPU, and what times come to beside it."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is made for Linux alone")
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from on_gpu import figures

    return figures


def shown(figures, medians, of="DyT", passes="forward", dtype="bfloat16", shape=(32768, 4096), tuned=False):
    rows = figures.table(medians, of, passes, dtype, shape, tuned)
    return {row.quantity.removeprefix(f"{passes}, "): pytest.approx(list(row.samples)) for row in rows}


def test_the_short_table_sets_each_ratio_beside_its_figure(figures):
    medians = {
        ("copy", "copy", "forward"): [99.0, 90.0],
        ("DyT", "normscope", "forward"): [100.0, 100.0],
        ("DyT", "eager, as published", "forward"): [400.0, 410.0],
        ("DyT", "eager, in float32", "forward"): [900.0, 300.0],
        ("DyT", "torch.compile, as published", "forward"): [130.0, 140.0],
        ("DyT", "torch.compile, in float32", "forward"): [119.0, 150.0],
        ("DyT", "Liger", "forward"): [125.0, 130.0],
        ("LayerNorm", "F.layer_norm", "forward"): [120.0, 116.0],
    }
    assert shown(figures, medians) == {
        "time": [100.0, 100.0],
        "of the copy's rate": [99.0, 90.0],
        "of the copy's rate, to reach": [95.0],
        "eager": [4.0, 3.0],
        "torch.compile ≥ 1.2 in bfloat16": [1.19, 1.4],
        "Liger ≥ 1.25": [1.25, 1.3],
        "F.layer_norm ≥ 1.15": [1.2, 1.16],
        "figures missed": [2.0],  # the copy's in the second round, torch.compile's in the first
    }
    small = shown(figures, medians, dtype="float16", shape=(4096, 4096))
    assert small["figures missed"] == [0.0]  # below 10⁸ elements, and not in bfloat16, neither is to be reached
    assert "of the copy's rate, to reach" not in small


def test_going_backward_the_copy_is_scaled_by_the_bytes(figures):
    """Three tensors have to be moved in place of two."""
    medians = {
        ("copy", "copy", "forward"): [60.0, 60.0],
        ("Derf", "normscope", "backward"): [100.0, 90.0],
        ("Derf", "normscope", "forward"): [1.0, 1.0],
        ("DyT", "Liger", "backward"): [500.0, 500.0],
    }
    made = shown(figures, medians, of="Derf", passes="backward")
    assert made["of the copy's rate"] == [90.0, 100.0]
    assert made["of the copy's rate, to reach"] == [85.0] and made["figures missed"] == [0.0]
    assert not any("Liger" in name for name in made)  # which has no Derf
    assert shown(figures, medians, of="DyT", passes="backward") == {}  # was not timed


def test_a_round_that_is_missing_leaves_the_ratios_of_the_other(figures):
    medians = {
        ("copy", "copy", "forward"): [96.0],
        ("DyT", "normscope", "forward"): [100.0, 100.0],
        ("DyT", "Liger", "forward"): [200.0, 300.0],
    }
    made = shown(figures, medians)
    assert made["of the copy's rate"] == [96.0] and made["Liger ≥ 1.25"] == [2.0, 3.0]


def test_rates_are_of_the_bytes_that_have_to_be_moved(figures):
    """4.3 TB/s move the 2·32768·4096 bfloat16 of a forward pass in 124.9 µs (docs/kernels.md)."""
    key = "DyT", "normscope", "forward"
    assert figures.rates({key: [124.9]}, 32768 * 4096, 2)[key] == pytest.approx([4300], rel=1e-3)
    key = "DyT", "normscope", "backward"
    assert figures.rates({key: [210.7]}, 131072 * 1152, 2)[key] == pytest.approx([4300], rel=1e-3)
