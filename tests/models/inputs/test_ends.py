"""Where the trajectories of demo_dit end, with the network as it is and with another in its place."""

from contextlib import contextmanager

import pytest
import torch

from normscope.loading import load


@pytest.fixture
def demo():
    return load("demo_dit", device="cpu", limit=3)


@contextmanager
def other_norms(module):
    """Let the last block's norm in front of attention return its input."""
    parent = module.transformer_blocks[7].norm1
    norm, parent.norm = parent.norm, torch.nn.Identity()
    yield
    parent.norm = norm


def ends_of(inputs):
    return torch.cat([latents for _, latents in inputs.ends()])


def latents_of(inputs):
    return [batch.kwargs["hidden_states"] for batch in inputs]


def test_the_last_step_starts_where_the_batches_at_the_last_timestep_are(demo):
    inputs = load("demo_dit", device="cpu", limit=3, timesteps="0,").inputs
    (batch,) = inputs
    with torch.no_grad():
        predicted = demo.module(**batch.kwargs)[0]
    step = inputs.scheduler.step(predicted, 0, batch.kwargs["hidden_states"]).prev_sample
    assert torch.equal(ends_of(inputs), step)


def test_one_sample_and_one_latent_for_each_trajectory():
    inputs = load("demo_dit", device="cpu", limit=5, batch_size=4, guidance=2.0, dtype="bfloat16").inputs
    ends = list(inputs.ends())
    assert [tuple(latents.shape) for _, latents in ends] == [(2, 1, 8, 8), (2, 1, 8, 8), (1, 1, 8, 8)]
    assert {latents.dtype for _, latents in ends} == {torch.float32}
    samples = [sample for some, _ in ends for sample in some]
    assert [sample.source for sample in samples] == [f"trajectory {number}" for number in range(5)]
    assert {(sample.source, sample.data) for sample in samples} == {
        (sample.source, sample.data) for batch in inputs for sample in batch.samples
    }


def test_the_network_as_it_is_walks_and_leaves_nothing_behind(demo):
    before, ends = latents_of(demo.inputs), ends_of(demo.inputs)
    with other_norms(demo.module):
        others = ends_of(demo.inputs)
        fresh = load("demo_dit", device="cpu", limit=3)
        with other_norms(fresh.module):
            assert torch.equal(others, ends_of(fresh.inputs)), "latents of the original were taken"
            assert latents_of(fresh.inputs)[3].ne(before[3]).any(), "the other network walks elsewhere"
    assert (others - ends).norm() > 0.01 * ends.norm()
    assert torch.equal(ends_of(demo.inputs), ends)
    for latents, again in zip(before, latents_of(demo.inputs), strict=True):
        assert torch.equal(again, latents)


def test_ends_come_first_and_batches_of_the_original_afterwards(demo):
    with other_norms(demo.module):
        ends_of(demo.inputs)
    fresh = latents_of(load("demo_dit", device="cpu", limit=3).inputs)
    for latents, expected in zip(latents_of(demo.inputs), fresh, strict=True):
        assert torch.equal(latents, expected)
