"""Trajectories of a tiny DiT against those of diffusers' own pipeline."""

import copy
from contextlib import contextmanager

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from loads import result_of, samples_of

import normscope
from normscope.errors import ModelError, UsageError
from normscope.inputs.chunks import ALL, Share
from normscope.loading import load
from normscope.models.inputs.trajectories import LatentSpace, from_noise, select_timesteps

VISITED = list(range(980, -1, -20))
SPACE = LatentSpace(channels=4, size=8, classes=1000)  # DiTPipeline's null class is 1000, whatever the model


def tiny_dit(**changes):
    torch.manual_seed(11)
    config = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "out_channels": 8}
    return DiTTransformer2DModel(**(config | changes)).eval()


def dit_scheduler():
    return DDIMScheduler(num_train_timesteps=1000, clip_sample=False)


def latents_of(inputs):
    return [batch.kwargs["hidden_states"] for batch in inputs]


def ends_of(inputs):
    return torch.cat([latents for _, latents in inputs.ends()])


@pytest.fixture(scope="module")
def dit():
    return tiny_dit()


@pytest.fixture
def trajectories(dit, options):
    def make(module=dit, guidance=4.0, number=3, **changes):
        return from_noise(SPACE, dit_scheduler(), options(**changes), guidance=guidance, trajectories=number)(module)

    return make


@pytest.fixture
def calls(dit):
    """Count the forward passes of the tiny DiT."""
    seen = []
    handle = dit.register_forward_pre_hook(lambda *_: seen.append(1))
    yield seen
    handle.remove()


class Recorder:
    """Stand where the autoencoder stands, and keep the latents that it would decode."""

    def __init__(self):
        self.config = type("Config", (), {"scaling_factor": 1.0})

    def decode(self, latents):
        self.latents = latents
        return type("Decoded", (), {"sample": latents})


def latents_of_the_pipeline(dit, labels, guidance, seed, scheduler):
    """Return what each call of the transformer got, and the latents at the end."""
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=1, latent_channels=4)
    pipeline = DiTPipeline(dit, vae, scheduler)
    pipeline.vae = Recorder()
    pipeline.set_progress_bar_config(disable=True)
    seen = []
    handle = dit.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append({**kwargs, "hidden_states": args[0]}), with_kwargs=True
    )
    generator = torch.Generator().manual_seed(seed)
    pipeline(labels, guidance, generator=[generator] * len(labels), output_type="pt")
    handle.remove()
    return seen, pipeline.vae.latents


@pytest.mark.parametrize(
    ("guidance", "channels", "settings"),
    [
        *((guidance, 8, {"num_train_timesteps": 1000}) for guidance in (4.0, 1.5, 1.0)),
        (2.0, 4, {"prediction_type": "v_prediction"}),  # 4: without learned variances
        (2.0, 4, {"prediction_type": "sample", "clip_sample": True}),
        (2.0, 4, {"timestep_spacing": "trailing", "beta_schedule": "squaredcos_cap_v2"}),
        (2.0, 4, {"steps_offset": 1, "set_alpha_to_one": False}),
    ],
)
def test_every_call_is_that_of_diffusers_own_pipeline(options, guidance, channels, settings):
    dit, settings = tiny_dit(out_channels=channels), {"clip_sample": False} | settings
    chosen = options(seed=5, timesteps=50)
    trajectories = from_noise(SPACE, DDIMScheduler(**settings), chosen, guidance=guidance, trajectories=3)(dit)
    ours = list(trajectories)
    theirs, result = latents_of_the_pipeline(
        dit, trajectories.labels.tolist(), guidance, seed=5, scheduler=DDIMScheduler(**settings)
    )
    assert len(ours) == len(theirs) == 50
    ((samples, ends),) = trajectories.ends()
    assert [sample.source for sample in samples] == ["trajectory 0", "trajectory 1", "trajectory 2"]
    torch.testing.assert_close(ends, result)
    for batch, call in zip(ours, theirs, strict=True):
        assert torch.equal(batch.kwargs["timestep"], call["timestep"])
        assert torch.equal(batch.kwargs["class_labels"], call["class_labels"])
        torch.testing.assert_close(batch.kwargs["hidden_states"], call["hidden_states"])
    assert not torch.allclose(ours[0].kwargs["hidden_states"], ours[-1].kwargs["hidden_states"], atol=0.1)


