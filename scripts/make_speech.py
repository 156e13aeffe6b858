"""Make the synthetic utterances that normscope's speech models hear by default: ``python scripts/make_speech.py``.

It needs espeak-ng (``apt-get install espeak-ng``). The same version writes the same samples again.
"""

import argparse
import io
import subprocess
import wave
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import soundfile
import torch
from torch import Tensor
from torchaudio.functional import resample

EMBEDDED = Path(__file__).parents[1] / "normscope" / "models" / "embedded"
SAMPLE_RATE = 16_000
INT16_TO_FLOAT = 2.0**-15


class Voice(NamedTuple):
    """An accent and a variant of espeak-ng, its pitch (0 to 99) and its speed in words a minute."""

    accent: str
    variant: str
    pitch: int
    speed: int


UTTERANCES = {
    Voice("en-us", "m3", 45, 165): "A quiet river runs behind the old paper mill.",
    Voice("en-gb", "f2", 55, 160): "Seven yellow boats are waiting for the morning tide.",
    Voice("en-us", "Annie", 50, 170): "She keeps her maps and letters in a wooden box.",
    Voice("en-gb-scotland", "m7", 35, 175): "The baker left the window open all through the night.",
    Voice("en-us", "f4", 65, 180): "Please turn the music down before the guests arrive.",
    Voice("en-029", "m1", 55, 150): "Twelve small drums were beating under the bridge.",
    Voice("en-us", "klatt2", 40, 155): "Nobody saw how quickly the winter garden froze.",
    Voice("en-gb-x-rp", "steph", 60, 170): "Fresh coffee and warm bread, that is all I need.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=EMBEDDED / "speech")
    args = parser.parse_args()

    refuse_unknown_variants(voice.variant for voice in UTTERANCES)
    args.out.mkdir(parents=True, exist_ok=True)
    for number, (voice, sentence) in enumerate(UTTERANCES.items(), start=1):
        waveform = synthesize(sentence, voice)
        path = args.out / f"{number}_{voice.accent}_{voice.variant}.flac"
        soundfile.write(path, waveform.numpy(), SAMPLE_RATE, subtype="PCM_16")
        path.with_suffix(".txt").write_text(f"{sentence}\n", encoding="utf-8")  # which a decoder reads
        print(f"{path.name}  {len(waveform) / SAMPLE_RATE:.2f} s  {path.stat().st_size / 1000:.0f} kB  {sentence}")
    print(espeak_version())


def synthesize(text: str, voice: Voice) -> Tensor:
    """Return what the voice makes of the text: int16 (samples,) at SAMPLE_RATE, without a pause at its end."""
    name = f"{voice.accent}+{voice.variant}"
    options = ["-v", name, "-p", str(voice.pitch), "-s", str(voice.speed), "-z", "--stdout"]
    with wave.open(io.BytesIO(espeak(*options, text))) as sound:
        rate = sound.getframerate()
        # A stream's header cannot know how long it is and names 1 GB: read whatever is there.
        samples = torch.frombuffer(bytearray(sound.readframes(sound.getnframes())), dtype=torch.int16)
    return resample(samples.float(), rate, SAMPLE_RATE).round().clamp(-32768, 32767).to(torch.int16)


def refuse_unknown_variants(variants: Iterable[str]) -> None:
    """Exit where espeak-ng lacks one of these variants: it would speak with its default voice and say nothing."""
    listing = espeak("--voices=variant").decode()
    installed = {line.split("!v/")[1].strip() for line in listing.splitlines() if "!v/" in line}
    missing = sorted(set(variants) - installed)
    if missing:
        raise SystemExit(f"This espeak-ng ({espeak_version()}) has no variant {', '.join(missing)}; 1.51 has them.")


def espeak_version() -> str:
    return espeak("--version").decode().partition("Data at")[0].strip()


def espeak(*arguments: str) -> bytes:
    return subprocess.run(["espeak-ng", *arguments], capture_output=True, check=True).stdout  # noqa: S603, S607


if __name__ == "__main__":
    main()
