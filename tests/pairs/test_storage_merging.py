"""Captures of several runs as one: against the capture of all their inputs at once."""

import dataclasses

import pytest
import torch
from captures import assert_same_capture
from networks import network_of, numbered_samples
from torch import nn

import normscope
from normscope.errors import DataError, UsageError


def captured(network, batches, **changes):
    return normscope.capture(network.module, batches, layers="0,8,16,", about=network.about, **changes)


@pytest.fixture(scope="module")
def digits():
    network = normscope.load("demo_vit", batch_size=4, limit=24)
    return network, list(network.inputs)


@pytest.fixture(scope="module")
def thirds(digits):
    network, batches = digits
    return [captured(network, batches[first::3]) for first in range(3)]


def test_any_order_is_the_capture_of_all_at_once(digits, thirds, tmp_path):
    network, batches = digits
    whole = captured(network, batches)
    files = [normscope.save_capture(third, tmp_path / f"{i}.safetensors") for i, third in enumerate(thirds)]
    for sources in (thirds, thirds[::-1], [thirds[1], files[2], files[0]]):
        merged = normscope.merge_captures(sources)
        assert_same_capture(merged, whole)
        assert {stats.fold_by for stats in merged.stats.values()} == {"source"}


def changed(seen, **about):
    return dataclasses.replace(seen, about={**seen.about, **about})


def with_sites(seen, **values):
    first, *others = seen.sites
    return dataclasses.replace(seen, sites=[dataclasses.replace(first, **values), *others])


REFUSED = {
    "model": (lambda seen: changed(seen, model="vit_b16"), "different models: 'demo_vit' and 'vit_b16'"),
    "weights": (lambda seen: changed(seen, weights="random"), "different weights: .* and 'random'"),
    "dtype": (lambda seen: changed(seen, dtype="bfloat16"), "different dtypes: 'float32' and 'bfloat16'"),
    "sample": (lambda seen: changed(seen, sample="a sample of 3"), "all tokens with one of a sample of 3"),
    "layers": (lambda seen: seen.only(2), "different norm sites: .* is in one alone"),
    "eps": (lambda seen: with_sites(seen, eps=0.5), r"different norm sites: the eps of .* is 1e-06 and 0\.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_captures_of_different_kinds_are_refused(thirds, tmp_path, case):
    change, reason = REFUSED[case]
    files = [tmp_path / f"{name}.safetensors" for name in ("a", "b", "c")]
    for file, seen in zip(files, [*thirds[:2], change(thirds[2])], strict=True):
        normscope.save_capture(seen, file)
    with pytest.raises(DataError, match=reason) as error:
        normscope.merge_captures(files)
    assert str(error.value).startswith(f"Cannot merge {files[0]} and {files[2]}: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 3}, r"\(seed 3\)"),
        ({"by_gamma": True}, "with gamma_moments and sums without"),
        ({"diagonal": True}, "with diagonal_moments and sums without"),
    ],
)
def test_different_sums_are_refused(digits, thirds, changes, reason):
    network, batches = digits
    with pytest.raises(DataError, match=rf"^Cannot merge capture 1 and capture 2: .*{reason}"):
        normscope.merge_captures([thirds[0], captured(network, batches[1::3], **changes)])


def test_fewer_than_two_captures_are_refused(thirds):
    for few, there in (([], "is none"), (thirds[:1], "is one")):
        with pytest.raises(UsageError, match=f"two captures or more; there {there}"):
            normscope.merge_captures(few)


def test_an_input_in_two_captures_is_refused(digits, thirds):
    """Four digits of twelve."""
    network, batches = digits
    again = captured(network, [batches[2], batches[1]])
    with pytest.raises(DataError, match=r"capture 2 and capture 3: both hold sample [4-7] of the same data"):
        normscope.merge_captures([thirds[0].only(3), thirds[1].only(3), again.only(3)])
    with pytest.raises(DataError, match="Cannot merge two captures: both hold sample"):
        thirds[0].merge(thirds[0])


def test_an_input_whose_tokens_are_among_the_largest():
    """One of 800, of whose tokens the 64 drawn ones contain none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32))
    inputs = torch.randn(800, 1, 4, 32)
    batches = [normscope.Batch((x,), samples=numbered_samples(1, i)) for i, x in enumerate(inputs)]
    inputs[400] *= 4
    first, second = normscope.capture(model, batches[:401]), normscope.capture(model, batches[400:])
    assert not torch.isin(first.stats["0"].tokens.key, second.stats["0"].tokens.key).any()
    with pytest.raises(DataError, match="both hold sample 400 of the same data"):
        normscope.merge_captures([first, second])
    normscope.merge_captures([normscope.capture(model, batches[:400]), second])


def test_tokens_of_no_sample_are_those_of_their_batch():
    """Of the same batch their keys are the same, and yet it is not known of which input they are."""

    # One token fewer: they no longer divide among the samples.
    split = network_of(lambda self, x: self.norm(x.reshape(-1, 8)[:-1]), norm=nn.LayerNorm(8))
    batches = [torch.randn(4, 6, 8) for _ in range(2)]
    first, again, second = (normscope.capture(split, [batch]) for batch in (batches[0], *batches))
    keys = [seen.stats["norm"].tokens.key for seen in (first, again, second)]
    assert torch.equal(keys[0], keys[1]) and not torch.isin(keys[2], keys[0]).any()
    for later in (again, second):
        assert normscope.merge_captures([first, later]).stats["norm"].n_tokens == 2 * 23


def test_names_are_joined_once(thirds):
    named = [changed(seen, data=data) for seen, data in zip(thirds, ("a", "b", "a"), strict=True)]
    named[1] = dataclasses.replace(named[1], versions={**named[1].versions, "torch": "9.9"})
    merged = normscope.merge_captures(named)
    assert merged.about["data"] == "a + b"
    assert merged.versions["torch"] == f"{named[0].versions['torch']} + 9.9"
    assert merged.n_samples == 24