def test_a_latent_and_its_unlabelled_half_share_a_batch_and_a_source(trajectories):
    batches = list(trajectories(number=5, batch_size=4, timesteps="980,0"))
    assert [len(batch.samples) for batch in batches] == [4, 4, 4, 4, 2, 2]
    assert [batch.part for batch in batches] == ["timestep 980", "timestep 0"] * 3
    for batch in batches:
        labelled, unlabelled = batch.kwargs["hidden_states"].chunk(2)
        assert torch.equal(labelled, unlabelled)
        half = len(batch.samples) // 2
        assert (batch.kwargs["class_labels"][:half] < 1000).all()
        assert (batch.kwargs["class_labels"][half:] == 1000).all()
        assert [sample.source for sample in batch.samples[:half]] == [sample.source for sample in batch.samples[half:]]
    seen = samples_of(batches)
    assert {(sample.source, sample.source_index) for sample in seen} == {(f"trajectory {i}", i) for i in range(5)}
    assert len({sample.index for sample in seen}) == len(seen) == trajectories(number=5, timesteps="980,0").n_samples


def test_the_batch_size_changes_nothing_but_the_batches(trajectories):
    def latents(**changes):
        by_sample = {}
        for batch in trajectories(number=3, **changes):
            by_sample |= dict(zip(batch.samples, batch.kwargs["hidden_states"], strict=True))
        return by_sample

    alone, together = latents(batch_size=1), latents(batch_size=100)
    assert alone.keys() == together.keys()
    assert len(alone) == 24
    for sample, value in alone.items():
        torch.testing.assert_close(value, together[sample], rtol=1e-3, atol=1e-3)  # matmuls of other shapes, 50 times


def test_fewer_are_the_first_and_the_seed_chooses(trajectories):
    def start(**changes):
        batch = next(iter(trajectories(guidance=1.0, **changes)))
        return batch.kwargs["hidden_states"], batch.kwargs["class_labels"]

    noise, labels = start(number=4)
    fewer_noise, fewer_labels = start(number=4, limit=2)
    other_noise, other_labels = start(number=4, seed=1)
    assert torch.equal(fewer_noise, noise[:2])
    assert torch.equal(fewer_labels, labels[:2])
    assert not torch.equal(other_noise, noise)
    assert not torch.equal(other_labels, labels)
    assert len(start(number=4, limit=100)[0]) == 4


def test_labels_are_distinct_while_there_are_classes_left(options):
    few = LatentSpace(channels=1, size=8, classes=10)
    labels = from_noise(few, dit_scheduler(), options(), guidance=1.0, trajectories=25)(None).labels
    assert sorted(labels[:10].tolist()) == sorted(labels[10:20].tolist()) == list(range(10))


@pytest.fixture
def none_together(monkeypatch):
    """Walk trajectories as large ones are: in the batches that they come in."""
    monkeypatch.setattr("normscope.models.inputs.trajectories._TOGETHER", 0)


def test_tiny_trajectories_are_walked_once_and_in_one_batch(trajectories, calls):
    ours = trajectories(number=6, timesteps="980,500,0", batch_size=2)  # one guided latent at a time
    assert len(list(ours)) == 6 * 3
    assert len(calls) == VISITED.index(0)
    list(ours)
    list(ours.chunks(Share(1, 2)))
    assert len(calls) == VISITED.index(0)


