"""A network whose norms and names are of every kind that a page meets, and a browser to open the page in."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from networks import network_of
from torch import nn

import normscope

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\u2028\u202egnp"
LONG = "l" * 10_000


def network():
    """A LayerNorm with a massive channel, an RMSNorm, a GroupNorm, one that sees zeros, and two with hostile names."""

    def forward(self, x):
        y = self.second(0.5 * x + self.first(x))
        self.groups(x.reshape(len(x), 8, -1))
        self.off(0 * x)
        return getattr(self, LONG)(getattr(self, HOSTILE)(x - y))

    norms = {"first": nn.LayerNorm(16), "second": nn.RMSNorm(16, eps=1e-6), "groups": nn.GroupNorm(2, 8)}
    return network_of(forward, "Net", **norms, **{name: nn.LayerNorm(16) for name in ("off", HOSTILE, LONG)})


@pytest.fixture(scope="session")
def ears():
    """A norm of eight neighbouring samples of a waveform at a time."""
    return network_of(lambda self, x: self.norm(x.unflatten(1, (-1, 8))), norm=nn.LayerNorm(8))


def batches(seed=0):
    x = torch.randn(24, 6, 16, generator=torch.Generator().manual_seed(seed))
    x = x * torch.linspace(0.3, 3, 6)[:, None] + 0.4
    x[:, 0, 3] = torch.linspace(200, 300, 24)
    return [x[:12], x[12:]]


@pytest.fixture
def hostile():
    return SimpleNamespace(name=HOSTILE, long=LONG)


ABOUT = {"model": HOSTILE, "weights": "random weights, seed 0", "data": "noise of <this> test"}


@pytest.fixture(scope="session")
def seen():
    torch.manual_seed(0)
    return normscope.capture(network(), batches(), about=ABOUT, diagonal=True)


@pytest.fixture(scope="session")
def fits(seen):
    return normscope.fit(seen, "tanh,isru,derf,mine=x/(1+abs(x)**3)**(1/3)")


@pytest.fixture(scope="session")
def other():
    torch.manual_seed(1)
    return normscope.capture(network(), batches(1), about={**ABOUT, "model": "the other"})


@pytest.fixture(scope="session")
def swaps():
    """What swap-bench prints, as far as the page reads it."""

    def row(swapped, site, number, l2):
        quantiles = {"min": 0.0, "p10": l2 / 2, "p50": l2, "p90": 2 * l2, "max": 3 * l2, "n": 8}
        return {
            **{"func": "dyt", "init": "fit", "swapped": swapped, "site": site, "sites_swapped": number},
            **{"at": "output", "part": "", "inputs": 8, "nonfinite": 0, "left_out": 0, "top1": 0.5},
            **{"relative_l2": quantiles, "cosine": quantiles | {"p50": 1 - l2}},
        }

    rows = [row("all", None, 2, 0.6), row("one", "second", 1, 0.1), row("one", "groups", 1, 0.2)]
    rows[-1]["relative_l2"] |= {"p50": None, "p90": None}
    rows += [row("cumulative", "second", 1, 0.1), row("cumulative", "groups", 2, 0.6)]
    score = {"original": {"value": 0.9, "interval": [0.8, 0.95]}, "swapped": {"value": 0.5, "interval": None}}
    quality = {"name": "top-1", "higher_is_better": True, "n": 8, "over": "8 inputs", "scores": score}
    drift = {"func": "dyt", "init": "fit", "sites": ["second", "groups"], "rows": rows, "no_quality": "", **ABOUT}
    timing = {
        **{"variant": "dyt", "way": "fused", "scope": "norm", "passes": "forward", "dtype": "float32"},
        **{"shape": [1, 16], "sites": 2, "median": 2e-3, "p25": 1.5e-3, "p75": None},
        **{"ratio": 1.5, "verdict": "slower", "note": "<b>"},
    }
    speed = {"about": ABOUT, "device": "cpu", "rows": [timing], "left_out": ["compiled"]}
    return {"device": "cpu", "drift": [{**drift, "quality": quality}], "speed": [speed], "figures": []}


@pytest.fixture(scope="session")
def checked():
    """What check prints, as far as the page reads it: an answer with sites, and one without."""
    site = {"site": HOSTILE, "bound": 1234.5, "channels": 16, "keep": True, "none": None, "folds": ["<b>", "two"]}
    sites = [site, {**site, "site": "second", "bound": 0.5, "keep": False}]
    answer = {
        "question": "attention <b>",
        "verdict": "note",
        "sentence": "see `normscope simplify` <b>",
        "site": HOSTILE,
    }
    omitted = {"question": "γ", "verdict": "omitted", "sentence": "not here", "site": None, "sites": []}
    return {"model": "net", "answers": [{**answer, "sites": sites}, omitted]}


@pytest.fixture(scope="session")
def pages(seen, fits, other, swaps, checked, tmp_path_factory):
    """Files of a page of one capture with swaps and a check, and of a page of two captures; the first page."""
    folder, page = tmp_path_factory.mktemp("pages"), normscope.report(seen, fits, drift=swaps, check=checked)
    few = [[fit for fit in fits if fit.curve in ("tanh", "isru")], normscope.fit(other, "tanh,isru")]
    two = normscope.report([seen, other], few).save(folder / "two.html")
    return SimpleNamespace(one=page.save(folder / "one.html"), two=two, page=page)


@pytest.fixture(scope="session")
def documents(pages):
    """The data in both files, by the names of their elements."""
    element = re.compile(r'<script type="application/json" id="(.*?)">(.*?)</script>', re.DOTALL)
    texts = [file.read_text(encoding="ascii") for file in (pages.one, pages.two)]
    return [{name: json.loads(part) for name, part in element.findall(text)} for text in texts]


class Opened:
    """A page in a browser without a window."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, file, address="", *, width=1280, scheme="light"):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.driver.get("about:blank")
        self.logs()
        self.driver.get(f"{file.as_uri()}{address}")
        # Observers of sizes draw with the next frame, which a busy machine reaches after the load event.
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        return self

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, key):
        self.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))", key)

    def texts(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def painted(self, place=0):
        """A digest of the pixels of a canvas."""
        return self.run("return document.querySelectorAll('canvas')[arguments[0]].toDataURL()", place)

    def logs(self):
        """What was written to the console, and what was asked of a network, since they were last read."""
        console = [line["message"] for line in self.driver.get_log("browser")]
        messages = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        asked = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
        return console, [message["params"]["request"]["url"] for message in asked]


@pytest.fixture(scope="session")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = (
        next(filter(None, map(shutil.which, names)), None)
        for names in (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",))
    )
    if not (chromium and driver):
        pytest.skip("no Chromium with its chromedriver is installed (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield Opened(started)
    started.quit()
