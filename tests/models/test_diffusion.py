"""DiT from folders that diffusers' own save_pretrained writes, and from a hub that serves such folders."""

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, DiTPipeline, DiTTransformer2DModel
from loads import change_json, parameters, result_of
from safetensors.torch import load_file, save_file

from normscope.errors import ModelError, UsageError
from normscope.loading import load
from normscope.models.diffusion import _PUBLISHED

TINY = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
TINY |= {"out_channels": 8, "num_embeds_ada_norm": 5}
CONFIG = "transformer/config.json"
SCHEDULER = "scheduler/scheduler_config.json"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def tiny_dit():
    torch.manual_seed(11)
    return DiTTransformer2DModel(**TINY).eval()


@pytest.fixture(scope="session")
def saved_pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=1, latent_channels=4)
    DiTPipeline(tiny_dit(), vae, DDIMScheduler(clip_sample=False, beta_end=0.03)).save_pretrained(folder)
    return folder


@pytest.fixture
def pipeline(saved_pipeline, tmp_path):
    """Copy the pipeline's folder, to be damaged."""
    return shutil.copytree(saved_pipeline, tmp_path / "tiny")


def loaded(where, **changes):
    return load(f"diffusers:{where}", **({"device": "cpu", "limit": 2} | changes))


def test_a_pipeline_folder(pipeline):
    model = loaded(pipeline)
    assert torch.equal(parameters(model.module), parameters(tiny_dit()))
    assert not model.module.training
    assert model.provenance.kind == "file"
    assert model.provenance.description.startswith(f"{pipeline}: file diffusion_pytorch_model.safetensors (sha256 ")
    assert model.inputs.description.startswith("2 DDIM trajectories of 5 steps (seed 0, guidance 4), timesteps 800")
    assert model.inputs.scheduler.config["beta_end"] == 0.03


def test_a_folder_of_the_transformer_alone(tmp_path):
    tiny_dit().save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert torch.equal(parameters(model.module), parameters(tiny_dit()))
    assert "guidance 4, with the noise schedule of DiT-XL/2)" in model.inputs.description
    # scheduler_config.json of facebook/DiT-XL-2-256
    published = {"num_train_timesteps": 1000, "beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}
    published |= {"prediction_type": "epsilon", "clip_sample": False}
    assert {key: model.inputs.scheduler.config[key] for key in published} == published


def as_torch_checkpoint(pipeline):
    torch.save(load_file(pipeline / WEIGHTS), pipeline / "transformer" / "diffusion_pytorch_model.bin")
    (pipeline / WEIGHTS).unlink()


def as_published(pipeline):
    older = {"_class_name": "Transformer2DModel", "_diffusers_version": "0.12.0.dev0", "num_vector_embeds": None}
    change_json(pipeline / CONFIG, cross_attention_dim=None, **older)


@pytest.mark.parametrize("changed", [as_torch_checkpoint, as_published])
def test_other_formats_of_weights_and_configurations(pipeline, changed):
    changed(pipeline)
    assert torch.equal(parameters(loaded(pipeline).module), parameters(tiny_dit()))


def test_random_weights_and_those_of_a_file(pipeline, tmp_path):
    fresh = loaded(pipeline, weights="random", seed=5)
    torch.manual_seed(5)
    assert torch.equal(parameters(fresh.module), parameters(DiTTransformer2DModel(**TINY)))
    assert fresh.provenance.description == "random weights, seed 5"
    save_file(fresh.module.state_dict(), tmp_path / "fresh.safetensors")
    from_file = loaded(pipeline, weights=tmp_path / "fresh.safetensors")
    assert torch.equal(parameters(from_file.module), parameters(fresh.module))
    assert from_file.provenance.description.startswith("file fresh.safetensors (sha256 ")


def test_another_schedulers_betas_and_predictions_are_kept(pipeline):
    other = DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    other.save_pretrained(pipeline / "scheduler")
    scheduler = loaded(pipeline).inputs.scheduler
    assert torch.equal(scheduler.alphas_cumprod, other.alphas_cumprod)
    assert scheduler.config["prediction_type"] == "v_prediction"


def without_transformer(folder):
    index = json.loads((folder / "model_index.json").read_text())
    del index["transformer"]
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}))


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def damaged(folder):
    (folder / WEIGHTS).write_bytes(b"damaged")