def test_the_steps_of_a_walk_are_told(dit, trajectories, none_together):
    told = []
    normscope.capture(
        dit, trajectories(number=2, timesteps="980,940", batch_size=2), progress=lambda *on: told.append(on)
    )
    steps = [(done, of) for stage, done, of in told if stage == "steps of trajectories"]
    assert steps == [(done, 4) for done in range(5)]
    assert [done for stage, done, _ in told if stage == "samples"] == [0, 2, 4, 6, 8]
    ours = trajectories(number=2, timesteps="980,")
    normscope.capture(dit, ours, progress=lambda *on: told.append(on))
    assert len([stage for stage, *_ in told if stage != "samples"]) == len(steps), "no steps, no stage of them"


def test_the_first_sample_takes_no_forward_pass_and_no_trajectory_goes_on_after_the_last_timestep(
    trajectories, calls, none_together
):
    ours = trajectories(number=2, timesteps="980,500", batch_size=2)  # one guided latent at a time
    first = ours.first_sample()
    assert len(calls) == 0
    batches = list(ours)
    assert torch.equal(batches[0].kwargs["hidden_states"][:1], first.kwargs["hidden_states"])
    assert len(calls) == 2 * VISITED.index(500)
    list(ours)
    assert len(calls) == 2 * VISITED.index(500), "what was computed once is kept"


def test_iterating_again_gives_the_same_also_after_an_interruption(trajectories):
    interrupted = trajectories(number=2, timesteps="900,880,860")
    next(iter(interrupted))
    for first, again in zip(trajectories(number=2, timesteps="900,880,860"), interrupted, strict=True):
        assert first.samples == again.samples
        assert first.part == again.part
        assert torch.equal(first.kwargs["hidden_states"], again.kwargs["hidden_states"])


def test_gradients_inference_mode_and_the_random_state_stay_as_they_were(trajectories):
    ours, before = trajectories(number=1, timesteps="980,960"), torch.get_rng_state()
    with torch.inference_mode():
        list(ours)
    assert torch.equal(torch.get_rng_state(), before)
    latents = latents_of(ours)
    assert torch.is_grad_enabled()
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in latents)
    ours.module(**list(ours)[1].kwargs)[0].sum().backward()


def test_steps_are_taken_in_float32_whatever_the_module_runs_in(trajectories):
    ours = trajectories(module=tiny_dit().bfloat16(), number=1, timesteps="980,800", dtype=torch.bfloat16)
    exact = trajectories(number=1, timesteps="980,800")
    for batch, other in zip(ours, exact, strict=True):
        assert batch.kwargs["hidden_states"].dtype == torch.bfloat16
        torch.testing.assert_close(
            batch.kwargs["hidden_states"].float(), other.kwargs["hidden_states"], rtol=0.1, atol=0.1
        )
    assert ends_of(ours).dtype == torch.float32


def test_a_capture_keeps_timesteps_apart_and_leaves_the_steps_out(dit, trajectories):
    ours = trajectories(number=2, timesteps="980,0")
    seen = normscope.capture(dit, ours, by_part=True)
    tokens = 2 * 2 * 16  # trajectories, halves, patches
    assert {name: part.stats["norm_out"].n_pairs for name, part in seen.parts.items()} == {
        "timestep 980": tokens * 16,
        "timestep 0": tokens * 16,
    }
    assert seen.stats["norm_out"].n_pairs == 2 * tokens * 16
    assert len(seen.sites) == 5


def test_descriptions(trajectories):
    for changes, description in (
        ({}, "3 DDIM trajectories of 50 steps (seed 0, guidance 4), timesteps 980, 660, 320, 0"),
        ({"timesteps": "500,"}, "3 DDIM trajectories of 50 steps (seed 0, guidance 4), timestep 500"),
        ({"limit": 1, "guidance": 1.5, "timesteps": 1}, "1 DDIM trajectory of 50 steps (seed 0, guidance 1.5), time"),
        ({"timesteps": 50, "guidance": 1}, "3 DDIM trajectories of 50 steps (seed 0, no guidance), 50 timesteps from "),
        ({"shuffle": True, "seed": 3}, "3 DDIM trajectories of 50 steps (seed 3, guidance 4, shuffled), timesteps 980"),
    ):
        assert trajectories(**changes).description.startswith(description)


