"""Trajectories of a tiny DiT against those of diffusers' own pipeline."""

import copy

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from loads import result_of, samples_of
from networks import network_of

import normscope
from normscope.errors import ModelError, UsageError
from normscope.inputs.chunks import ALL, RankSampler
from normscope.loading import load
from normscope.models.inputs.trajectories import LatentSpace, Trajectories, select_timesteps

FIFTY = list(range(980, -1, -20))
VISITED = [800, 600, 400, 200, 0]  # by trajectories of five steps
SPACE = LatentSpace(channels=4, size=8, classes=1000)  # DiTPipeline's null class is 1000, whatever the model


def tiny_dit(**changes):
    torch.manual_seed(11)
    config = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "out_channels": 8}
    return DiTTransformer2DModel(**(config | changes)).eval()


def dit_scheduler(**settings):
    return DDIMScheduler(**{"num_train_timesteps": 1000, "clip_sample": False} | settings)


def latents_of(inputs):
    return [batch.kwargs["hidden_states"] for batch in inputs]


def ends_of(inputs):
    return torch.cat([latents for _, latents in inputs.ends()])


@pytest.fixture(scope="module")
def dit():
    return tiny_dit()


@pytest.fixture
def trajectories(dit, options):
    def make(module=dit, guidance=4.0, number=3, steps=(5,), scheduler=None, space=SPACE, **changes):
        default = {"guidance": guidance, "trajectories": number, "steps": steps}
        inputs = Trajectories(space, scheduler or dit_scheduler(), options(**changes), **default)
        inputs.module = module
        return inputs

    return make


@pytest.fixture
def calls(dit):
    """Count the forward passes of the tiny DiT."""
    seen = []
    handle = dit.register_forward_pre_hook(lambda *_: seen.append(1))
    yield seen
    handle.remove()


@pytest.fixture
def none_together(monkeypatch):
    """Walk trajectories as large ones are: in the batches that they come in."""
    monkeypatch.setattr("normscope.models.inputs.trajectories._TOGETHER", 0)


class Decoder:
    """An autoencoder that keeps the latents in place of decoding them."""

    def __init__(self):
        self.config = type("Config", (), {"scaling_factor": 1.0})

    def decode(self, latents):
        self.latents = latents
        return type("Decoded", (), {"sample": latents})


def latents_of_the_pipeline(dit, labels, guidance, seed, scheduler):
    """Return what each call of the transformer got, and the latents at the end."""
    pipeline = DiTPipeline(dit, AutoencoderKL(block_out_channels=(8,), norm_num_groups=1, latent_channels=4), scheduler)
    pipeline.vae = Decoder()
    pipeline.set_progress_bar_config(disable=True)
    seen = []
    handle = dit.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append({**kwargs, "hidden_states": args[0]}), with_kwargs=True
    )
    generator = torch.Generator().manual_seed(seed)
    pipeline(labels, guidance, generator=[generator] * len(labels), num_inference_steps=5, output_type="pt")
    handle.remove()
    return seen, pipeline.vae.latents


@pytest.mark.parametrize(
    ("guidance", "channels", "settings"),
    [
        (4.0, 8, {}),
        (1.0, 8, {}),
        (2.0, 4, {"prediction_type": "v_prediction"}),  # 4: without learned variances
        (2.0, 4, {"prediction_type": "sample", "clip_sample": True}),
        (2.0, 4, {"timestep_spacing": "trailing", "beta_schedule": "squaredcos_cap_v2"}),
        (2.0, 4, {"steps_offset": 1, "set_alpha_to_one": False}),
    ],
)
def test_every_call_is_that_of_diffusers_own_pipeline(trajectories, guidance, channels, settings):
    dit, scheduler = tiny_dit(out_channels=channels), dit_scheduler(**settings)
    inputs = trajectories(dit, guidance, scheduler=scheduler, seed=5, timesteps=5)
    ours = list(inputs)
    labels = inputs.labels.tolist()
    theirs, result = latents_of_the_pipeline(dit, labels, guidance, 5, dit_scheduler(**settings))
    assert len(ours) == len(theirs) == 5
    ((samples, ends),) = inputs.ends()
    assert [sample.source for sample in samples] == ["trajectory 0", "trajectory 1", "trajectory 2"]
    torch.testing.assert_close(ends, result)
    for batch, call in zip(ours, theirs, strict=True):
        assert torch.equal(batch.kwargs["timestep"], call["timestep"])
        assert torch.equal(batch.kwargs["class_labels"], call["class_labels"])
        torch.testing.assert_close(batch.kwargs["hidden_states"], call["hidden_states"])
    assert not torch.allclose(ours[0].kwargs["hidden_states"], ours[-1].kwargs["hidden_states"], atol=0.1)


