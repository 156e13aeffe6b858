"""Write docs/gallery's pages, a picture of one of them, and all pictures of figures in outputs/gallery.

``python scripts/make_gallery.py`` writes all; ``python scripts/make_gallery.py curves.png minilm-keep.png``, some. Each
page is what ``normscope report MODEL --func tanh,isru,derf`` writes, each picture what its command in ``FIGURES``
draws. The words and numbers in a picture go into words.json beside it, for tests/test_gallery.py. Pretrained
networks come from a model hub, or from ``python scripts/fetch_pretrained.py``; the picture of a page takes a Chromium.
"""

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.text import Text

import normscope.figures
from normscope.cli import app

ROOT = Path(__file__).parents[1]
PAGES, PICTURE = ROOT / "docs" / "gallery", ROOT / "outputs" / "gallery" / "report.png"
MODELS = ("demo_vit", "demo_dit", "demo_wav2vec2", "minilm")
CURVES = "tanh,isru,derf"
# Tokens whose σ differs: each is a straight line, and all together bend. The line of one word stands out.
PICTURED = "minilm.html"
PART = "#view=site&site=encoder.layer.5.output.LayerNorm&colour=token&x=linear&pin=1.50.144"
WIDTH, HEIGHT, DOTS = 1200, 815, 1.5  # of the picture in pixels, and dots a pixel
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TRIES, PATIENCE = 6, 60  # times, and seconds for each
# The command of each figure, the file that it writes, and the picture that the file becomes.
FIGURES = {
    "plot dinov2_small smart_turn smollm2_135m --compact --width 5.5": {
        "outputs/overview-compact.png": "pretrained-compact.png"
    },
    "plot with.safetensors without.safetensors --layers 40,60 --compact --width 3.25": {
        "outputs/overview-compact.png": "smollm2-sink.png"
    },
    "stats smollm2_135m --plot spikes.png --width 5.5": {"spikes.png": "smollm2-spikes.png"},
    "plot minilm --layers 8,9,12 --width 5.5": {"outputs/minilm-scurves.png": "minilm-scurves.png"},
    "plot --compact --width 5.5": {"outputs/overview-compact.png": "overview-compact.png"},
    "plot demo_dit --layers 4 --color token,channel --width 5.5": {
        "outputs/demo_dit-scurves.png": "demo_dit-tokens-and-channels.png"
    },
    "curves --plot curves.png": {"curves.png": "curves.png"},
    "swap-bench demo_dit --func dyt,rmsnorm --quick": {"outputs/demo_dit-drift.png": "demo_dit-drift.png"},
    "timeline layernorm.jsonl": {
        "outputs/layernorm-timeline.png": "probe-layernorm.png",
        "outputs/layernorm-scurves.png": "probe-layernorm-scurves.png",
    },
    "swap-bench minilm --data texts --limit 440 --shuffle --quick": {"outputs/minilm-drift.png": "minilm-drift.png"},
    "swap minilm --data texts --limit 440 --shuffle --init calibrated --keep 2 -o kept": {
        "kept-keep.png": "minilm-keep.png"
    },
    "heal minilm --data texts --steps 480 -o healed": {"healed-healing.png": "minilm-healing.png"},
}
PICTURES, WORDS = PICTURE.parent, PICTURE.parent / "words.json"
NOT_RECORDED = "--data texts"  # docstrings of the Python that runs; these commands also take up to half an hour


def main() -> None:
    """Write all that can be written, or what is named; exit with a sentence for whatever could not."""
    names = sys.argv[1:]
    models = [model for model in MODELS if not names or f"{model}.html" in names]
    failed = [f"{model}.html was not written, as said above." for model in models if not written(model)]
    if not names or PICTURE.name in names:
        failed += pictured()
    for command, files in FIGURES.items():
        if not names or set(names) & set(files.values()):
            draw(command)
    sys.exit("\n".join(failed) or None)


def draw(command: str) -> None:
    """Draw the pictures of a command, and record their words."""
    with tempfile.TemporaryDirectory() as folder:
        words = words_drawn(command, Path(folder))
        for file, picture in FIGURES[command].items():
            shutil.copyfile(Path(folder) / file, PICTURES / picture)
    if NOT_RECORDED not in command:
        recorded = json.loads(WORDS.read_text(encoding="utf-8"))
        recorded |= {picture: {"command": command, "words": texts} for picture, texts in words.items()}
        text = json.dumps(recorded, ensure_ascii=False, indent=1, sort_keys=True)
        WORDS.write_text(f"{text}\n", encoding="utf-8")


def words_drawn(command: str, folder: Path) -> dict[str, list[str]]:
    """Run a command in a folder; return the words and numbers in each of its figures, by picture."""
    words, save = {}, normscope.figures.save_figure

    def saved(figure: Any, path: Any, *options: Any) -> Path:
        file = save(figure, path, *options)
        if picture := FIGURES[command].get(str(path)):
            texts = [text.get_text() for text in figure.findobj(Text) if text.get_visible()]
            words[picture] = [text for text in texts if text.strip()]
        return file

    with contextlib.chdir(folder):
        prepare(command)
        with mock.patch.object(normscope.figures, "save_figure", saved):
            app(shlex.split(command), standalone_mode=False)
    return words


def prepare(command: str) -> None:
    """Write the input that a command reads, as the benchmarks do."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    if "--data texts" in command:
        import conversion

        conversion.written_texts(Path("texts"), conversion.TEXTS)
    elif "without.safetensors" in command:
        for options in ("-o with.safetensors", "--skip 1 -o without.safetensors"):
            app(["capture", "smollm2_135m", *options.split()], standalone_mode=False)
    elif "layernorm.jsonl" in command:
        import probe_studies

        probe_studies.measured("LayerNorm", Path())


def written(model: str) -> bool:
    """Write a page by the command line; return True on success."""
    page = PAGES.relative_to(ROOT) / f"{model}.html"
    command = [sys.executable, "-m", "normscope", "report", model, "--func", CURVES, "--output", str(page)]
    return subprocess.run(command, cwd=ROOT).returncode == 0  # noqa: S603


def pictured() -> list[str]:
    """Paint a page into the picture by a browser without a window; return a sentence on failure."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return [f"{PICTURE.name} was not made: it takes a Chromium, and none is installed (Debian: chromium)."]
    page = PAGES / PICTURED
    if not page.is_file():
        return [f"{PICTURE.name} was not made: there is no page {PICTURED}."]
    before = b""
    for _ in range(TRIES):
        try:
            painted = painted_by(browser, f"{page.as_uri()}{PART}")
        except (subprocess.TimeoutExpired, FileNotFoundError):
            return [f"{PICTURE.name} was not made: {browser} painted nothing of {PICTURED} within {PATIENCE} s."]
        if painted == before:  # a picture may be taken before all of the page is painted
            PICTURE.write_bytes(painted)
            print(PICTURE.relative_to(ROOT))
            return []
        before = painted
    return [f"{PICTURE.name} was not made: of {TRIES} pictures of {PICTURED} no two in a row were alike."]


def painted_by(browser: str, address: str) -> bytes:
    """Return a PNG of what a browser paints; FileNotFoundError if it paints nothing."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}"]
        options += [f"--force-device-scale-factor={DOTS}", f"--screenshot={folder}/{PICTURE.name}"]
        subprocess.run([browser, *options, address], capture_output=True, timeout=PATIENCE)  # noqa: S603
        return (Path(folder) / PICTURE.name).read_bytes()


if __name__ == "__main__":
    main()
