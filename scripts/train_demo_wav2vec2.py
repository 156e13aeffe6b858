"""Train demo_wav2vec2, the tiny speech recognizer that ships with normscope; write it with words to run it on.

It needs espeak-ng (``apt-get install espeak-ng``). The same seed makes the same bytes again on the same machine and
versions: ``python scripts/train_demo_wav2vec2.py``. ``--only calibration`` writes the words to learn from, and trains
nothing.
"""

import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import soundfile
import torch
import torch.nn.functional as F
import torchaudio
from make_speech import INT16_TO_FLOAT, SAMPLE_RATE, Voice, espeak_version, refuse_unknown_variants, synthesize
from safetensors.torch import save_file
from torch import Tensor, nn
from train_demo_vit import options, parsed, rounded_to_fp16, save_model, trained

LABELS = ["-", "|", "'", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]  # torchaudio's letters; the first is CTC's blank
CONFIG = {
    "extractor_mode": "layer_norm",
    "extractor_conv_layer_config": [[48, 10, 5], *[[48, 3, 2]] * 4, *[[48, 2, 2]] * 2],
    "extractor_conv_bias": True,
    "encoder_embed_dim": 64,
    "encoder_projection_dropout": 0.0,
    "encoder_pos_conv_kernel": 32,
    "encoder_pos_conv_groups": 4,
    "encoder_num_layers": 8,
    "encoder_num_heads": 4,
    "encoder_attention_dropout": 0.0,
    "encoder_ff_interm_features": 256,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0,
    "encoder_layer_norm_first": True,
    "encoder_layer_drop": 0.0,
    "aux_num_out": len(LABELS),
}
RECIPE = {"steps": 2400, "batch_size": 16, "peak_lr": 1.5e-3, "warmup_steps": 200, "weight_decay": 0.01, "clip": 1.0}
SORTED_AT_ONCE = 256

ACCENT = "en-us"
PITCHES, SPEEDS = (25, 75), (130, 210)
TRAIN_WORDS, HELD_OUT_VOICES, WORDS_A_VOICE, SHIPPED_A_VOICE = 4000, 12, 50, 5
CALIBRATION_WORDS = 850

# Variants of espeak-ng 1.51 that are never held out: their log-mel spectra lie close to those of another variant, or
# they belong to a series of effects. klatt and klatt6 are missing because they say the same as caleb, to the bit.
VARIANTS_WITH_A_TWIN = """
    Alex Diogo Gene Gene2 Henrique Hugo Mike RicishayMax RicishayMax2 RicishayMax3 adam anika anikaRobot benjamin
    caleb croak edward edward2 fast grandpa iven iven2 iven3 iven4 klatt2 klatt3 klatt4 klatt5 m3 m6 michel miguel rob
    robert robosoft robosoft2 robosoft3 robosoft4 robosoft5 robosoft6 robosoft7 robosoft8 steph steph2 steph3 whisper
    whisperf
""".split()  # noqa: SIM905
VARIANTS_APART = """
    Alicia Andrea Andy Annie AnxiousAndy Demonic Denis Jacky Lee Marco Mario Michael Nguyen Tweaky UniRobot announcer
    antonio aunty belinda boris david ed f1 f2 f3 f4 f5 grandma gustave john kaukovalta linda m1 m2 m4 m5 m7 m8
    marcelo max norbert pablo paul pedro quincy sandro shelby travis victor zac
""".split()  # noqa: SIM905
WORDS = """
    animal answer apple around balance banana basket because become before begin believe between bicycle black branch
    bread bright brown builder camera catch certain children clean clock clothes common corner cotton dollar dragon
    drive early effort empty example feather fifteen finish freedom giant glass golden green happen harbor holiday
    inside island jacket jelly judge kitchen laugh leader letter light listen little machine market memory middle milk
    minute monkey morning narrow nature needle number office orchard people pepper prince salad sample second shadow
    singer smile square station stone story student sunday table teacher travel velvet violin water weather wedding
    winter wonder yellow
""".split()  # noqa: SIM905


class Clip(NamedTuple):
    """A spoken word: int16 (samples,) at SAMPLE_RATE, its transcript, the variant that spoke it."""

    waveform: Tensor
    word: str
    variant: str


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=["calibration"], help="write the words to learn from, and nothing else")
    args = parsed(parser)
    refuse_unknown_variants(VARIANTS_WITH_A_TWIN + VARIANTS_APART)
    args.out.mkdir(parents=True, exist_ok=True)
    calibration_path = args.out / "demo_wav2vec2_calibration.safetensors"
    if args.only:
        save_compact(speak_words(args.seed, only=CALIBRATION_WORDS)[0], calibration_path)
        return

    train, held_out = speak_words(args.seed)
    save_compact(train[:CALIBRATION_WORDS], calibration_path)
    print(f"{len(train)} words to train on, {len(held_out)} held out", flush=True)

    model = rounded_to_fp16(train_wav2vec2(train, args.seed))
    # Voice after voice, so that the first few clips are not all of one voice.
    shipped = [clip for first in range(SHIPPED_A_VOICE) for clip in held_out[first::WORDS_A_VOICE]]
    score = accuracy(model, held_out)
    print(f"held-out accuracy {score:.4f} of {len(held_out)}, {accuracy(model, shipped):.4f} of the shipped ones")
    facts = {"config": CONFIG, "labels": LABELS, "sample_rate": SAMPLE_RATE, "normalize_waveform": True}
    facts |= {"seed": args.seed, "steps": RECIPE["steps"], "held_out_accuracy": score}
    facts |= {"torch": torch.__version__, "torchaudio": torchaudio.__version__, "espeak-ng": espeak_version()}
    save_model("demo_wav2vec2", args.out, model.state_dict(), facts)
    save_clips(shipped, args.out / "demo_wav2vec2_words.safetensors")


