"""A tiny PixArt pipeline in a folder: its calls against those that a hook records."""

import re
import shutil

import pytest
import torch
from accelerate.utils import modeling
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, PixArtAlphaPipeline, PixArtTransformer2DModel
from loads import change_json, result_of, samples_of
from safetensors.torch import load_file, save_file

import normscope
from normscope.errors import MemoryEndedError, ModelError, UsageError
from normscope.inputs.batch import Batch
from normscope.inputs.chunks import ALL, RankSampler
from normscope.loading import load
from normscope.models.diffusion import OTHERWISE, PROMPTS

transformers = pytest.importorskip("transformers")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="session")
def saved(t5, tmp_path_factory):
    folder, (tokenizer, text) = tmp_path_factory.mktemp("pixart"), t5
    torch.manual_seed(3)
    sizes = {"sample_size": 32, "patch_size": 4, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 3}
    channels = {"caption_channels": 16, "cross_attention_dim": 24, "in_channels": 4, "out_channels": 8}
    transformer = PixArtTransformer2DModel(**sizes, **channels)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = AutoencoderKL(**blocks, block_out_channels=(4,) * 4, norm_num_groups=1, latent_channels=4)
    encoder = transformers.T5EncoderModel(text)
    PixArtAlphaPipeline(tokenizer, encoder, vae, transformer, DDIMScheduler()).save_pretrained(folder)
    return folder


@pytest.fixture
def pixart(saved, tmp_path):
    """Copy the folder, to be damaged."""
    return shutil.copytree(saved, tmp_path / "pixart")


def loaded(folder, **changes):
    return load(f"diffusers:{folder}", **({"device": "cpu", "limit": 1} | changes))


@pytest.mark.parametrize("guidance", [None, 1.0])
def test_batches_are_the_calls_of_the_pipeline_itself(saved, guidance):
    pipeline = DiffusionPipeline.from_pretrained(saved)
    seen = []
    pipeline.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0].clone(), kwargs)), with_kwargs=True
    )
    chosen = {} if guidance is None else {"guidance_scale": guidance}
    generator = torch.Generator().manual_seed(7)
    pipeline(PROMPTS[0], generator=generator, output_type="latent", clean_caption=False, **chosen)
    model = loaded(saved, seed=7, guidance=guidance, timesteps=20)
    batches = list(model.inputs)
    assert len(batches) == len(seen) == 20
    for batch, (latents, kwargs) in zip(batches, seen, strict=True):
        torch.testing.assert_close(batch.kwargs["hidden_states"], latents)
        assert batch.part == f"timestep {int(kwargs['timestep'][0])}"
        for key in ("timestep", "encoder_hidden_states", "encoder_attention_mask"):
            torch.testing.assert_close(batch.kwargs[key], kwargs[key])
        assert len(batch.samples) == (2 if guidance is None else 1)
    assert model.inputs.n_samples == 20 * len(batches[0].samples)


def test_each_prompt_is_a_source_and_each_timestep_a_part(saved):
    model = loaded(saved, limit=2, timesteps="950,0")
    assert model.about["data"] == (
        "PixArtAlphaPipeline on 2 prompts in 20 steps (seed 0, its own guidance), timesteps 950, 0"
    )
    samples = samples_of(model.inputs)
    assert [sample.source for sample in samples] == ["prompt 0"] * 4 + ["prompt 1"] * 4
    assert len({sample.index for sample in samples}) == 8
    seen = normscope.capture(model.module, model.inputs, verify=True, by_part=True)
    assert list(seen.parts) == ["timestep 950", "timestep 0"]
    assert seen.stats["norm_out"].n_pairs == 8 * 64 * 24  # samples, patches, channels


def test_no_step_follows_the_last_timestep(saved):
    model = loaded(saved, timesteps="950,700")
    calls = []
    model.module.norm_out.register_forward_pre_hook(lambda *_: calls.append(1))
    assert len(list(model.inputs)) == len(list(model.inputs)) == 2
    assert len(calls) == len(range(950, 699, -50)), "what was seen once is kept"


def test_weights(pixart):
    trained, fresh = loaded(pixart), loaded(pixart, weights="random", seed=4)
    assert trained.provenance.kind == "file"
    assert trained.about["weights"].startswith(f"{pixart}: transformer (sha256 ")
    state = trained.module.state_dict()
    assert all(torch.equal(state[key], value) for key, value in load_file(pixart / WEIGHTS).items())
    assert fresh.about["weights"] == "random weights, seed 4"
    assert not torch.equal(fresh.module.proj_out.weight, trained.module.proj_out.weight)


