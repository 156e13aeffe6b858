"""Each padding mask leaves out the tokens of its own stream: networks with several streams of equal length."""

import pytest
import torch
from networks import inputs_of, network_of, numbered_samples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import normscope
from normscope.errors import DataError
from normscope.inputs.batch import Batch
from normscope.inputs.held_out import learned_and_held_out

LENGTHS, POSITIONS, WIDTH = (9, 6, 4), 9, 16
REAL = torch.arange(POSITIONS) < torch.tensor(LENGTHS)[:, None]  # 19 tokens
WRITTEN = torch.arange(POSITIONS) < torch.tensor([[9], [3], [2]])  # 14 tokens
ALL = torch.ones(3, POSITIONS, dtype=torch.bool)  # 27 tokens
ARCHITECTURE = {
    **{"vocab_size": 50, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 32, "max_position_embeddings": 20},
}
IMAGES = {**ARCHITECTURE, "image_size": 32, "patch_size": 8}  # 17 tokens
SEQ2SEQ = {"vocab_size": 50, "d_model": WIDTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
for side in ("encoder", "decoder"):
    SEQ2SEQ |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
SEQ2SEQ["decoder_start_token_id"] = 1
PERCEIVER = {
    **{"vocab_size": 50, "num_latents": POSITIONS, "d_latents": WIDTH, "d_model": WIDTH, "num_blocks": 1},
    **{"num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2},
    "max_position_embeddings": POSITIONS,
}


@pytest.fixture(autouse=True)
def _each_module_by_itself():
    """Without nested tensors, in which encoders of torch leave out the padding and hooks cannot count it."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def ids(samples: int = 3, positions: int = POSITIONS) -> torch.Tensor:
    return torch.randint(3, 40, (samples, positions))


def of_transformers(name: str) -> nn.Module:
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    match name:
        case "T5ForConditionalGeneration":
            own = {"d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
            config = library.T5Config(vocab_size=50, d_model=WIDTH, **own)
        case "BartModel" | "BartForConditionalGeneration":
            config = library.BartConfig(max_position_embeddings=40, **SEQ2SEQ)
        case "WhisperForConditionalGeneration":
            own = {"num_mel_bins": 8, "max_source_positions": POSITIONS, "max_target_positions": 20}
            config = library.WhisperConfig(suppress_tokens=None, begin_suppress_tokens=None, **own, **SEQ2SEQ)
        case "CLIPModel":
            text = {**ARCHITECTURE, "bos_token_id": 1, "eos_token_id": 49}
            config = library.CLIPConfig(text_config=text, vision_config=IMAGES, projection_dim=8)
        case "BlipForConditionalGeneration":
            special = {"bos_token_id": 1, "pad_token_id": 0, "sep_token_id": 2}
            text = {**ARCHITECTURE, **special, "encoder_hidden_size": WIDTH}
            config = library.BlipConfig(text_config=text, vision_config=IMAGES, projection_dim=WIDTH)
        case "PerceiverModel":
            config = library.PerceiverConfig(**PERCEIVER)
            reading = library.models.perceiver.modeling_perceiver.PerceiverTextPreprocessor(config)
            return library.PerceiverModel(config, input_preprocessor=reading).eval()
        case "BertForMaskedLM":
            config = library.BertConfig(**ARCHITECTURE)
        case "ViTModel":
            config = library.ViTConfig(**IMAGES)
    return getattr(library, name)(config).eval()


def assert_counted(model, batches, real, **options) -> None:
    """Compare the sums of each norm with those over the real tokens, by path, of its inputs as hooks see them."""
    seen = normscope.capture(model, batches, **options)
    run = options.get("forward") or (lambda model, batch: model(**batch) if isinstance(batch, dict) else model(*batch))
    for name, calls in inputs_of(model, seen.stats, batches, run).items():
        path = max((path for path in real if name.startswith(path)), key=len)
        tokens = [x.flatten(0, -2) if real[path] is None else x[real[path]] for x in calls]
        n, total = seen.stats[name].moments.sum((0, 2))[:2].tolist()
        assert (name, n) == (name, sum(x.numel() for x in tokens))
        assert total == pytest.approx(sum(float(x.double().sum()) for x in tokens), rel=1e-4, abs=1e-3)


torch.manual_seed(0)
TEXT = {"input_ids": ids(), "attention_mask": REAL.long()}
SHOWN = torch.arange(17) < torch.tensor([[17], [5]])
PICTURES = {"input_ids": ids(2, 17), "attention_mask": SHOWN.long(), "pixel_values": torch.randn(2, 3, 32, 32)}
SPOKEN = {"input_features": torch.randn(3, 8, 2 * POSITIONS), "decoder_input_ids": ids()}
NETWORKS = {
    "T5, labels": ("T5ForConditionalGeneration", TEXT | {"labels": ids()}, {"encoder": REAL, "decoder": ALL}),
    "T5, both": (
        "T5ForConditionalGeneration",
        TEXT | {"decoder_input_ids": ids(), "decoder_attention_mask": WRITTEN.long()},
        {"encoder": REAL, "decoder": WRITTEN},
    ),
    "BART": ("BartForConditionalGeneration", TEXT | {"labels": ids()}, {"model.encoder": REAL, "model.decoder": ALL}),
    "BART, the decoder's alone": (
        "BartModel",
        {"input_ids": ids(), "decoder_input_ids": ids(), "decoder_attention_mask": WRITTEN.long()},
        {"encoder": ALL, "decoder": WRITTEN},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        SPOKEN | {"decoder_attention_mask": WRITTEN.long()},
        {"model.encoder": ALL, "model.decoder": WRITTEN},
    ),
    "CLIP": ("CLIPModel", PICTURES, {"text_model.encoder": SHOWN, "text_model.final": SHOWN, "vision_model": None}),
    "BLIP, captions": ("BlipForConditionalGeneration", PICTURES, {"text_decoder": SHOWN, "vision_model": None}),
    "Perceiver": (
        "PerceiverModel",
        {"inputs": ids(), "attention_mask": REAL.long()},
        {"encoder": ALL, "encoder.cross_attention.attention.self.layernorm2": REAL},
    ),
    "BERT": ("BertForMaskedLM", TEXT | {"token_type_ids": REAL.long()}, {"": REAL}),
    "ViT, which has no mask": ("ViTModel", {"pixel_values": torch.randn(2, 3, 32, 32)}, {"": None}),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_tokens_of_networks_of_transformers(case):
    name, batch, real = NETWORKS[case]
    assert_counted(of_transformers(name), [batch], real)


def transformer(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    if kind is nn.Transformer:
        return nn.Transformer(WIDTH, 2, 1, 1, 32, batch_first=True).eval()
    layer = {nn.TransformerEncoder: nn.TransformerEncoderLayer, nn.TransformerDecoder: nn.TransformerDecoderLayer}[kind]
    return kind(layer(WIDTH, 2, 32, batch_first=True), 1).eval()


SRC, TGT = torch.randn(3, POSITIONS, WIDTH), torch.randn(3, POSITIONS, WIDTH)


@pytest.mark.parametrize(
    ("kind", "batch", "real"),
    [
        (nn.Transformer, {"src_key_padding_mask": ~REAL}, {"encoder": REAL, "decoder": ALL}),
        (nn.Transformer, {"tgt_key_padding_mask": ~WRITTEN}, {"encoder": ALL, "decoder": WRITTEN}),
        (
            nn.Transformer,
            {"src_key_padding_mask": ~REAL, "memory_key_padding_mask": ~REAL, "tgt_key_padding_mask": ~WRITTEN},
            {"encoder": REAL, "decoder": WRITTEN},
        ),
        (nn.TransformerEncoder, {"src_key_padding_mask": ~REAL}, {"": REAL}),
        (nn.TransformerEncoder, {"src_key_padding_mask": torch.zeros(3, 9).masked_fill(~REAL, -torch.inf)}, {"": REAL}),
        (nn.TransformerDecoder, {"tgt_key_padding_mask": ~WRITTEN}, {"": WRITTEN}),
        (nn.TransformerDecoder, {"memory_key_padding_mask": ~REAL}, {"": ALL}),
    ],
)
def test_masks_of_torch_are_true_where_padded(kind, batch, real):
    streams = {nn.Transformer: {"src": SRC, "tgt": TGT}, nn.TransformerEncoder: {"src": SRC}}
    assert_counted(transformer(kind), [streams.get(kind, {"tgt": TGT, "memory": SRC}) | batch], real)


@pytest.mark.parametrize(
    ("mask", "forward"),
    [
        (REAL.long(), None),
        (REAL.long(), lambda model, batch: model(batch[0], batch[1])),
        (REAL, lambda model, batch: model(input_ids=batch[0], attention_mask=batch[1].float())),
        (~REAL, lambda model, batch: model(batch[0], attention_mask=1 - batch[1].long())),
    ],
)
def test_masks_in_tuples_are_bound_by_parameter(mask, forward):
    batches = list(DataLoader(TensorDataset(TEXT["input_ids"], mask), 3))
    assert_counted(of_transformers("BertForMaskedLM"), batches, {"": REAL}, **({"forward": forward} if forward else {}))


class Cross(nn.Module):
    """Tokens that look at a context: the mask is the context's, by the module that takes it or by nothing."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attends, self.attention = attends, nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.of_context, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x, context, attention_mask=None):
        h, context = self.norm(x), self.of_context(context)
        if self.attends:
            h = h + self.attention(h, context, context, key_padding_mask=attention_mask == 0)[0]
        return self.last(h)


def test_the_mask_of_a_context_is_for_the_context():
    batch = {"x": SRC, "context": TGT, "attention_mask": REAL.long()}
    assert_counted(Cross(), [batch], {"": ALL, "of_context": REAL})


def test_a_mask_that_cannot_be_bound_is_refused_unless_nothing_is_padded():
    model, batch = Cross(attends=False), {"x": SRC, "context": TGT, "attention_mask": REAL.long()}
    with pytest.raises(DataError, match=r"'attention_mask' \(3, 9\) cannot be bound .* normscope\.Batch\(.*valid=…"):
        normscope.capture(model, [batch])
    with pytest.raises(DataError, match="cannot be bound"):
        normscope.capture(model, [batch], forward=lambda model, batch: model(batch["x"], batch["context"]))
    whole = normscope.capture(model, [batch | {"attention_mask": ALL.long()}])
    marked = Batch((), batch, numbered_samples(3), valid=WRITTEN, valid_within={"of_context": REAL})
    assert {stats.n_tokens for stats in whole.stats.values()} == {27}
    by_hand = {"norm": 14, "of_context": 19, "last": 14}
    assert {name: stats.n_tokens for name, stats in normscope.capture(model, [marked]).stats.items()} == by_hand


def test_a_norm_of_two_streams_with_different_masks_is_refused():
    def forward(self, src, tgt, src_key_padding_mask):
        return self.norm(src) + self.norm(tgt).mean(1, keepdim=True)

    shared = network_of(forward, norm=nn.LayerNorm(WIDTH))
    with pytest.raises(DataError, match="cannot be bound"):
        normscope.capture(shared, [{"src": SRC, "tgt": TGT, "src_key_padding_mask": ~REAL}])


class Doubled(torch.autograd.Function):
    """A function that torch's modes do not see."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x


def test_tokens_are_followed_through_autograd_functions():
    model = network_of(lambda self, x, attention_mask: self.norm(Doubled.apply(x).clone()), norm=nn.LayerNorm(WIDTH))
    assert_counted(model, [{"x": SRC, "attention_mask": REAL.long()}], {"": REAL})


def test_arguments_that_are_added_token_by_token_are_one_stream():
    def forward(self, x, bbox, attention_mask):
        return self.norm(x + self.place(bbox))

    placed = network_of(forward, place=nn.Linear(4, WIDTH), norm=nn.LayerNorm(WIDTH))
    batch = {"x": SRC, "bbox": torch.rand(3, POSITIONS, 4), "attention_mask": REAL.long()}
    assert_counted(placed, [batch], {"": REAL})


def test_masks_of_a_held_out_part_are_bound():
    batches = [{"src": SRC[i : i + 1], "src_key_padding_mask": ~REAL[i : i + 1]} for i in range(3)]
    learned, held_out = learned_and_held_out(batches)
    model = transformer(nn.TransformerEncoder)
    counts = [normscope.capture(model, part).stats["layers.0.norm1"].n_tokens for part in (learned, held_out)]
    assert counts == [9 + 6, 4]


def test_drift_is_that_of_the_decoders_tokens():
    model = transformer(nn.Transformer)
    batch = {"src": SRC, "tgt": TGT, "src_key_padding_mask": ~REAL, "tgt_key_padding_mask": ~WRITTEN}
    seen = normscope.capture(model, [batch], layers=["decoder.layers.0.norm1"])
    report = normscope.drift(model, [batch], normscope.replacements(model, "dyt", seen, init="paper"))
    with torch.no_grad():
        original = model(**batch)
        with normscope.swap(model, "dyt", seen, init="paper"):
            moved = model(**batch) - original
    by_hand = [float(moved[i][WRITTEN[i]].norm() / original[i][WRITTEN[i]].norm()) for i in range(3)]
    assert report.all.relative_l2.max == pytest.approx(max(by_hand), rel=1e-5)
    assert report.all.relative_l2.p50 == pytest.approx(sorted(by_hand)[1], rel=1e-5)
