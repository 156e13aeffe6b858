"""Time to write, open and use the report's page in a browser: ``python benchmarks/page.py``.

It takes selenium, and a Chromium with its chromedriver (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Measurement, finish, in_own_process, names, options, seconds_of

import normscope

MODELS = {"vit_b16": "random", "demo_vit": "pretrained"}  # and the weights of each
CURVES = "tanh,isru,derf"
WIDTH, HEIGHT = 1280, 900  # of the browser's window, pixels
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ABOUT = """
Time that `normscope report` takes after its capture, and response times of its page in {browser}, headless, {width} ×
{height} pixels. {pages} Fits: fits of {curves} to all sites. Written: the page is built from them and saved. Usable:
from the start of the navigation until all scripts of the page have run. Painted: until something of it is painted. Each
repeat starts a new browser, which opens the page on its overview, and another one, which opens it at its first site.
Answers: from a click or a slider's step until the
frame with the result is painted. This includes the wait for a frame (up to 17 ms), but neither graphics card nor
screen. Actions follow each other without a pause, and each repeat uses other sites. First at a site: only the site's
density was drawn before. R²: largest difference, over all fits, between the page's R², computed from its own points,
and CurveFit.r2.
"""
CHOICE = "document.querySelector('input[value={}]').click()"
BUTTON = "[...document.querySelectorAll('{} button')].find((one) => one.textContent === '{}').click()"
CURVE = BUTTON.format("[aria-label=Curves]", "isru")
NEXT = """document.querySelector("[aria-label='Next site']").click()"""
SLIDER = """const slider = document.getElementById('slider-alpha');
    slider.value = Number(slider.value) + 40; slider.dispatchEvent(new Event('input'))"""
PAINTED = """const done = arguments[0], painted = () => {
        const [first] = performance.getEntriesByName('first-contentful-paint');
        first ? done([Number(document.documentElement.dataset.ready), first.startTime]) : setTimeout(painted, 5);
    };
    painted();"""
# A message that is sent before a frame is painted arrives behind it.
TIMED = """const done = arguments[arguments.length - 1], start = performance.now();
    (() => {{ {action} }})();
    requestAnimationFrame(() => {{
        const {{port1, port2}} = new MessageChannel();
        port1.onmessage = () => done(performance.now() - start);
        port2.postMessage(null);
    }});"""
R2 = """return arguments[0].map(([site, curve, ...values]) =>
    r2Of(nodesOf(open.capture.sites[site]), functionOf(curve), ...values))"""


def main() -> None:
    parser = options(__doc__, repeats=5)
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"({','.join(MODELS)})")
    args = parser.parse_args()
    for model in args.models:
        if model not in MODELS:
            parser.error(f"there is no page of {model!r} to measure; the models are {', '.join(MODELS)}")
    programs = browser_and_driver()
    measurements, pages, version = [], [], ""
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            page = Path(folder) / f"{model}.html"
            written, *fitted, data = in_own_process(write, model, page, args.repeats, threads=os.cpu_count())
            pages.append(f"{model}: {data}.")
            version, opened = of_browser(model, page, *fitted, programs, args.repeats)
            measurements += [*written, *opened]
    about = ABOUT.format(
        browser=version, width=WIDTH, height=HEIGHT, pages=" ".join(pages), curves=CURVES.replace(",", ", ")
    )
    finish("page", about, measurements, args, threads=[os.cpu_count()], libraries=["timm", "selenium"])


def browser_and_driver() -> tuple[str, str]:
    """Return the paths of a Chromium and its driver; exit without them, or without selenium."""
    if importlib.util.find_spec("selenium") is None:
        sys.exit("selenium is not installed. Run pip install -e '.[bench]'")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if not (browser and driver):
        sys.exit("There is no Chromium with its chromedriver to measure in (Debian: chromium, chromium-driver).")
    return browser, driver


Fit = tuple[int, str, float, float, float]  # number of the site, name of the curve, A, α and s


def write(model: str, path: Path, repeats: int) -> tuple[list[Measurement], int, list[Fit], list[float], str]:
    """Capture a network and write its page; return times, the number of sites, the fits with their R², and the data."""
    network = normscope.load(model, weights=MODELS[model], device="cpu")
    seen = normscope.capture(network, diagonal=True, keep_inputs=2)  # as the command does
    fits = normscope.fit(seen, CURVES)
    normscope.report(seen, fits).save(path)
    numbers = {site.name: number for number, site in enumerate(seen.sites)}
    fitting = [seconds_of(lambda: normscope.fit(seen, CURVES)) for _ in range(repeats)]
    writing = [seconds_of(lambda: normscope.report(seen, fits).save(path)) for _ in range(repeats)]
    times = {"fits": fitting, "written": writing, "both": [sum(pair) for pair in zip(fitting, writing, strict=True)]}
    measurements = [Measurement(model, "page", name, "s", seconds) for name, seconds in times.items()]
    measurements.append(Measurement(model, "page", "size", "MB", [path.stat().st_size / 1e6]))
    pairs = sum(stats.n_pairs for stats in seen.stats.values())
    parameters = [(numbers[fit.site], fit.curve, fit.amplitude, fit.alpha, fit.shift) for fit in fits]
    data = f"{seen.about['weights']}; {seen.n_samples} samples, {len(seen.sites)} norms, {pairs:,} pairs"
    return measurements, len(seen.sites), parameters, [fit.r2 for fit in fits], data


def of_browser(
    model: str, page: Path, n_sites: int, fits: list[Fit], r2: list[float], programs: tuple[str, str], repeats: int
) -> tuple[str, list[Measurement]]:
    """Open a page in a new browser for each repeat and act on it; return the browser's name and the measurements."""
    opened: dict[str, list[float]] = {}
    answers: dict[str, list[float]] = {}
    for number in range(repeats):
        print(f"{model}, browser {number + 1} of {repeats} …", flush=True)
        with started(programs) as driver:
            for name, milliseconds in times_of_opening(driver, f"{page.as_uri()}#view=site").items():
                opened.setdefault(f"first site {name}", []).append(milliseconds)
        with started(programs) as driver:
            for name, milliseconds in times_of_opening(driver, page.as_uri()).items():
                opened.setdefault(name, []).append(milliseconds)
            site = 1 + number * (n_sites - 4) // max(repeats - 1, 1)
            for name, action in actions(site):
                milliseconds = float(driver.execute_async_script(TIMED.format(action=action)))
                answers.setdefault(name, []).append(milliseconds)
            in_browser = driver.execute_script(R2, fits)
            version = f"Chromium {driver.capabilities['browserVersion']}"
    off = [abs(a - b) for a, b in zip(in_browser, r2, strict=True)]
    return version, [
        *(Measurement(model, "page", name, "ms", times, "driver" not in name) for name, times in opened.items()),
        Measurement(model, "page", "R² off by", "at most", [max(off)]),
        Measurement(model, "page", "R² of each fit off by", "absolute", off, shown=False),
        *(Measurement(model, name, "answers after", "ms", times) for name, times in answers.items()),
    ]