def test_a_guided_latent_and_its_unlabelled_half_share_a_batch_and_a_source(trajectories):
    inputs = trajectories(number=5, batch_size=4, timesteps="800,0")
    batches = list(inputs)
    assert [len(batch.samples) for batch in batches] == [4, 4, 4, 4, 2, 2]
    assert [batch.part for batch in batches] == ["timestep 800", "timestep 0"] * 3
    for batch in batches:
        labelled, unlabelled = batch.kwargs["hidden_states"].chunk(2)
        assert torch.equal(labelled, unlabelled)
        half = len(batch.samples) // 2
        assert (batch.kwargs["class_labels"][:half] < 1000).all()
        assert (batch.kwargs["class_labels"][half:] == 1000).all()
        assert [sample.source for sample in batch.samples[:half]] == [sample.source for sample in batch.samples[half:]]
    seen = samples_of(batches)
    assert {(sample.source, sample.source_index) for sample in seen} == {(f"trajectory {i}", i) for i in range(5)}
    assert len({sample.index for sample in seen}) == len(seen) == inputs.n_samples


def test_the_batch_size_and_the_order_change_only_the_batches(trajectories):
    def by_sample(**changes):
        by_key = {}
        for batch in trajectories(number=3, **changes):
            by_key |= dict(
                zip(
                    batch.samples,
                    zip(*map(batch.kwargs.get, ("hidden_states", "class_labels")), strict=True),
                    strict=True,
                )
            )
        return by_key

    expected = by_sample(batch_size=100)
    assert len(expected) == 24
    for by_key in (by_sample(batch_size=1), by_sample(shuffle=True)):
        assert by_key.keys() == expected.keys()
        for sample, (latents, label) in by_key.items():
            # Matrix products of other shapes, at every step.
            torch.testing.assert_close(latents, expected[sample][0], rtol=1e-3, atol=1e-3)
            assert label == expected[sample][1]


def test_a_limit_takes_the_first_and_the_seed_chooses(trajectories):
    def start(**changes):
        batch = next(iter(trajectories(guidance=1.0, number=4, timesteps="800,", **changes)))
        return batch.kwargs["hidden_states"], batch.kwargs["class_labels"]

    noise, labels = start()
    fewer_noise, fewer_labels = start(limit=2)
    other_noise, other_labels = start(seed=1)
    assert torch.equal(fewer_noise, noise[:2]) and torch.equal(fewer_labels, labels[:2])
    assert not torch.equal(other_noise, noise) and not torch.equal(other_labels, labels)
    assert len(start(limit=100)[0]) == 4


def test_labels_are_distinct_while_there_are_classes_left(options):
    few = LatentSpace(channels=1, size=8, classes=10)
    labels = Trajectories(few, dit_scheduler(), options(), guidance=1.0, trajectories=25).labels
    assert sorted(labels[:10].tolist()) == sorted(labels[10:20].tolist()) == list(range(10))


def test_tiny_trajectories_are_walked_once_and_in_one_batch(trajectories, calls):
    inputs = trajectories(number=6, timesteps="800,400,0", batch_size=2)  # one guided latent at a time
    assert len(list(inputs)) == 6 * 3
    list(inputs)
    list(inputs.chunks(RankSampler(1, 2)))
    assert len(calls) == VISITED.index(0)