def test_timesteps():
    chosen = {None: [980, 660, 320, 0], 1: [480], "2": [980, 0], 50: VISITED}
    chosen |= {"0, 980": [980, 0], "980,": [980], "20,20,40": [40, 20]}
    for request, timesteps in chosen.items():
        assert select_timesteps(VISITED, request) == timesteps


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("979,0", "does not visit the timestep 979: its 50 go from 980 to 0. Nearest are 980 and 960."),
        ("-20,", "does not visit the timestep -20: its 50 go from 980 to 0. Nearest are 20 and 0."),
        (0, "The number of timesteps must be at least 1, not 0."),
        ("-3", "The number of timesteps must be at least 1, not -3."),
        (51, r"The trajectory has 50 timesteps, not 51.$"),
        ("500", "The trajectory has 50 timesteps, not 500. For the timestep 500 alone, write '500,'."),
        ("late", "The timesteps 'late' cannot be understood. .*'980,0', or '980,' for one."),
        ("", "The timesteps '' cannot be understood."),
        (",", "The timesteps ',' cannot be understood."),
        ("980;0", "The timesteps '980;0' cannot be understood."),
        ("9" * 30, "cannot be understood"),
        ("٣,", "cannot be understood"),
    ],
)
def test_timesteps_that_are_none(wanted, sentence):
    with pytest.raises(UsageError, match=sentence):
        select_timesteps(VISITED, wanted)


@pytest.mark.parametrize("guidance", [0.5, -1.0, 0.0, float("nan"), float("inf")])
def test_guidance_that_is_none(options, guidance):
    with pytest.raises(UsageError, match=r"The guidance is .*; it has to be 1, for none, or more\."):
        from_noise(SPACE, dit_scheduler(), options(guidance=guidance), guidance=4.0, trajectories=1)


def test_as_few_steps_as_visit_what_is_asked_for(dit, options):
    def walk(asked, train=1000):
        scheduler = DDIMScheduler(num_train_timesteps=train, clip_sample=False)
        return from_noise(SPACE, scheduler, options(timesteps=asked), guidance=4.0, trajectories=1, steps=(10, 50))

    for asked, steps, timesteps in (
        (None, 10, [900, 600, 300, 0]),
        (10, 10, list(range(900, -1, -100))),
        ("900,0", 10, [900, 0]),
        ("980,0", 50, [980, 0]),
        (50, 50, VISITED),
    ):
        assert walk(asked)(dit).timesteps == timesteps
        assert f"of {steps} steps" in walk(asked)(dit).description
    short = walk("6,0", train=7)(dit)
    assert short.description.startswith("1 DDIM trajectory of 7 steps")
    assert [batch.part for batch in short] == ["timestep 6", "timestep 0"]
    with pytest.raises(UsageError, match=r"its 50 go from 980 to 0\. Nearest are 980 and 960"):
        walk("970,")


@pytest.mark.parametrize(("shuffle", "together"), [(False, 0), (True, 4), (True, 100)])
def test_shares_walk_what_one_process_walks(trajectories, shuffle, together, monkeypatch):
    monkeypatch.setattr("normscope.models.inputs.trajectories._TOGETHER", together * 4 * 8 * 8)

    def inputs():
        return trajectories(number=5, batch_size=4, timesteps="980,960", shuffle=shuffle)  # two guided ones at a time

    whole = list(inputs().chunks(ALL))
    assert [len(chunk.numbers) for chunk in whole] == [2, 2, 1]
    assert sorted(number for chunk in whole for number in chunk.numbers) == list(range(5))
    batches = [[(batch.samples, batch.kwargs["hidden_states"]) for batch in chunk.batches] for chunk in whole]
    ends = list(inputs().ends())
    for rank in range(2):
        share = Share(rank, 2)
        for chunk, expected in zip(inputs().chunks(share), batches[rank::2], strict=True):
            for batch, (samples, latents) in zip(chunk.batches, expected, strict=True):
                assert batch.samples == samples
                assert torch.equal(batch.kwargs["hidden_states"], latents)
        for (samples, latents), (expected_samples, expected) in zip(inputs().ends(share), ends[rank::2], strict=True):
            assert samples == expected_samples
            assert torch.equal(latents, expected)
    assert {sample for some in batches for samples, _ in some for sample in samples} == set(inputs().known_samples())
    assert inputs().first_sample().samples == (batches[0][0][0][0],)


