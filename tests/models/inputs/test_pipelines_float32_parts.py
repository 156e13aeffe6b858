"""Classes of diffusers that keep parts in float32: loaded through accelerate, in the dtypes that diffusers gives."""

import diffusers
import pytest
import torch
from diffusers.utils import import_utils
from loads import assert_same_weights

import normscope
from normscope.errors import ModelError
from normscope.loading import load
from normscope.models import diffusion
from normscope.runtime.network import run

transformers = pytest.importorskip("transformers")

WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "in_channels": 4, "out_channels": 4}
PIXART = WAN | {"sample_size": 8, "caption_channels": 16, "cross_attention_dim": 24}
WAN |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 16, "rope_max_seq_len": 32}
TRANSFORMERS = {
    "WanTransformer3DModel": WAN,
    "ChronoEditTransformer3DModel": WAN,
    "SkyReelsV2Transformer3DModel": WAN,
    "WanVACETransformer3DModel": WAN | {"vace_layers": [0], "vace_in_channels": 12},
    "PixArtTransformer2DModel": PIXART,  # which keeps nothing in float32
}


def made(kind):
    torch.manual_seed(0)
    return getattr(diffusers, kind)(**TRANSFORMERS[kind])


@pytest.fixture(scope="session")
def wan(t5, tmp_path_factory):
    """A tiny Wan pipeline in a folder."""
    folder, (tokenizer, text) = tmp_path_factory.mktemp("wan"), t5
    torch.manual_seed(3)
    sizes = {"base_dim": 3, "z_dim": 4, "dim_mult": [1] * 4, "num_res_blocks": 1}
    latents = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = diffusers.AutoencoderKLWan(**sizes, **latents, temperal_downsample=[False, True, True])
    diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=transformers.UMT5EncoderModel(transformers.UMT5Config(**text.to_diff_dict())),
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=made("WanTransformer3DModel"),
        transformer_2=None,
    ).save_pretrained(folder)
    return folder


def loaded(folder, **options):
    return load(f"diffusers:{folder}", **({"device": "cpu", "limit": 1, "timesteps": 1} | options))


@pytest.fixture
def small(monkeypatch):
    """Let Wan sample a video of one frame of 32 × 32 pixels, and not of 81 of 480 × 832."""
    if diffusers.__version__.startswith("0.36"):
        pytest.importorskip("ftfy")  # which this version calls without importing it where it is missing
    sample = diffusers.WanPipeline.__call__

    def smaller(self, prompt=None, generator=None, output_type=None, guidance_scale=5.0):
        given = {"generator": generator, "output_type": output_type, "guidance_scale": guidance_scale}
        video = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 2, "max_sequence_length": 16}
        return sample(self, prompt, **given, **video)

    monkeypatch.setattr(diffusers.WanPipeline, "__call__", smaller)


def assert_loads(kind, folder):
    module = made(kind)
    module.save_pretrained(folder)
    read, provenance = diffusion.read_transformer("this", type(module), folder, None)
    assert provenance.kind == "file" and "converted" not in provenance.description
    assert_same_weights(read, module)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_every_class_loads_with_the_weights_that_were_saved(kind, tmp_path):
    assert_loads(kind, tmp_path)


def test_wan_is_captured(wan, small):
    network = loaded(wan)
    seen = normscope.capture(network.module, network.inputs, verify=True)
    assert any(name.endswith("norm1") for name in seen.stats)
    assert {tensor.dtype for tensor in network.module.parameters()} == {torch.float32}


def test_in_bfloat16_wan_has_the_dtypes_that_diffusers_gives_it(wan, small):
    network = loaded(wan, dtype="bfloat16")
    theirs = diffusers.WanTransformer3DModel.from_pretrained(wan / "transformer", torch_dtype=torch.bfloat16)
    ours, expected = (
        {
            name: tensor.dtype
            for tensors in (module.named_parameters(), module.named_buffers())
            for name, tensor in tensors
        }
        for module in (network.module, theirs)
    )
    assert ours == expected and {torch.float32, torch.bfloat16} <= set(ours.values())
    assert network.about["weights"].endswith(", converted from float32 to bfloat16")
    seen = normscope.capture(network.module, network.inputs, verify=True)
    assert set(seen.about["dtype"].split(" and ")) == {"float32", "bfloat16"}


def test_without_accelerate_only_parts_in_float32_of_saved_weights_are_refused(wan, small, monkeypatch, tmp_path):
    monkeypatch.setattr(import_utils, "_accelerate_available", False)
    assert_loads("PixArtTransformer2DModel", tmp_path)
    with pytest.raises(ModelError, match=r"keep_in_fp32_modules.* pip install 'accelerate>=1.2'"):
        loaded(wan)
    network = loaded(wan, weights="random")
    assert network.inputs.pipeline.transformer is network.module
    assert normscope.capture(network.module, network.inputs).n_samples > 0


def test_a_swap_in_half_precision_loads_with_the_same_outputs(wan, small, tmp_path):
    network = loaded(wan, dtype="bfloat16")
    assert {tensor.dtype for tensor in network.module.parameters()} == {torch.float32, torch.bfloat16}
    normscope.swap(network, "dyt", normscope.capture(network, layers=1))
    batch = next(iter(network.inputs))
    expected = run(network.module, batch)[0]
    folder = normscope.save_swapped(network.module, tmp_path / "swap", network.about)
    again = normscope.load_swapped(folder, dtype="bfloat16", device="cpu", limit=1, timesteps=1)
    assert torch.equal(run(again.module, batch)[0], expected)