def test_steps_are_reported_as_a_stage(dit, trajectories, none_together):
    reports = []

    def progress(*report):
        reports.append(report)

    normscope.capture(dit, trajectories(number=2, timesteps="800,400", batch_size=2), progress=progress)
    steps = [(n, of) for stage, n, of in reports if stage == "steps of trajectories"]
    assert steps == [(n, 4) for n in range(5)]
    assert [n for stage, n, _ in reports if stage == "samples"] == [0, 2, 4, 6, 8]
    normscope.capture(dit, trajectories(number=2, timesteps="800,"), progress=progress)
    assert len([stage for stage, *_ in reports if stage != "samples"]) == len(steps), "no steps, no stage of them"


def test_the_first_sample_takes_no_pass_and_no_step_follows_the_last_timestep(trajectories, calls, none_together):
    inputs = trajectories(number=2, timesteps="800,400", batch_size=2)  # one guided latent at a time
    first = inputs.first_sample()
    assert len(calls) == 0
    batches = list(inputs)
    assert torch.equal(batches[0].kwargs["hidden_states"][:1], first.kwargs["hidden_states"])
    list(inputs)
    assert len(calls) == 2 * VISITED.index(400)


def test_iterating_again_yields_the_same_also_after_an_interruption(trajectories):
    interrupted = trajectories(number=2, timesteps="800,600,400")
    next(iter(interrupted))
    for first, again in zip(trajectories(number=2, timesteps="800,600,400"), interrupted, strict=True):
        assert (first.samples, first.part) == (again.samples, again.part)
        assert torch.equal(first.kwargs["hidden_states"], again.kwargs["hidden_states"])


def test_grad_mode_inference_mode_and_the_random_state_are_kept(trajectories):
    inputs, before = trajectories(number=1, timesteps="800,600"), torch.get_rng_state()
    with torch.inference_mode():
        list(inputs)
    assert torch.equal(torch.get_rng_state(), before)
    latents = latents_of(inputs)
    assert torch.is_grad_enabled()
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in latents)
    inputs.module(**list(inputs)[1].kwargs)[0].sum().backward()


def test_steps_are_taken_in_float32_whatever_the_module_runs_in(trajectories):
    inputs = trajectories(module=tiny_dit().bfloat16(), number=1, timesteps="800,600", dtype=torch.bfloat16)
    for batch, other in zip(inputs, trajectories(number=1, timesteps="800,600"), strict=True):
        assert batch.kwargs["hidden_states"].dtype == torch.bfloat16
        torch.testing.assert_close(
            batch.kwargs["hidden_states"].float(), other.kwargs["hidden_states"], rtol=0.1, atol=0.1
        )
    assert ends_of(inputs).dtype == torch.float32


def test_a_capture_separates_timesteps_and_omits_the_steps(dit, trajectories):
    seen = normscope.capture(dit, trajectories(number=2, timesteps="800,0"), by_part=True)
    n_pairs = 2 * 2 * 16 * 16  # trajectories, halves, patches, channels
    by_part = {name: part.stats["norm_out"].n_pairs for name, part in seen.parts.items()}
    assert by_part == {"timestep 800": n_pairs, "timestep 0": n_pairs}
    assert seen.stats["norm_out"].n_pairs == 2 * n_pairs
    assert len(seen.sites) == 5


def test_descriptions(trajectories):
    for changes, description in (
        ({}, "3 DDIM trajectories of 50 steps (seed 0, guidance 4), timesteps 980, 660, 320, 0"),
        ({"timesteps": "500,"}, "3 DDIM trajectories of 50 steps (seed 0, guidance 4), timestep 500"),
        ({"limit": 1, "guidance": 1.5, "timesteps": 1}, "1 DDIM trajectory of 50 steps (seed 0, guidance 1.5), time"),
        ({"timesteps": 50, "guidance": 1}, "3 DDIM trajectories of 50 steps (seed 0, no guidance), 50 timesteps from "),
        ({"shuffle": True, "seed": 3}, "3 DDIM trajectories of 50 steps (seed 3, guidance 4, shuffled), timesteps 980"),
    ):
        assert trajectories(steps=(50,), **changes).description.startswith(description)