def speak_words(seed: int, only: int | None = None) -> tuple[list[Clip], list[Clip]]:
    """Return clips to train on, and clips of voices that are held out, WORDS_A_VOICE of each voice in a row.

    Or ``only`` the first so many to train on, and no others.
    """
    rng = random.Random(seed)  # noqa: S311
    held_out_variants = rng.sample(VARIANTS_APART, HELD_OUT_VOICES)
    train_variants = [v for v in VARIANTS_WITH_A_TWIN + VARIANTS_APART if v not in held_out_variants]
    train = rng.sample([(word, variant) for word in WORDS for variant in train_variants], TRAIN_WORDS)
    held_out = [(word, variant) for variant in held_out_variants for word in rng.sample(WORDS, WORDS_A_VOICE)]
    if only is not None:
        train, held_out = train[:only], []
    return [spoken(*pair, rng) for pair in train], [spoken(*pair, rng) for pair in held_out]


def spoken(word: str, variant: str, rng: random.Random) -> Clip:
    voice = Voice(ACCENT, variant, rng.randint(*PITCHES), rng.randint(*SPEEDS))
    return Clip(synthesize(word, voice), word.upper(), variant)


def to_input(waveform: Tensor) -> Tensor:
    """Normalize as torchaudio's layer_norm bundles do: float32 of zero mean and unit variance."""
    samples = waveform * INT16_TO_FLOAT
    return F.layer_norm(samples, samples.shape)


def train_wav2vec2(clips: Sequence[Clip], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = torchaudio.models.wav2vec2_model(**CONFIG)
    batches = batches_of_like_length(clips, generator)
    return trained(model, lambda: ctc_loss(model, next(batches)), RECIPE, 100)


def batches_of_like_length(clips: Sequence[Clip], generator: torch.Generator) -> Iterator[list[Clip]]:
    """Go through the clips again and again, in another order each time; batches of like lengths need little padding."""
    while True:
        for some in torch.randperm(len(clips), generator=generator).split(SORTED_AT_ONCE):
            by_length = sorted(some.tolist(), key=lambda i: len(clips[i].waveform))
            batches = torch.tensor(by_length).split(RECIPE["batch_size"])
            for number in torch.randperm(len(batches), generator=generator):
                yield [clips[i] for i in batches[number]]


def ctc_loss(model: nn.Module, clips: Sequence[Clip]) -> Tensor:
    waveforms = nn.utils.rnn.pad_sequence([to_input(clip.waveform) for clip in clips], batch_first=True)
    lengths = torch.tensor([len(clip.waveform) for clip in clips])
    logits, n_frames = model(waveforms, lengths)
    letters = torch.tensor([LABELS.index(letter) for clip in clips for letter in clip.word])
    n_letters = torch.tensor([len(clip.word) for clip in clips])
    return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), letters, n_frames, n_letters)  # (b,t,c) -> (t,b,c)


def accuracy(model: nn.Module, clips: Sequence[Clip]) -> float:
    return sum(recognized(model, clip.waveform) == clip.word for clip in clips) / len(clips)


@torch.no_grad()
def recognized(model: nn.Module, waveform: Tensor) -> str:
    """Return the greedy CTC reading: the best letter of each frame, repeats and blanks left out."""
    logits, _ = model(to_input(waveform)[None])
    letters = logits[0].argmax(dim=-1).unique_consecutive()
    return "".join(LABELS[i] for i in letters if i != 0)


def save_clips(clips: Sequence[Clip], path: Path) -> None:
    waveforms = torch.cat([clip.waveform for clip in clips])
    voices = list(dict.fromkeys(clip.variant for clip in clips))
    save_words(clips, voices, path, {"waveforms": waveforms}, {"scale": INT16_TO_FLOAT})


def save_compact(clips: Sequence[Clip], path: Path) -> None:
    """Write words with 8 bits per sample, each scaled to its own peak, one after the other in one FLAC stream."""
    peaks = [int(clip.waveform.int().abs().max()) for clip in clips]
    coded = torch.cat([(clip.waveform.float() * 127 / peak).round() for clip, peak in zip(clips, peaks, strict=True)])
    stream = io.BytesIO()
    whole = coded.to(torch.int16) * 256  # soundfile takes the upper 8 bits
    soundfile.write(stream, whole.numpy(), SAMPLE_RATE, format="FLAC", subtype="PCM_S8", compression_level=1.0)
    tensors = {
        "flac": torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8),
        "peaks": torch.tensor(peaks) * (INT16_TO_FLOAT * 128 / 127),  # of what soundfile reads as floats, 127/128
    }
    save_words(clips, sorted({clip.variant for clip in clips}), path, tensors)


def save_words(
    clips: Sequence[Clip], voices: list[str], path: Path, tensors: dict[str, Tensor], facts: Mapping[str, float] = {}
) -> None:
    """Write tensors with the length, the speaker and the transcript of each clip."""
    tensors["lengths"] = torch.tensor([len(clip.waveform) for clip in clips])
    tensors["speakers"] = torch.tensor([voices.index(clip.variant) for clip in clips])
    words = {"words": [clip.word for clip in clips], "voices": voices, "sample_rate": SAMPLE_RATE}
    save_file(tensors, path, metadata={"normscope": json.dumps({**words, **facts, "normalize_waveform": True})})


if __name__ == "__main__":
    main()
