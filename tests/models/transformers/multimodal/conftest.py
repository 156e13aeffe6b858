"""Folders of tiny networks that see or hear, as transformers saves them, each with its processor; made weights."""

import copy
from pathlib import Path

import pytest
import soundfile
import torch
import transformers
from PIL import Image

SIDE = 32
SQUARE = {"height": SIDE, "width": SIDE}
ENCODER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCHED = ENCODER | {"image_size": SIDE, "patch_size": 8}
SWIN = {"image_size": SIDE, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
DECODER = {f"decoder_{key}": value for key, value in ENCODER.items()}
SAM_DECODER = {"hidden_size": 8, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SAM = {
    "vision_config": PATCHED | {"mlp_dim": 32, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1]},
    "prompt_encoder_config": {"hidden_size": 8, "image_size": SIDE, "patch_size": 8, "image_embedding_size": 4},
    "mask_decoder_config": SAM_DECODER | {"iou_head_hidden_dim": 16},
}


def whole(name, **changes):
    return lambda: getattr(transformers, name)(size=SQUARE, **changes)


def cropped(name):
    return lambda: getattr(transformers, name)(size={"shortest_edge": SIDE}, crop_size=SQUARE)


# What a folder's configuration names, its configuration, and its processor.
SEEING = {
    "vit": ("ViTForImageClassification", PATCHED | {"num_labels": 7}, whole("ViTImageProcessor")),
    "swin": ("SwinForImageClassification", SWIN | {"num_labels": 6}, whole("ViTImageProcessor")),
    "mae": ("ViTMAEForPreTraining", PATCHED | DECODER, whole("ViTImageProcessor")),
    "sam": ("SamModel", SAM, lambda: transformers.SamImageProcessor(size={"longest_edge": SIDE}, pad_size=SQUARE)),
    "clip_vision": ("CLIPVisionModelWithProjection", PATCHED, cropped("CLIPImageProcessor")),
    "siglip2_vision": (
        "Siglip2VisionModel",
        ENCODER | {"patch_size": 8, "num_patches": 16},
        lambda: transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=20),
    ),
}
WAVES = ENCODER | {"vocab_size": 30, "conv_dim": [8] * 7, "num_feat_extract_layers": 7, "classifier_proj_size": 16}
WAVES |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
LAYERED = WAVES | {"feat_extract_norm": "layer", "do_stable_layer_norm": True}  # as the large ones have it
WHISPER = {"d_model": 16, "num_mel_bins": 40, "max_source_positions": 200, "max_target_positions": 60}  # 200: 4 s
for side in ("encoder", "decoder"):
    WHISPER |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
WHISPER |= {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 299}
SPECTRAL = ENCODER | {"patch_size": 8, "max_length": 290, "num_mel_bins": 32, "frequency_stride": 6, "time_stride": 6}


def waves(**changes):
    return lambda: transformers.Wav2Vec2FeatureExtractor(**changes)


def mel():
    return transformers.WhisperFeatureExtractor(feature_size=40, chunk_length=4)


def spectrogram():
    return transformers.ASTFeatureExtractor(num_mel_bins=32, max_length=290)