def test_timesteps():
    chosen = {None: [980, 660, 320, 0], 1: [480], "2": [980, 0], 50: FIFTY}
    chosen |= {"0, 980": [980, 0], "980,": [980], "20,20,40": [40, 20]}
    for request, timesteps in chosen.items():
        assert select_timesteps(FIFTY, request) == timesteps


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"timesteps": "979,0"}, "does not visit the timestep 979: its 50 go from 980 to 0. Nearest are 980 and 960."),
        ({"timesteps": "-20,"}, "does not visit the timestep -20: its 50 go from 980 to 0. Nearest are 20 and 0."),
        ({"timesteps": 0}, "The number of timesteps must be at least 1, not 0."),
        ({"timesteps": "-3"}, "The number of timesteps must be at least 1, not -3."),
        ({"timesteps": 51}, r"The trajectory has 50 timesteps, not 51.$"),
        ({"timesteps": "500"}, "has 50 timesteps, not 500. For the timestep 500 alone, write '500,'."),
        ({"timesteps": "late"}, "The timesteps 'late' cannot be understood. .*'980,0', or '980,' for one."),
        ({"timesteps": ","}, "The timesteps ',' cannot be understood."),
        ({"timesteps": "9" * 30}, "cannot be understood"),
        ({"timesteps": "٣,"}, "cannot be understood"),
        ({"guidance": 0.5}, r"The guidance is 0\.5; it has to be 1, for none, or more\."),
        ({"guidance": float("nan")}, r"The guidance is nan; it has to be 1, for none, or more\."),
    ],
)
def test_refusals(options, changes, error):
    with pytest.raises(UsageError, match=error):
        Trajectories(SPACE, dit_scheduler(), options(**changes), guidance=4.0, trajectories=1)


def test_as_few_steps_as_visit_the_requested_timesteps(trajectories):
    def walk(timesteps, train=1000):
        scheduler = dit_scheduler(num_train_timesteps=train)
        return trajectories(number=1, steps=(10, 50), scheduler=scheduler, timesteps=timesteps)

    for request, steps, timesteps in (
        (None, 10, [900, 600, 300, 0]),
        (10, 10, list(range(900, -1, -100))),
        ("900,0", 10, [900, 0]),
        ("980,0", 50, [980, 0]),
        (50, 50, FIFTY),
    ):
        assert walk(request).timesteps == timesteps
        assert f"of {steps} steps" in walk(request).description
    short = walk("6,0", train=7)
    assert short.description.startswith("1 DDIM trajectory of 7 steps")
    assert [batch.part for batch in short] == ["timestep 6", "timestep 0"]


@pytest.mark.parametrize(("shuffle", "together"), [(False, 0), (True, 4)])
def test_ranks_sample_the_trajectories_of_one_process(trajectories, shuffle, together, monkeypatch):
    monkeypatch.setattr("normscope.models.inputs.trajectories._TOGETHER", together * 4 * 8 * 8)

    def inputs():
        return trajectories(number=5, batch_size=4, timesteps="800,600", shuffle=shuffle)  # two guided ones at a time

    whole = list(inputs().chunks(ALL))
    assert [len(chunk.numbers) for chunk in whole] == [2, 2, 1]
    assert sorted(number for chunk in whole for number in chunk.numbers) == list(range(5))
    batches = [[(batch.samples, batch.kwargs["hidden_states"]) for batch in chunk.batches] for chunk in whole]
    ends = list(inputs().ends())
    for rank in range(2):
        sampler = RankSampler(rank, 2)
        for chunk, expected in zip(inputs().chunks(sampler), batches[rank::2], strict=True):
            for batch, (samples, latents) in zip(chunk.batches, expected, strict=True):
                assert batch.samples == samples
                assert torch.equal(batch.kwargs["hidden_states"], latents)
        for (samples, latents), (expected_samples, expected) in zip(inputs().ends(sampler), ends[rank::2], strict=True):
            assert samples == expected_samples
            assert torch.equal(latents, expected)
    assert {sample for some in batches for samples, _ in some for sample in samples} == set(inputs().known_samples())
    assert inputs().first_sample().samples == (batches[0][0][0][0],)


