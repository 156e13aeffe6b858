"""Write the pages of docs/gallery, and a picture of one of them: ``python scripts/make_gallery.py``.

Each page is what ``normscope report MODEL --func tanh,isru,derf`` writes. minilm takes its weights from a model hub, or
from ``python scripts/fetch_pretrained.py minilm``; the picture takes a Chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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


def main() -> None:
    """Write all that can be written; exit with a sentence for whatever could not."""
    failed = [f"{model}.html was not written, as said above." for model in MODELS if not written(model)]
    sys.exit("\n".join([*failed, *pictured()]) or None)


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