def without_bias(folder):
    state = load_file(folder / WEIGHTS)
    del state["proj_out.bias"]
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


FOREIGN_CODE = "asks for code that is not diffusers' own"
REFUSED = {
    "missing weights": (without_bias, r"weights of diffusers:.* do not fit it: proj_out\.bias"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"weights of diffusers:.* do not load"),
    "a pipeline's code": ({"_class_name": ["pipeline", "My"]}, FOREIGN_CODE),
    "an encoder's code": ({"text_encoder": ["my_code", "My"]}, FOREIGN_CODE),
    "a transformer's code": ({"transformer": ["diffusers", "My"]}, FOREIGN_CODE),
}


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refusals_of_folders(pixart, change, sentence):
    if callable(change):
        change(pixart)
    else:
        change_json(pixart / "model_index.json", **change)
    with pytest.raises(ModelError, match=sentence):
        loaded(pixart)


@pytest.mark.parametrize(
    ("options", "sentence"), [({"data": "."}, "reads no data"), ({"timesteps": "7,"}, "does not visit the timestep 7")]
)
def test_options_that_do_not_apply_are_refused(saved, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        loaded(saved, **options)


def test_a_pipeline_that_never_calls_its_transformer_is_refused(saved, monkeypatch):
    def refusing(self, *args, **kwargs):
        raise ValueError("`image` is needed")

    monkeypatch.setattr(PixArtAlphaPipeline, "check_inputs", refusing)
    with pytest.raises(ModelError, match=r"does not sample from the prompt .* alone: ValueError: `image` is needed"):
        loaded(saved)


def test_outputs_are_read_without_the_variances(saved):
    model = loaded(saved, timesteps="950,")
    (batch,) = model.inputs
    record = result_of(model.module, Batch(kwargs=batch.kwargs | {"return_dict": True}))
    read = model.outputs.read(result_of(model.module, batch), batch)
    assert model.outputs.kind == "prediction"
    assert record.sample.shape[1] == 8
    assert torch.equal(read, record.sample.chunk(2, dim=1)[0])  # as PixArtAlphaPipeline takes them apart
    assert torch.equal(model.outputs.read(record, batch), read)


def test_each_prompt_is_a_chunk(saved):
    inputs = loaded(saved, limit=3, timesteps="950,").inputs
    whole = [[batch.samples for batch in chunk.batches] for chunk in inputs.chunks(ALL)]
    assert [chunk.numbers for chunk in inputs.chunks(RankSampler(1, 2, {0}))] == [[2]]
    assert [samples[0].source for (samples,) in whole] == ["prompt 0", "prompt 1", "prompt 2"]
    assert inputs.first_sample().samples == whole[0][0][:1]


def test_a_spread_transformer_has_the_same_capture(saved, monkeypatch, tmp_path):
    whole = loaded(saved)
    free = modeling.get_max_memory
    monkeypatch.setattr(modeling, "get_max_memory", lambda given=None: free(given or {"cpu": 55_000}))
    apart = loaded(saved, device="auto", device_map="auto")
    assert {tensor.is_meta for tensor in apart.module.parameters()} == {True, False}
    path = tmp_path / "seen.safetensors"
    files = set()
    for network in (whole, apart):
        normscope.save_capture(normscope.capture(network, verify=True), path)
        files.add(path.read_bytes())
    assert len(files) == 1


@pytest.mark.parametrize(
    ("at_call", "error", "kind", "error_words"),
    [
        (
            4,
            ValueError("a head fell off.\nand more"),
            ModelError,
            f"A PixArtAlphaPipeline does not sample from the prompt {PROMPTS[0]!r} alone: ValueError: a head fell off. "
            f"{OTHERWISE}",
        ),
        (2, torch.OutOfMemoryError("no memory"), MemoryEndedError, "takes more memory as it samples than there is"),
    ],
)
def test_an_error_during_sampling_is_reported(saved, at_call, error, kind, error_words):
    model, calls = loaded(saved, timesteps="950,700"), []

    def before(*_):
        calls.append(1)
        if len(calls) == at_call:
            raise error

    model.module.proj_out.register_forward_pre_hook(before)
    with pytest.raises(kind, match=re.escape(error_words)) as caught:
        list(model.inputs)
    assert caught.value.__cause__ is error