def test_a_module_that_overwrites_its_latents_makes_the_same_trajectories(dit, trajectories):
    def forward(self, hidden_states, **others):
        result = dit(hidden_states.clone(), **others)
        hidden_states.zero_()
        return result

    overwritten, expected = (trajectories(module, guidance=1.0) for module in (network_of(forward), dit))
    assert torch.equal(ends_of(overwritten), ends_of(expected))


def test_an_error_on_the_way_is_that_of_any_forward_pass(trajectories):
    def breaks_at_the_third(module, args, kwargs):
        if kwargs["timestep"][0] == VISITED[2]:
            raise ValueError("a head fell off")

    dit = tiny_dit()
    dit.register_forward_pre_hook(breaks_at_the_third, with_kwargs=True)
    error = r"DiTTransformer2DModel raised ValueError on inputs of the shapes \(2, 4, 8, 8\), \(2,\), \(2,\): a head"
    with pytest.raises(ModelError, match=error):
        next(iter(trajectories(dit, guidance=1.0, number=2, timesteps="0,")))


def test_the_last_step_starts_from_the_batches_at_the_last_timestep(dit, trajectories):
    inputs = trajectories(guidance=1.0, timesteps="0,")
    (batch,) = inputs
    predicted = result_of(dit, batch)[0][:, :4]
    step = inputs.scheduler.step(predicted, 0, batch.kwargs["hidden_states"])
    assert torch.equal(ends_of(inputs), step.prev_sample)


def test_ends_are_those_of_the_network_as_it_is_and_are_not_kept(trajectories):
    dit = tiny_dit()
    inputs = trajectories(dit)
    before, ends = latents_of(inputs), ends_of(inputs)
    parent = dit.transformer_blocks[1].norm1
    norm, parent.norm = parent.norm, torch.nn.Identity()
    others, fresh = ends_of(inputs), trajectories(dit)
    assert torch.equal(others, ends_of(fresh))
    assert latents_of(fresh)[3].ne(before[3]).any()
    parent.norm = norm
    assert (others - ends).norm() > 1e-4 * ends.norm()
    assert torch.equal(ends_of(inputs), ends)
    assert all(torch.equal(again, latents) for latents, again in zip(before, latents_of(inputs), strict=True))


@pytest.mark.slow
def test_five_steps_show_the_norms_as_fifty_do(trajectories):
    timesteps = "800,600,200,0"
    fifty = load("demo_dit", device="cpu", limit=32, timesteps=timesteps)
    scheduler, space = copy.deepcopy(fifty.inputs.scheduler), LatentSpace(channels=1, size=8, classes=10)
    five = trajectories(fifty.module, 1.0, 32, (5, 50), scheduler, space, timesteps=timesteps, batch_size=8)
    assert torch.equal(five.noise, fifty.inputs.noise[:32])
    assert "of 5 steps" in five.description
    assert "of 50 steps" in fifty.inputs.description
    both = [normscope.fit(normscope.capture(fifty.module, one), "tanh") for one in (fifty.inputs, five)]
    off = [abs(few.alpha / many.alpha - 1) for many, few in zip(*both, strict=True)]
    assert max(off[:2]) < 0.06
    assert max(off[2:]) < 0.03
    intervals = [many.intervals["alpha"] for many in both[0]]
    assert all(low < few.alpha < high for (low, high), few in zip(intervals, both[1], strict=True))
