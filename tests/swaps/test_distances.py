"""Distances against numpy in float64, scipy's relative entropy, torch's cosine similarity, and counting by hand."""

import copy
import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import network_of
from scipy.special import rel_entr, softmax
from torch import nn

from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.swaps import distances as module
from normscope.swaps.distances import OutputErrors, SiteLayout, distances
from normscope.swaps.reports import Quantiles
from normscope.tools.heal.training import TrainingTargets

DRAW = torch.Generator().manual_seed(0)
A, B = (torch.randn(6, 5, 12, generator=DRAW) for _ in range(2))
# Both are float64 sums of some dozen terms in another order.
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


def test_relative_l2_and_cosine_are_those_of_numpy_and_torch():
    measured = distances(A, B)
    a, b = (one.double().numpy().reshape(6, -1) for one in (A, B))
    np.testing.assert_allclose(measured.relative_l2, np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1), **CLOSE)
    expected = torch.nn.functional.cosine_similarity(A.double().flatten(1), B.double().flatten(1))
    np.testing.assert_allclose(measured.cosine, expected, **CLOSE)
    assert not measured.left_out.any() and not measured.nonfinite.any() and measured.kl is None


@settings(max_examples=30, deadline=None)
@given(st.floats(-100, 100).filter(lambda c: abs(c) > 1e-3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_distance_of_a_multiple_follows_from_its_factor(factor, dtype):
    a = A.to(dtype).double()
    measured = distances(a, factor * a)
    np.testing.assert_allclose(measured.relative_l2, abs(factor - 1), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(measured.cosine, math.copysign(1, factor), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tensor", "classes", "tokens", "frames"])
def test_equal_tensors_have_distance_zero(kind, dtype):
    measured = distances(A.to(dtype), A.to(dtype).clone(), kind=kind)
    assert (measured.relative_l2 == 0).all() and (measured.cosine == 1).all()
    if measured.kl is not None:
        assert (measured.kl == 0).all() and (measured.top1 == measured.answers).all()
        assert (measured.top5 == 5).all() and (measured.top5_overlap == 5).all()


def test_kl_is_scipys_relative_entropy():
    measured = distances(A, B, kind="tokens")
    p, q = (softmax(one.double().numpy(), axis=-1) for one in (A, B))
    np.testing.assert_allclose(measured.kl, rel_entr(p, q).sum(-1).mean(-1), rtol=1e-10)
    assert measured.kl.tolist() != distances(B, A, kind="tokens").kl.tolist()


def test_logits_far_apart_have_a_finite_divergence():
    a, b = torch.tensor([[[0.0, 2000.0]]]), torch.tensor([[[2000.0, 0.0]]])
    assert distances(a, b, kind="classes").kl.item() == 2000  # all of the mass, times the difference of the logits


def test_agreement_is_counted_answer_by_answer():
    measured = distances(A, B, kind="tokens")
    a, b = (one.numpy().argsort(-1)[..., ::-1] for one in (A, B))
    assert measured.answers.tolist() == [5.0] * 6
    for sample in range(6):
        own, other = a[sample], b[sample]
        assert measured.top1[sample] == sum(own[t][0] == other[t][0] for t in range(5))
        assert measured.top5[sample] == sum(own[t][0] in other[t][:5] for t in range(5))
        shared = sum(len(set(own[t][:5]) & set(other[t][:5])) / 5 for t in range(5))
        assert measured.top5_overlap[sample] == pytest.approx(shared, rel=1e-12)
    few = distances(A[..., :5], B[..., :5], kind="tokens")
    assert few.top5 is None and few.top5_overlap is None and few.top1 is not None


def test_padding_is_not_compared():
    valid = torch.arange(5) < torch.tensor([[5], [3], [1], [2], [4], [5]])
    spoilt = B.clone()
    spoilt[~valid] = torch.nan
    original = A.clone()
    original[~valid] = 1e9
    for kind in ("tokens", "frames"):
        measured = distances(original, spoilt, valid, kind)
        for sample, length in enumerate(valid.sum(1)):
            alone = distances(A[sample : sample + 1, :length], B[sample : sample + 1, :length], kind=kind)
            for name in ("relative_l2", "cosine", "kl", "answers", "top1", "top5", "top5_overlap"):
                one, other = getattr(measured, name), getattr(alone, name)
                assert (one is None) == (other is None)
                if one is not None:
                    assert one[sample].item() == pytest.approx(other[0].item(), rel=1e-12), name
    assert len(measured.frames) == int(valid.sum())


def test_frames_are_compared_one_by_one():
    measured = distances(A, B, kind="frames")
    a, b = (one.double().numpy() for one in (A, B))
    expected = np.linalg.norm(b - a, axis=-1) / np.linalg.norm(a, axis=-1)
    np.testing.assert_allclose(measured.frames, expected.ravel(), **CLOSE)


def test_nonfinite_values_are_infinitely_far_and_samples_without_an_original_are_left_out():
    original, swapped = A.clone(), B.clone()
    swapped[1, 2, 3], swapped[2, 0, 0] = torch.nan, -torch.inf
    original[3] = 0
    original[4, 1, 1] = torch.inf
    swapped[4, 1, 1] = torch.nan
    swapped[5] = 0
    measured = distances(original, swapped, kind="tokens")
    assert measured.nonfinite.tolist() == [False, True, True, False, False, False]
    assert measured.left_out.tolist() == [False, False, False, True, True, False]
    assert measured.relative_l2[1:3].tolist() == [math.inf] * 2 == measured.kl[1:3].tolist()
    assert measured.cosine[1:3].tolist() == [-math.inf] * 2
    assert measured.relative_l2[5] == 1 and measured.cosine[5] == 0
    agreed = distances(A, A.where(swapped.isfinite(), torch.nan), kind="tokens")
    assert agreed.top1.tolist() == [5, 4, 4, 5, 4, 5] == agreed.top5.tolist()  # of a NaN nothing agrees
    frames = distances(original, swapped, kind="frames").frames
    assert len(frames) == 6 * 5 - 5 - 1 and int(frames.isinf().sum()) == 2


def test_pieces_equal_the_whole(monkeypatch):
    valid = torch.rand(6, 5, generator=DRAW) > 0.3
    whole = distances(A, B, valid, "tokens")
    monkeypatch.setattr(module, "_AT_ONCE", 6 * 12 * 2)
    pieces = distances(A, B, valid, "tokens")
    for name in ("relative_l2", "cosine", "kl", "answers", "top1", "top5", "top5_overlap"):
        torch.testing.assert_close(getattr(pieces, name), getattr(whole, name), rtol=1e-14, atol=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_quantiles_are_numpys(values):
    measured = Quantiles.of(values)
    expected = np.quantile(values, [0, 0.1, 0.5, 0.9, 1])
    # Interpolation rounds once or twice, in units of the values at both ends.
    np.testing.assert_allclose(astuple(measured)[:5], expected, rtol=1e-12, atol=1e-9)
    assert measured.n == len(values)


def test_quantiles_that_fall_on_infinity_are_infinite():
    measured = Quantiles.of([1.0] * 8 + [math.inf] * 2)
    assert (measured.p50, measured.p90, measured.max) == (1.0, math.inf, math.inf)
    assert Quantiles.of([0.5, 0.6, -math.inf]).p10 == -math.inf
    assert Quantiles.of([0.5, 0.6, -math.inf]).p50 == 0.5
    assert Quantiles.of([1.0, math.inf, math.inf]).p50 == math.inf
    assert math.isnan(Quantiles.of([]).p50)


def test_a_site_in_a_part_with_a_mask_of_its_own_is_compared_by_that():
    valid = torch.arange(5) < torch.tensor([[5], [3], [1], [2], [4], [5]])
    samples = tuple(Sample(f"{i}", i, i) for i in range(6))
    batch = Batch((A,), samples=samples, valid_within={"encoder": valid})
    arranged, measured = SiteLayout("encoder.norm", torch.Size([1, 5, A.shape[-1]])).by_sample(A, batch)
    assert torch.equal(measured, valid) and arranged.shape == A.shape
    arranged, measured = SiteLayout("decoder.norm", torch.Size([1, 5, A.shape[-1]])).by_sample(A, batch)
    assert measured is None and arranged.shape == (6, 1, 5 * A.shape[-1])


def test_rows_of_an_output_belong_to_their_samples_or_all_of_them_to_each():
    batch = Batch((A,), samples=tuple(Sample(f"{i}", i, i) for i in range(6)))
    unknown = SiteLayout("norm", None)
    windows = torch.arange(24.0).reshape(24, 1)  # four of each sample, one sample's after the other's
    for rows in (windows, windows.reshape(24, 1, 1)):
        arranged, _ = unknown.by_sample(rows, batch)
        assert arranged.flatten(1).tolist() == [[4.0 * sample + window for window in range(4)] for sample in range(6)]
    for n_rows in (1, 4, 9):  # no multiple of the samples: learned queries, for example
        queries = torch.arange(2.0 * n_rows).reshape(n_rows, 2)
        arranged, valid = unknown.by_sample(queries, batch)
        assert valid is None and arranged.flatten(1).tolist() == [queries.flatten().tolist()] * 6


BATCHES = [
    Batch((torch.full((2, 3), float(n + 1)),), samples=tuple(Sample(f"{n}", n, k) for k in range(2))) for n in range(3)
]


@pytest.fixture
def networks():
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    other = copy.deepcopy(original)
    nn.init.normal_(other[1].weight)
    return original, other


@pytest.mark.parametrize(("room", "passes"), [(2**30, 3), (2 * 4 * 4, 3 + 2), (0, 3 + 3)])
def test_outputs_of_the_original_are_kept_up_to_a_limit(networks, monkeypatch, room, passes):
    original, other = networks
    monkeypatch.setattr(module, "MOST_OUTPUT_BYTES", room)
    calls = []
    original.register_forward_hook(lambda *_: calls.append(1))
    errors = OutputErrors(original, BATCHES, Outputs())
    assert not calls
    measured = errors.of(other)
    assert torch.equal(measured, errors.of(other)) and len(calls) == passes
    with torch.no_grad():
        pairs = [(original(*b.args).double().numpy(), other(*b.args).double().numpy()) for b in BATCHES]
    by_hand = [np.linalg.norm(z - y) / np.linalg.norm(y) for ys, zs in pairs for y, z in zip(ys, zs, strict=True)]
    np.testing.assert_allclose(measured.numpy(), by_hand, **CLOSE)
    assert torch.equal(errors.of(original), torch.zeros(6, dtype=torch.float64))


def test_the_same_zeros_are_no_error_and_others_are_far(networks):
    original = nn.ReLU()
    batch = Batch((torch.tensor([[-1.0, -2.0], [-1.0, -2.0]]),), samples=tuple(Sample(f"{n}", n, n) for n in range(2)))
    other = network_of(lambda self, x: x.relu() + torch.tensor([[0.0], [1.0]]))
    assert OutputErrors(original, [batch], Outputs()).of(other).tolist() == [0.0, np.inf]


def test_a_mask_of_as_many_positions_as_there_are_classes_masks_no_class(networks):
    samples = tuple(Sample(f"{n}", n, n) for n in range(2))
    x, valid = torch.randn(2, 4, 3), torch.arange(4) < torch.tensor([[4], [2]])
    original, other = (network_of(lambda self, x: self.layers(x).mean(1), layers=layers) for layers in networks)
    batches = [Batch((x,), samples=samples, valid=mask) for mask in (valid, None)]
    masked, plain = (OutputErrors(original, [batch], Outputs("classes")).of(other) for batch in batches)
    assert torch.equal(masked, plain) and (masked > 0).all()
    losses = [TrainingTargets(original, other, Outputs("classes"), [], [[batch]]).gradients(0) for batch in batches]
    assert losses[0] == losses[1] == pytest.approx(float(plain.mean()) ** 0.5, rel=1e-5)  # float32