HEARING = {
    "wav2vec2": ("Wav2Vec2ForCTC", WAVES, waves()),
    "wav2vec2_large": ("Wav2Vec2ForPreTraining", LAYERED, waves(return_attention_mask=True)),
    "wav2vec2_classes": ("Wav2Vec2ForSequenceClassification", WAVES | {"num_labels": 5}, waves()),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, mel),
    "ast": ("ASTForAudioClassification", SPECTRAL | {"num_labels": 9}, spectrogram),
}
READING = {"vocab_size": 300, "max_position_embeddings": 48} | ENCODER
LLAMA = ENCODER | {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 2048}
SPECIAL = ["<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE, START, END, PAD, VIDEO = range(258, 263)  # behind the 256 bytes and two tokens more
BOTH = {"text_config": READING, "vision_config": PATCHED, "projection_dim": 8}
LLAVA = {"text_config": LLAMA, "vision_config": PATCHED | {"model_type": "clip_vision_model"}}
LLAVA |= {"image_token_index": IMAGE, "image_token_id": IMAGE}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN = {
    "text_config": LLAMA | {"model_type": "qwen2_vl_text", "num_key_value_heads": 1, "rope_parameters": ROPE},
    "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2},
    "image_token_id": PAD,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def clip(tokenizer):
    return transformers.CLIPProcessor(cropped("CLIPImageProcessor")(), tokenizer)


def siglip(tokenizer):
    return transformers.SiglipProcessor(whole("SiglipImageProcessor")(), tokenizer)


def llava(tokenizer):
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaProcessor(cropped("CLIPImageProcessor")(), tokenizer, patch_size=8, **strategy)


def qwen(tokenizer):
    sizes, edges = {"patch_size": 8, "merge_size": 2}, {"shortest_edge": 32 * 32, "longest_edge": 48 * 48}
    image, video = transformers.Qwen2VLImageProcessor(size=edges, **sizes), transformers.Qwen2VLVideoProcessor(**sizes)
    return transformers.Qwen2VLProcessor(image, tokenizer, video, chat_template=TEMPLATE)


PAIRED = {
    "clip": ("CLIPModel", BOTH, clip),
    "siglip": ("SiglipModel", BOTH, siglip),
    "llava": ("LlavaForConditionalGeneration", LLAVA, llava),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", QWEN, qwen),
}
KINDS = {**SEEING, **HEARING, **PAIRED}
QUICK = ("vit", "mae", "sam", "wav2vec2", "whisper", "ast", "clip", "llava")


def pytest_collection_modifyitems(items):
    """Mark slow what is of a kind that others stand for."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        kind = getattr(item, "callspec", None) and item.callspec.params.get("kind")
        if kind in KINDS and kind not in QUICK:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def saved(tokenizer, tmp_path_factory):
    """Save a tiny network of a kind, with weights that no seed of the tests makes, and return its folder."""
    root, folders = tmp_path_factory.mktemp("multimodal"), {}

    with_special = copy.deepcopy(tokenizer)
    with_special.add_special_tokens({"additional_special_tokens": SPECIAL})

    def save(kind):
        if kind not in folders:
            name, changes, processor = KINDS[kind]
            network = getattr(transformers, name)
            folder = folders[kind] = root / kind
            with torch.random.fork_rng():
                torch.manual_seed(1234)
                network(network.config_class(**changes)).save_pretrained(folder)
            made = processor(with_special) if kind in PAIRED else processor()
            made.save_pretrained(folder)
            if kind == "whisper":
                tokenizer.save_pretrained(folder)
        return folders[kind]

    return save


@pytest.fixture
def images(tmp_path):
    """Make a folder of three images of three sizes, one of them a square."""
    folder = tmp_path / "images"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, shape in {"a.png": (48, 64, 3), "b.png": (40, 40, 3), "c.jpg": (60, 36, 3)}.items():
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(folder / name)
    return folder


@pytest.fixture
def recordings(tmp_path):
    """Make a folder of three recordings, of which one is in stereo, one at another rate and two have a transcript."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, (seconds, rate, channels) in {"a": (1.1, 16_000, 1), "b": (2.2, 16_000, 2), "c": (0.7, 8_000, 1)}.items():
        noise = 0.1 * torch.randn(round(seconds * rate), channels, generator=generator)
        soundfile.write(folder / f"{name}.wav", noise.numpy(), rate)
    (folder / "a.txt").write_text("What is said.\n")
    (folder / "c.txt").write_text("And a\nsecond line.\n")
    return folder


@pytest.fixture
def pairs(images):
    """Give the images texts of three lengths."""
    for name, text in {"a": "A short one.", "b": "A longer line, of more words.", "c": "Another!"}.items():
        (images / f"{name}.txt").write_text(f"{text}\n")
    return images
