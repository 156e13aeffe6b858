import dataclasses
import json

import pytest
import torch
from networks import numbered_samples
from safetensors import safe_open
from torch import nn

import normscope
from normscope.errors import DataError, UsageError
from normscope.pairs.storage import load_capture, save_capture
from normscope.runtime.checked_files import read_checked, write_checked


@pytest.fixture(scope="module")
def seen():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.LocalResponseNorm(2), nn.LayerNorm(8)
    )
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)).mT)).mT)
    batches = [
        normscope.Batch(
            (torch.randn(count, length, 4),),
            samples=numbered_samples(count, first),
            part=part,
        )
        for part, first, count, length in (("early", 0, 6, 8), ("late", 6, 3, 5))
    ]
    return normscope.capture(
        model,
        batches,
        about={"model": "small", "weights": "ours", "data": "noise"},
        seed=5,
        by_gamma=True,
        per_channel=True,
        diagonal=True,
        by_part=True,
    )


@pytest.fixture(scope="module")
def file(seen, tmp_path_factory):
    return save_capture(seen, tmp_path_factory.mktemp("captures") / "seen.safetensors")


def test_a_loaded_capture_equals_the_saved_one(seen, file):
    again = load_capture(file)
    assert_same(again, seen)
    assert [norm.kind for norm in again.skipped] == ["LocalResponseNorm"]
    assert again.stats["1"].nbytes == seen.stats["1"].nbytes
    assert list(again.parts) == list(seen.parts) == ["early", "late"]
    for name, part in seen.parts.items():
        assert_same(again.parts[name], part)


def assert_same(again, seen):
    for field in ("about", "sites", "skipped", "n_samples", "seed", "versions"):
        assert getattr(again, field) == getattr(seen, field)
    assert again.stats.keys() == seen.stats.keys()
    for name, stats in seen.stats.items():
        for field in (field.name for field in dataclasses.fields(stats)):
            a, b = getattr(stats, field), getattr(again.stats[name], field)
            if dataclasses.is_dataclass(a) and field != "sources":
                assert all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
            else:
                assert a.stride() == b.stride() and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_file_without_the_whole_is_the_sum_of_its_parts(seen, file, tmp_path):
    header, tensors = read_checked(file, "normscope-capture", 9)
    write_checked(tmp_path / "parts", header, {name: tensor for name, tensor in tensors.items() if "/" in name})
    assert_same(load_capture(tmp_path / "parts"), seen)