REFUSED = {
    "a Flux": ((CONFIG, {"_class_name": "FluxModel"}), "is a FluxModel. Those that are no DiT need .*py:FILE:FACTORY"),
    "many layers": ((CONFIG, {"num_layers": "many"}), "does not make a DiTTransformer2DModel"),
    "a layer fewer": (
        (CONFIG, {"num_layers": 1}),
        r"does not fit diffusers:.*transformer_blocks\.1.* is not in the mo",
    ),
    "a layer more": ((CONFIG, {"num_layers": 3}), r"does not fit diffusers:.*transformer_blocks\.2.* is missing"),
    "another scheduler": (
        (SCHEDULER, {"_class_name": "FlowMatchEulerDiscreteScheduler"}),
        "EulerDiscreteScheduler with predictions of",
    ),
    "a flow": (
        (SCHEDULER, {"prediction_type": "flow"}),
        "The scheduler of .* with predictions of flow, has no DDIM steps",
    ),
    "wild betas": ((SCHEDULER, {"beta_schedule": "wild"}), "does not make a DDIMScheduler: wild"),
    "an empty folder": (emptied, "contains no transformer in the layout of diffusers"),
    "no weights": (
        lambda folder: (folder / WEIGHTS).unlink(),
        r"has neither .*\.safetensors nor .*\.bin\. Name a file with --weights",
    ),
    "no transformer": (without_transformer, "is a StableDiffusionPipeline, which has no transformer"),
    "damaged weights": (damaged, "cannot be read"),
}


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refusals_of_folders(pipeline, change, sentence):
    if callable(change):
        change(pipeline)
    else:
        change_json(pipeline / change[0], **change[1])
    with pytest.raises(ModelError, match=sentence):
        loaded(pipeline)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"guidance": 0.0}, "The guidance is 0"), ({"timesteps": "7,"}, "does not visit the timestep 7")],
)
def test_options_are_checked_before_weights_are_read(pipeline, options, sentence):
    damaged(pipeline)
    with pytest.raises(UsageError, match=sentence):
        loaded(pipeline, **options)


def test_the_library_prints_nothing(pipeline, capfd):
    list(loaded(pipeline, dtype="bfloat16", timesteps="980,").inputs)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("changes", "data"),
    [
        ({"limit": None}, "4 DDIM trajectories of 5 steps (seed 0, guidance 4), timesteps 800, 600, 200, 0"),
        ({"timesteps": "980,"}, "2 DDIM trajectories of 50 steps (seed 0, guidance 4), timestep 980"),
    ],
)
def test_full_size_trajectories_are_short_unless_timesteps_take_more(pipeline, changes, data):
    assert loaded(pipeline, **changes).about["data"] == data


def test_dit_xl_has_the_size_in_its_paper():
    def numbers(module):
        return sum(parameter.numel() for parameter in module.parameters())

    module = DiTTransformer2DModel.from_config(_PUBLISHED["facebook/DiT-XL-2-256"] | {"num_layers": 1})
    block = module.transformer_blocks[0]
    embedders = numbers(block.norm1.emb)  # diffusers has them once a block, the paper's own code once
    outside = numbers(module) - numbers(block) + module.pos_embed.pos_embed.numel()  # there a frozen parameter
    assert 28 * (numbers(block) - embedders) + embedders + outside == 675_129_632
    assert _PUBLISHED["facebook/DiT-XL-2-512"]["sample_size"] == 512 // 8


def serve(hub, folder, repo):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    hub.files |= {f"{repo}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


@pytest.mark.slow
def test_repositories_of_the_hub_and_then_of_the_cache(hub, load_each, pipeline):
    model = loaded(pipeline, limit=1)
    batch = next(iter(model.inputs))
    expected = model.outputs.read(result_of(model.module, batch), batch).flatten()[:500]
    serve(hub, pipeline, "tiny/dit")
    as_torch_checkpoint(pipeline)
    serve(hub, pipeline, "tiny/old")  # as the first that were published: a torch checkpoint alone
    names = [{"name": f"diffusers:tiny/{name}", "limit": 1} for name in ("dit", "old")]
    names.append(names[1] | {"weights": "random"})
    online, _ = load_each(*names, HF_ENDPOINT=hub.url)
    weights = [result["about"]["weights"] for result in online]
    assert weights == [f"tiny/dit@{hub.commit[:12]}", f"tiny/old@{hub.commit[:12]}", "random weights, seed 0"]
    for result in online[:2]:
        torch.testing.assert_close(torch.tensor(result["outputs"]), expected, rtol=1e-4, atol=1e-5)
    assert not any("vae/" in request for request in hub.requests)

    hub.requests.clear()
    offline, _ = load_each(*names, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert offline == online
    assert hub.requests == []