def test_a_trajectory_is_the_same_when_shuffled(trajectories):
    plain, shuffled = (trajectories(number=4, timesteps="980,", shuffle=shuffle) for shuffle in (False, True))
    start, other = next(iter(plain)), next(iter(shuffled))
    assert start.samples != other.samples
    places = [start.samples.index(sample) for sample in other.samples]
    for key in ("hidden_states", "class_labels"):
        assert torch.equal(other.kwargs[key], start.kwargs[key][places])


def test_a_module_that_overwrites_its_latents_makes_the_same_trajectories(dit, trajectories):
    class Overwriting(torch.nn.Module):
        def forward(self, hidden_states, **others):
            result = dit(hidden_states.clone(), **others)
            hidden_states.zero_()
            return result

    ours, expected = (trajectories(module, guidance=1.0, timesteps=3) for module in (Overwriting(), dit))
    assert torch.equal(ends_of(ours), ends_of(expected))


def test_an_error_on_the_way_is_told_as_one_of_any_forward_pass(trajectories):
    def breaks_at_the_third(module, args, kwargs):
        if kwargs["timestep"][0] == VISITED[2]:
            raise ValueError("a head fell off")

    dit = tiny_dit()
    dit.register_forward_pre_hook(breaks_at_the_third, with_kwargs=True)
    inputs = trajectories(dit, guidance=1.0, number=2, timesteps=f"{VISITED[5]},")
    told = r"DiTTransformer2DModel raised ValueError on inputs of the shapes \(2, 4, 8, 8\), \(2,\), \(2,\): a head"
    with pytest.raises(ModelError, match=told):
        next(iter(inputs))


@contextmanager
def other_norms(module):
    """Let the last block's norm in front of attention return its input."""
    parent = module.transformer_blocks[7].norm1
    norm, parent.norm = parent.norm, torch.nn.Identity()
    yield
    parent.norm = norm


def test_the_last_step_starts_where_the_batches_at_the_last_timestep_are():
    demo = load("demo_dit", device="cpu", limit=3, timesteps="0,")
    (batch,) = demo.inputs
    step = demo.inputs.scheduler.step(result_of(demo.module, batch)[0], 0, batch.kwargs["hidden_states"])
    assert torch.equal(ends_of(demo.inputs), step.prev_sample)


@pytest.mark.slow
def test_the_network_as_it_is_walks_and_leaves_nothing_behind():
    demo = load("demo_dit", device="cpu", limit=3)
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


@pytest.mark.slow
def test_five_steps_show_the_norms_as_fifty_do(options):
    timesteps = "800,600,200,0"
    fifty = load("demo_dit", device="cpu", limit=32, timesteps=timesteps)
    five = from_noise(
        LatentSpace(channels=1, size=8, classes=10),
        copy.deepcopy(fifty.inputs.scheduler),
        options(timesteps=timesteps, batch_size=8),
        guidance=1.0,
        trajectories=32,
        steps=(5, 50),
    )(fifty.module)
    assert torch.equal(five.noise, fifty.inputs.noise[:32])
    assert "of 5 steps" in five.description
    assert "of 50 steps" in fifty.inputs.description
    both = [normscope.fit(normscope.capture(fifty.module, one), "tanh") for one in (fifty.inputs, five)]
    off = [abs(few.alpha / many.alpha - 1) for many, few in zip(*both, strict=True)]
    assert max(off[:2]) < 0.06
    assert max(off[2:]) < 0.03
    intervals = [many.intervals["alpha"] for many in both[0]]
    assert all(low < few.alpha < high for (low, high), few in zip(intervals, both[1], strict=True))