def test_the_header_describes_the_capture(file):
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["normscope"])
    assert (header["format"], header["version"]) == ("normscope-capture", 9)
    assert header["about"] == {"model": "small", "weights": "ours", "data": "noise", "dtype": "float32"}
    assert header["seed"] == 5
    assert header["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def changed(value, *path):
    def change(header, tensors):
        place = header
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return header, tensors

    return change


SITE = ("parts", 0, "sites", 0)
NOT_A_CAPTURE = {
    "older version": (
        lambda h, t: (h | {"version": 8}, t),
        "format version 8; this normscope reads version 9; ",
    ),
    "newer version": (lambda h, t: (h | {"version": 99}, t), "format version 99"),
    "other format": (lambda h, t: ({"format": "weights"}, t), "no capture"),
    "another grid": (
        lambda h, t: (h | {"grids": h["grids"] | {"tokens": [3, -27, 19]}}, t),
        r"was summed on another grid: tokens \[3, -27, 19\], not \[",
    ),
    "no grid": (changed({}, "grids"), "was summed on another grid: pairs None"),
}
DAMAGED = {
    "a missing tensor": lambda h, t: (h, {k: v for k, v in t.items() if k != "0/0.density"}),
    "missing sums": lambda h, t: (h, {k: v for k, v in t.items() if not k.startswith("0/0.")}),
    "a wrong shape": lambda h, t: (h, t | {"0/0.channel_sums": torch.zeros(2, 3, dtype=torch.float64)}),
    "a wrong dtype": lambda h, t: (h, t | {"0/0.channel_sums": t["0/0.channel_sums"].float()}),
    "a count that is none": lambda h, t: (h, t | {"0/0.density": t["0/0.density"].double()}),
    "a moment less": lambda h, t: (h, t | {"0/0.moments": t["0/0.moments"][:5].clone()}),
    "more tokens than are drawn": lambda h, t: (h, t | {"0/0.tokens.key": torch.zeros(10**5, dtype=torch.int64)}),
    "bins beyond the grid": lambda h, t: (h, t | {"0/0.moments.cells": t["0/0.moments.cells"] + 400_000}),
}
MALFORMED = [
    *[("5", "seed"), (None, "n_samples"), ([3], "skipped"), ([], "about"), ([], "versions"), (None, "grids")],
    *[(None, "parts"), ([None], "parts"), ([{"name": 3}], "parts")],
    *[(1.0, *SITE, "index"), (None, *SITE, "name"), (8, *SITE, "normalized_shape"), ("last", *SITE, "channel_axis")],
    *[(7, *SITE, "channels"), (2**40, *SITE, "channels"), (float("nan"), *SITE, "eps"), ("yes", *SITE, "affine")],
    *[(10**400, *SITE, "calls"), ([], *SITE, "sources"), ("two", *SITE, "sources", "number")],
    *[(1, *SITE, "sources", "mapped"), (1.5, *SITE, "sources", "source_index")],
]
DAMAGED |= {f"{path[-1]} {value!r:.20}": changed(value, *path) for value, *path in MALFORMED}


@pytest.mark.parametrize(
    ("change", "words"),
    [pytest.param(*case, id=name) for name, case in NOT_A_CAPTURE.items()]
    + [pytest.param(change, "is damaged: .* writes one", id=name) for name, change in DAMAGED.items()],
)
def test_changed_files_are_refused(file, tmp_path, change, words):
    path = tmp_path / "changed.safetensors"
    write_checked(path, *change(*read_checked(file, "normscope-capture", 9)))
    with pytest.raises(DataError, match=words):
        load_capture(path)


def test_site_that_saw_only_nonfinite_tokens(tmp_path):
    model = nn.Sequential(nn.LayerNorm(8))
    seen = normscope.capture(model, [torch.full((2, 8), torch.nan)])
    again = load_capture(save_capture(seen, tmp_path / "nonfinite.safetensors"))
    assert (again.stats["0"].n_pairs, int(again.stats["0"].nonfinite_tokens)) == (0, 2)
    assert torch.equal(again.stats["0"].channel_extremes, seen.stats["0"].channel_extremes)


def test_group_that_saw_only_nonfinite_tokens(tmp_path):
    """Its channels have no extremes, beside others that have, and reach nowhere."""
    x = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    x[:, :4] = torch.nan
    seen = normscope.capture(nn.Sequential(nn.GroupNorm(2, 8)), [x])
    stats = load_capture(save_capture(seen, tmp_path / "nonfinite.safetensors")).stats["0"]
    assert (stats.n_pairs, int(stats.nonfinite_tokens)) == (3 * 4 * 5, 3)
    assert torch.equal(stats.channel_extremes, seen.stats["0"].channel_extremes)
    assert torch.equal(stats.reach, x.nan_to_num().abs().amax((0, 2)))
    (card,) = normscope.norm_cards(seen)
    assert card.tails.largest == float(stats.reach.max())
    assert {channel.channel for channel in card.tails.channels} <= set(range(4, 8))


@pytest.mark.parametrize("suffix", [".pt", ".NPZ", ".csv"])
def test_the_suffix_of_another_format_is_refused(seen, tmp_path, suffix):
    with pytest.raises(UsageError, match=f"ends in {suffix}, but a capture's file ends in .safetensors"):
        save_capture(seen, tmp_path / f"seen{suffix}")
    assert not list(tmp_path.iterdir())


def test_a_file_that_breaks_off_or_is_another_is_refused(file, tmp_path):
    content, path = file.read_bytes(), tmp_path / "cut.safetensors"
    header_end = 8 + int.from_bytes(content[:8], "little")
    cut = [content[:size] for size in (len(content) - 1, header_end, 20, 1, 0)]
    for changed in (*cut, content + b"more", content[:8] + b"x" + content[9:], b"a text and no capture"):
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"it is incomplete, damaged, or no safetensors file .* writes one\.$"):
            load_capture(path)