@contextmanager
def started(programs: tuple[str, str]) -> Iterator[Any]:
    """Start a browser without a window, and quit it at the end."""
    from selenium import webdriver

    settings = webdriver.ChromeOptions()
    settings.binary_location, driver = programs
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={WIDTH},{HEIGHT}"):
        settings.add_argument(argument)
    browser = webdriver.Chrome(options=settings, service=webdriver.ChromeService(driver))
    try:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield browser
    finally:
        browser.quit()


def times_of_opening(driver: Any, address: str) -> Mapping[str, float]:
    """Open a page; return the times until it is usable, painted, and loaded by its driver: milliseconds."""
    start = time.perf_counter()
    driver.get(address)
    heard = 1000 * (time.perf_counter() - start)
    usable, painted = driver.execute_async_script(PAINTED)
    return {"usable": float(usable), "painted": float(painted), "loaded, as its driver is told": heard}


def actions(site: int) -> Sequence[tuple[str, str]]:
    """Return a user's actions, from the overview to two sites further on, with their scripts."""
    return [
        ("a site, from the overview", f"document.querySelectorAll('.thumbnail')[{site}].click()"),
        ("by token, first at a site", CHOICE.format("token")),
        ("by density", CHOICE.format("density")),
        ("by token, again", CHOICE.format("token")),
        ("an input without its colours", CHOICE.format("none")),
        ("σ over an input", CHOICE.format("sigma")),
        ("a curve off", CURVE),
        ("a curve on", CURVE),
        ("asinh axis", CHOICE.format("asinh")),
        ("linear axis", CHOICE.format("linear")),
        ("by density", CHOICE.format("density")),
        ("the next site", NEXT),
        ("by channel, first at a site", CHOICE.format("channel")),
        ("by density", CHOICE.format("density")),
        ("by channel, again", CHOICE.format("channel")),
        ("a channel lit up", "document.querySelector('.results button').click()"),
        ("the next site, by channel", NEXT),
        ("light or dark", "document.getElementById('theme').click()"),
        ("the explorer", "document.getElementById('tab-explorer').click()"),
        *[("a step of the explorer's slider of α", SLIDER)] * 3,
    ]


if __name__ == "__main__":
    main()
