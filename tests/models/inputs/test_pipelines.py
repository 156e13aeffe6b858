"""A tiny PixArt pipeline in a folder that diffusers writes: its calls against those that a hook of ours sees."""

import json
import shutil

import pytest
import torch
from accelerate.utils import modeling
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, PixArtAlphaPipeline, PixArtTransformer2DModel
from safetensors.torch import load_file, save_file

import normscope
from normscope.errors import MemoryEndedError, ModelError, UsageError
from normscope.inputs.chunks import ALL, Share
from normscope.loading import load
from normscope.models.diffusion import OTHERWISE, PROMPTS

transformers = pytest.importorskip("transformers")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="session")
def saved(t5, tmp_path_factory):
    folder, (tokenizer, text) = tmp_path_factory.mktemp("pixart"), t5
    torch.manual_seed(3)
    transformer = PixArtTransformer2DModel(
        sample_size=32,
        patch_size=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=16,
        cross_attention_dim=24,
        in_channels=4,
        out_channels=8,
    )
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4,) * 4,
        norm_num_groups=1,
        latent_channels=4,
    )
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
    pipeline(
        PROMPTS[0], generator=torch.Generator().manual_seed(7), output_type="latent", clean_caption=False, **chosen
    )

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
    samples = [sample for batch in model.inputs for sample in batch.samples]
    assert [sample.source for sample in samples] == ["prompt 0"] * 4 + ["prompt 1"] * 4
    assert len({sample.index for sample in samples}) == 8
    seen = normscope.capture(model.module, model.inputs, verify=True, by_part=True)
    assert list(seen.parts) == ["timestep 950", "timestep 0"]
    assert seen.stats["norm_out"].n_pairs == 8 * 64 * 24  # samples, patches, channels


def test_no_step_is_taken_after_the_last_that_is_asked_for(saved):
    model = loaded(saved, timesteps="950,700")
    calls = []
    model.module.norm_out.register_forward_pre_hook(lambda *_: calls.append(1))
    next(iter(model.inputs))
    assert len(calls) == 1
    assert len(list(model.inputs)) == len(list(model.inputs)) == 2
    assert len(calls) == 1 + len(range(950, 699, -50)), "what was seen once is kept"


def test_weights(pixart):
    trained, fresh = loaded(pixart), loaded(pixart, weights="random", seed=4)
    assert trained.provenance.kind == "file"
    assert trained.about["weights"].startswith(f"{pixart}: transformer (sha256 ")
    state = trained.module.state_dict()
    assert all(torch.equal(state[key], value) for key, value in load_file(pixart / WEIGHTS).items())
    assert fresh.about["weights"] == "random weights, seed 4"
    assert not torch.equal(fresh.module.proj_out.weight, trained.module.proj_out.weight)


def test_weights_that_do_not_fit(pixart):
    state = load_file(pixart / WEIGHTS)
    del state["proj_out.bias"]
    save_file(state, pixart / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights of diffusers:.* do not fit it: proj_out\.bias"):
        loaded(pixart)
    (pixart / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"weights of diffusers:.* do not load"):
        loaded(pixart)


@pytest.mark.parametrize(
    "changes",
    [
        {"_class_name": ["pipeline", "MyPipeline"]},
        {"text_encoder": ["my_code", "Encoder"]},
        {"transformer": ["diffusers", "My"]},
    ],
)
def test_code_that_comes_along_is_not_run(pixart, changes):
    index = json.loads((pixart / "model_index.json").read_text())
    (pixart / "model_index.json").write_text(json.dumps(index | changes))
    with pytest.raises(ModelError, match="asks for code that is not diffusers' own"):
        loaded(pixart)


def test_what_does_not_apply(saved, tmp_path):
    with pytest.raises(UsageError, match="reads no data"):
        loaded(saved, data=tmp_path)
    with pytest.raises(UsageError, match="does not visit the timestep 7"):
        loaded(saved, timesteps="7,")


def test_its_output_is_read_without_the_variances(saved):
    model = loaded(saved, timesteps="950,")
    (batch,) = model.inputs
    with torch.no_grad():
        record = model.module(**batch.kwargs | {"return_dict": True})
        read = model.outputs.read(model.module(**batch.kwargs), batch)
    assert model.outputs.kind == "prediction"
    assert record.sample.shape[1] == 8
    assert torch.equal(read, record.sample.chunk(2, dim=1)[0])  # as PixArtAlphaPipeline takes them apart
    assert torch.equal(model.outputs.read(record, batch), read)


def test_a_prompt_is_a_chunk_of_its_own(saved):
    inputs = loaded(saved, limit=3, timesteps="950,").inputs
    inputs.batch_size = 8
    whole = [[batch.samples for batch in chunk.batches] for chunk in inputs.chunks(ALL)]
    assert [chunk.numbers for chunk in inputs.chunks(Share(1, 2, {0}))] == [[2]]
    assert [samples[0].source for (samples,) in whole] == ["prompt 0", "prompt 1", "prompt 2"]
    assert inputs.n_inputs == 3
    assert inputs.first_sample().samples == whole[0][0][:1]


def test_a_spread_transformer_sees_the_same(saved, monkeypatch, tmp_path):
    whole = loaded(saved)
    free = modeling.get_max_memory
    monkeypatch.setattr(modeling, "get_max_memory", lambda given=None: free(given or {"cpu": 55_000}))
    apart = loaded(saved, device="auto", device_map="auto")
    held = [tensor.is_meta for tensor in apart.module.parameters()]
    assert any(held) and not all(held)
    files = []
    for number, network in enumerate((whole, apart)):
        seen = normscope.capture(network.module, network.inputs, about=network.about, verify=True)
        normscope.save_capture(seen, tmp_path / f"{number}.safetensors")
        files.append((tmp_path / f"{number}.safetensors").read_bytes())
    assert files[0] == files[1]


def failing(model, at_call, error):
    """Let a network raise at one of its calls, counted from 1."""
    calls = []

    def before(*_):
        calls.append(1)
        if len(calls) == at_call:
            raise error

    model.module.proj_out.register_forward_pre_hook(before)


def test_an_error_in_the_middle_of_sampling_is_a_sentence(saved):
    model = loaded(saved, timesteps="950,700")
    failing(model, 4, ValueError("a head fell off.\nand more"))
    with pytest.raises(ModelError) as caught:
        list(model.inputs)
    assert str(caught.value) == (
        f"A PixArtAlphaPipeline raised an error in step 3 of sampling for the prompt {PROMPTS[0]!r}: ValueError: a "
        f"head fell off. {OTHERWISE}"
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_memory_that_ends_in_sampling_is_not_the_pipelines_mistake(saved):
    model = loaded(saved, timesteps="950,700")
    failing(model, 2, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(MemoryEndedError, match="PixArtAlphaPipeline takes more memory as it samples than there is"):
        list(model.inputs)


def test_a_pipeline_that_never_calls_its_transformer_is_refused(saved, monkeypatch):
    def refusing(self, *args, **kwargs):
        raise ValueError("`image` is needed")

    monkeypatch.setattr(PixArtAlphaPipeline, "check_inputs", refusing)
    with pytest.raises(ModelError, match="does not sample from a prompt alone: ValueError: `image` is needed"):
        loaded(saved)
