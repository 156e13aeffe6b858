"""Kept inputs in the browser: their places answer the pointer and the keyboard, and the S-curve answers them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from networks import network_of
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample

pytestmark = pytest.mark.slow
WORDS = ("</script><script>alert(1)</script>", "\u202egnp", "w" * 10_000, "", " a\nb", *"cdefg")


HOSTILE = "<img src=x onerror=alert(1)>\u202egnp"


def patches():
    """Sixteen patches after a class token, with norms of queries by head, of tokens and of groups of channels."""

    def forward(self, x):
        x = nn.functional.pixel_unshuffle(x, 4).flatten(2)
        x = torch.cat([torch.full_like(x[..., :1], 0.1).cumsum(1), x], 2)
        self.groups(x)
        x = self.first(x.transpose(1, 2))
        x = x + self.q_norm(x.unflatten(2, (3, 16)).transpose(1, 2)).transpose(1, 2).flatten(2)
        return self.last(x)

    norms = {"first": nn.LayerNorm(48), "q_norm": nn.LayerNorm(16), "last": nn.LayerNorm(48)}
    return network_of(forward, **norms, groups=nn.GroupNorm(2, 48))


@pytest.fixture(scope="module")
def pictures():
    torch.manual_seed(0)
    x = torch.randn(3, 3, 16, 16) * torch.linspace(0.2, 3, 16)
    names = [f"path {number} {HOSTILE}" for number in range(3)]
    batches = []
    for first, step in ((0, 9), (10, 5), (20, 1)):
        samples = tuple(Sample(name, number, first + number, "paths") for number, name in enumerate(names))
        batches.append(Batch((x * (10 - step),), samples=samples, part=f"timestep {step}"))
    return normscope.capture(patches(), batches, keep_inputs=2, about={"model": "pictures"})


@pytest.fixture(scope="module")
def page_file(pictures, ears, tmp_path_factory):
    """Pictures in three timesteps; a waveform; a text of hostile words, two of them padding."""
    torch.manual_seed(0)
    sound = normscope.capture(ears, [torch.randn(4, 800)], keep_inputs=1, about={"model": "sound"})
    words = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8))
    text = normscope.capture(words, [torch.arange(12).view(1, 12)], keep_inputs=1, about={"model": "text"})
    [kept] = text.inputs
    kept.tokens["1"].sigma[10:] = torch.nan
    preview = replace(kept.preview, words=(*WORDS, "[PAD]", "[PAD]"))
    text = replace(text, inputs=[replace(kept, preview=preview)])
    few = [normscope.fit(seen, "tanh") for seen in (pictures, sound, text)]
    file = normscope.report([pictures, sound, text], few).save(tmp_path_factory.mktemp("inputs") / "inputs.html")
    return SimpleNamespace(file=file, pictures=pictures)


def at(site="first", capture=1, **more):
    return f"#view=site&capture={capture}&site={site}" + "".join(f"&{name}={value}" for name, value in more.items())


@pytest.fixture
def page(browser, page_file):
    return browser.open(page_file.file, at())


def the_map(page):
    return page.driver.find_element(By.ID, "input-map")


def pointed_at(page, place):
    """Move the pointer to the middle of a place of the picture or waveform."""
    x, y = page.run(
        """const map = [...Plot.all.values()].find((one) => one.placeOf && one.host.isConnected);
        map.host.scrollIntoView({block: "center"});
        const box = map.boxes.boxOf(arguments[0]);
        const {clientWidth, clientHeight} = map.host;
        return [box.x + box.width / 2 - clientWidth / 2, box.y + box.height / 2 - clientHeight / 2]""",
        place,
    )
    ActionChains(page.driver).move_to_element_with_offset(the_map(page), round(x), round(y)).perform()


def rings(page):
    return page.run("return [...document.querySelectorAll('[data-ring]')].map((ring) => Number(ring.dataset.ring))")


# Ends of a line of the S-curve, in the units of its axes.
ENDS = """const plot = [...Plot.all.values()][0];
    const line = plot.host.querySelector(`[data-line=${arguments[0]}]`);
    if (!line) return null;
    const spots = line.getAttribute("d").slice(1).split("L").map((spot) => spot.split(" ").map(Number));
    return [spots[0], spots.at(-1)].map(([x, y]) => [
        plot.x.value((x - plot.box.left) / plot.box.width), plot.y.value(1 - (y - plot.box.top) / plot.box.height)])"""


def test_hostile_words_and_names_stay_text(browser, page_file):
    page = browser.open(page_file.file, at("1", capture=3))
    assert page.run("return document.querySelectorAll('main script, main img').length") == 0
    shown = page.texts(".word")
    assert shown[0] == WORDS[0] and shown[1] == "\\u202egnp" and shown[4] == " a\\nb" and len(shown[2]) == 200
    assert len(shown) == 10 and "and 2 of padding" in page.texts("#input-map .note")
    assert page.run("return document.documentElement.scrollWidth") <= 1280
    assert "\u202e" not in page.run("return document.body.innerText") and page.logs()[0] == []
    page = browser.open(page_file.file, at())
    assert "\u202e" not in page.run("return document.body.innerText")
    assert page.texts("#inside")[0].startswith("This file contains 4 inputs: path 0 <img src=x")


def test_a_place_that_is_pointed_at_shows_its_token_and_its_line(page, page_file):
    tokens = page_file.pictures.inputs[0].tokens["first"]
    pointed_at(page, 7)
    tail_from = page.run("return open.site.drawn.tail_from")
    share = float(tokens.tail(tail_from)[1][7])
    said = page.texts("#place-said")[0]
    assert said.startswith("patch in row 2, column 3 · token 7 · σ ")
    assert float(said.split("σ ")[1].split(" ")[0]) == pytest.approx(float(tokens.sigma[7]), rel=5e-3)
    assert said.endswith(f"· tail share {100 * share:.1f}% (|x| ≥ {tail_from:g})") and rings(page) == [7]
    for x, y in page.run(ENDS, "token"):
        # Pixels are written to a tenth.
        assert y == pytest.approx((x - float(tokens.shift[7])) / float(tokens.sigma[7]), abs=0.02)
    pointed_at(page, 0)
    assert page.texts("#place-said")[0].startswith("token of no patch · token 0 · σ ")
    ActionChains(page.driver).move_to_element(page.driver.find_element(By.TAG_NAME, "h1")).perform()
    assert rings(page) == [] and page.run(ENDS, "token") is None


def test_a_pin_stays_from_site_to_site_and_in_the_address(page, page_file):
    pointed_at(page, 5)
    ActionChains(page.driver).click().perform()
    assert "pin=1.5.17" in page.run("return location.hash")
    tokens = page_file.pictures.inputs[0].tokens
    for site in ("first", "last"):
        page.run("go({site: open.capture.sites.findIndex(({name}) => name === arguments[0])})", site)
        for x, y in page.run(ENDS, "pinned"):
            expected = (x - float(tokens[site].shift[5])) / float(tokens[site].sigma[5])
            assert y == pytest.approx(expected, abs=0.02)
    page.run("go({site: open.capture.sites.findIndex(({name}) => name === 'q_norm')})")
    assert page.run(ENDS, "pinned") is None
    assert page.texts("#unpin")[0].startswith("pinned: token 5 of 17, which this norm does not have")
    page.driver.back()
    page.driver.refresh()
    assert page.run(ENDS, "pinned") is not None and rings(page) == [5]
    page.click("#unpin")
    assert page.run(ENDS, "pinned") is None and "pin" not in page.run("return location.hash")


def test_keys_go_through_the_places_and_pin(page, page_file):
    host = the_map(page)
    steps = {Keys.ARROW_RIGHT: (0, 1), Keys.ARROW_DOWN: (5,), Keys.END: (16,), Keys.ARROW_UP: (12,)}
    for key, place in ((key, place) for key, places in steps.items() for place in places):
        host.send_keys(key)
        assert rings(page) == [place]
    assert page.run("return open.site.name") == "first"
    host.send_keys(Keys.ENTER)
    assert page.run("return [state.pin.token, document.activeElement.id]") == [12, "input-map"]
    host.send_keys(Keys.HOME, " ")
    assert page.run("return state.pin.token") == 0
    host.send_keys(" ")
    assert page.run("return state.pin") is None


def test_the_slider_goes_through_the_timesteps_and_takes_the_pin_along(browser, page_file):
    page = browser.open(page_file.file, at(pin="1.5.17"))
    assert page.texts("output") == ["timestep 9"]
    slider = page.driver.find_element(By.ID, "part")
    key = page.texts("#heat-key")
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.texts("output") == ["timestep 1"] and page.run("return document.activeElement.id") == "part"
    assert page.run("return document.activeElement.ariaValueText") == "timestep 1"
    kept = page_file.pictures.inputs[4]
    assert kept.part == "timestep 1" and page.run("return [state.input, state.pin.input]") == [4, 4]
    shift, sigma = (float(values[5]) for values in (kept.tokens["first"].shift, kept.tokens["first"].sigma))
    for x, y in page.run(ENDS, "pinned"):
        assert y == pytest.approx((x - shift) / sigma, abs=0.02)
    assert page.texts("#heat-key") == key  # one scale for all
    page.run("const s = document.getElementById('input'); s.value = 1; s.dispatchEvent(new Event('change'))")
    assert page.run("return state.input") == 5 and page.texts("output") == ["timestep 1"]
    page.driver.refresh()
    assert page.run("return [state.input, state.pin.input]") == [5, 4]


def test_colours_are_those_of_sigma_or_of_the_tail(browser, page_file):
    page = browser.open(page_file.file, at("last"))
    place = "const map = [...Plot.all.values()].find((one) => one.placeOf && one.host.isConnected);"
    pixel = f"""{place} const box = map.boxes.boxOf(0);
        return [...map.canvas.getContext("2d").getImageData(box.x + 9, box.y + 9, 1, 1).data].slice(0, 3).join(",")"""
    colour = f"{place} const heat = heatOf(open.site, state.input, map.kept); return heatColour(heat, 0)"
    pictures = {page.run("return document.querySelector('#input-map canvas').toDataURL()")}
    every = torch.cat([one.tokens["last"].sigma for one in page_file.pictures.inputs[::2]]).sort().values
    low = float(every[math.ceil(0.05 * (len(every) - 1))])  # one token apart does not take the colours of the others
    assert float(page.texts("#heat-key .group span")[0].split()[1]) == pytest.approx(low, rel=5e-3)
    assert page.run(colour) == f"rgb({page.run(pixel)})"
    for heat in ("tail", "none"):
        page.click(f".inputs input[value={heat}]")
        pictures.add(page.run("return document.querySelector('#input-map canvas').toDataURL()"))
        assert f"heat={heat}" in page.run("return location.hash")
        if heat == "tail":
            assert f"|x| ≥ {page.run('return open.site.drawn.tail_from'):g}" in page.texts("#heat-key")[0]
            assert page.run(colour) == f"rgb({page.run(pixel)})"
    assert len(pictures) == 3 and page.texts("#heat-key") == []


def test_of_queries_each_head_has_its_tokens(browser, page_file):
    page = browser.open(page_file.file, at("q_norm"))
    page.run("const f = document.getElementById('other'); f.value = 2; f.dispatchEvent(new Event('change'))")
    pointed_at(page, 4)
    token = 2 * 17 + 4
    sigma = float(page_file.pictures.inputs[0].tokens["q_norm"].sigma[token])
    said = page.texts("#place-said")[0]
    assert f"row 1, column 4 · token {token} · head 3" in said
    ActionChains(page.driver).click().perform()
    page.driver.refresh()  # opens at the head of what is pinned
    assert page.run("return document.getElementById('other').value") == "2" and rings(page) == [4]
    assert float(said.split("σ ")[1].split(" ")[0]) == pytest.approx(sigma, rel=5e-3)


def test_a_pair_of_the_s_curve_marks_the_place_of_its_token(browser, page_file):
    page = browser.open(page_file.file, at(colour="token"))
    drawn = page.run("""const {token, x} = pointsOf(open.site);
        return token.findIndex((drawn, at) => (keptOfDrawn(open.site, drawn) || {}).input === 0 && at % 48 === 20)""")
    assert drawn >= 0
    place = page.run("return keptOfDrawn(open.site, pointsOf(open.site).token[arguments[0]]).token", drawn)
    page.run("[...Plot.all.values()][0].point(arguments[0])", drawn)
    assert rings(page) == [place]
    assert page.texts(".tip:not([hidden]) div")[2].startswith("path 0 <img src=x")
    page.run("[...Plot.all.values()][0].left()")
    assert rings(page) == []
    key = page.run("return open.site.drawn.shown.key[pointsOf(open.site).token[arguments[0]]]", drawn)
    page.run("go({picks: [`token:${arguments[0]}`]})", key)
    assert rings(page) == [place]
    ring = page.run("return document.querySelector('[data-ring]').getAttribute('stroke')")
    assert ring == page.run("return palette.style.channels[0]")


def test_frames_are_pointed_at_along_the_waveform(browser, page_file):
    page = browser.open(page_file.file, at("norm", capture=2))
    pointed_at(page, 40)
    assert page.texts("#place-said")[0].startswith("frame 41, samples 320 to 328 · token 40 · σ ") and rings(page) == [
        40
    ]
    assert "100 frames, one every 8 samples" in page.texts(".inputs .note")[-1]


def test_words_are_readable_on_every_colour(browser, page_file):
    page = browser.open(page_file.file, at("1", capture=3))
    word = page.driver.find_elements(By.CSS_SELECTOR, ".word")[6]
    ActionChains(page.driver).move_to_element(word).perform()
    assert page.texts("#place-said")[0].startswith("“d” · token 6 · σ ") and page.texts(".ringed") == ["d"]
    pairs = page.run("return Array.from({length: 101}, (_, at) => [viridis(at / 100), inkOn(viridis(at / 100))])")

    def luminance(colour):
        parts = (
            colour.strip("rgb()").split(",") if "(" in colour else [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        )
        share = np.array([float(part) / 255 for part in parts])
        return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    for colour, ink in pairs:
        low, high = sorted((luminance(colour), luminance(ink)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour


def test_what_is_no_place_is_said(browser, page_file):
    page = browser.open(page_file.file, at("groups"))
    said = "the tokens of this norm are groups of channels, and no places of the input"
    assert said in page.texts(".inputs .note")[-1]
    assert page.run("return document.getElementById('input-map').tabIndex") == -1
    assert page.texts("#place-said") == [""] and page.logs()[0] == []


def test_a_page_without_inputs_says_how_to_keep_some(browser, pages):
    page = browser.open(pages.one)
    assert "none; normscope capture --keep-inputs 2 keeps some to look at, at each site" in page.texts("dd")
    assert page.texts("#inside") == []
    page.run("go({view: 'site'})")
    assert page.texts(".inputs") == []


def test_an_address_of_another_page_is_taken_as_far_as_it_goes(browser, page_file):
    for pin in ("9.5.17", "1.17.17", "1.5.17x99999999999", "x", "1.-1.17", "1.5.16"):
        page = browser.open(page_file.file, at(pin=pin, input=99, heat="<b>"))
        assert page.run("return [state.input, state.heat]") == [5, "sigma"]
        assert page.run(ENDS, "pinned") is None and page.logs()[0] == []
    page.run("go({capture: 1})")
    assert page.run("return state.input") == 0 and page.logs()[0] == []


@pytest.mark.parametrize(("capture", "site"), [(1, "first"), (1, "q_norm"), (2, "norm"), (3, "1")])
def test_inputs_are_no_wider_than_a_telephone(browser, page_file, capture, site):
    page = browser.open(page_file.file, at(site, capture=capture), width=390, scheme="dark")
    assert page.run("return document.documentElement.scrollWidth") <= 390


def test_the_heading_of_an_input_is_printed_on_its_page(page):
    try:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        breaks = "getComputedStyle(document.querySelector(arguments[0]))"
        after = [page.run(f"return {breaks}.breakAfter", part) for part in ("#inputs-title", ".inputs .controls")]
        assert after == ["avoid", "avoid"] and page.run(f"return {breaks}.breakInside", "#input-map") == "avoid"
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
