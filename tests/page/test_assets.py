"""The page in a browser: it loads alone and quietly, and each of its controls does what it says."""

import base64
import dataclasses
import re

import pytest
import torch
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from torch import nn

import normscope
from normscope.show.tables.glossary import definitions

FIRST = "#view=site&site=first"
VIEWS = ("overview", "site", "explorer", "check", "swap", "compare")
PLOT = "const plot = [...Plot.all.values()][0];"
LINES = f"{PLOT} return [...plot.host.querySelectorAll('[data-line]')].map((line) => line.dataset.line)"
LIMITS = f"{PLOT} return [plot.x.low, plot.x.high, plot.y.low, plot.y.high]"


pytestmark = pytest.mark.slow


@pytest.fixture
def page(browser, pages):
    """A page of one capture, at its first site."""
    return browser.open(pages.one, FIRST)


def press_button(page, text):
    page.run("[...document.querySelectorAll('button')].find((b) => b.textContent === arguments[0]).click()", text)


def first_plot(page):
    return page.driver.find_element(By.CSS_SELECTOR, ".plot")


def test_a_click_over_the_depth_opens_a_site(browser, pages):
    page = browser.open(pages.one)
    across = page.run(f"{PLOT} return plot.across(1) - plot.width / 2")
    ActionChains(page.driver).move_to_element_with_offset(first_plot(page), across, 0).perform()
    assert "second" in page.texts(".tip:not([hidden]) div")[0]
    ActionChains(page.driver).click().perform()
    assert page.texts("h2") == ["1 second"]
    assert {"site=second", "view=site"} <= {*page.run("return location.hash.slice(1)").split("&")}
    page.driver.back()
    assert page.run("return state.view") == "overview"


def test_colours_scales_and_curves_redraw_what_they_name(page):
    pictures = {page.painted()}
    for value in ("token", "channel", "asinh"):
        page.click(f"input[value={value}]")
        pictures.add(page.painted())
        assert f"={value}" in page.run("return location.hash")
    assert len(pictures) == 4
    assert {"tanh", "isru"} <= set(page.run(LINES))
    press_button(page, "isru")
    assert "isru" not in page.run(LINES) and "tanh" in page.run(LINES)
    page.driver.refresh()
    assert page.run("return [state.colour, state.scale, [...state.hidden].join()]") == ["channel", "asinh", "isru"]


def test_axes_are_linear_and_keys_are_in_whole_pairs(page):
    linear, asinh = page.run("return [open.site.drawn.axes.linear, open.site.drawn.axes.asinh]")
    assert page.run(LIMITS)[:2] == linear["limits"] and linear["limits"][1] < asinh["limits"][1]
    assert linear["beyond"] == 0 and "norm input x" in page.texts("svg text")
    most = f"{linear['density']['most']:,}"
    low, _, high = page.texts("#colour-key span")
    assert low == "pairs per cell: 1" and high.startswith(f"{most}, on a logarithmic scale")
    page.click("input[value=asinh]")
    assert page.run(LIMITS)[:2] == asinh["limits"] and "norm input x (asinh scale)" in page.texts("svg text")


def test_pairs_beyond_a_linear_axis_are_counted(browser, tmp_path):
    x = torch.randn(24, 6, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0, 3] = 300
    report = normscope.report(normscope.capture(nn.Sequential(nn.LayerNorm(16)), [x]))
    page = browser.open(report.save(tmp_path / "spike.html"), "#view=site&site=0&x=linear")
    assert page.run(LIMITS)[1] < 10 and "norm input x · 1 pair beyond" in page.texts("svg text")


def test_hovering_names_the_pair(browser, pages, seen):
    page = browser.open(pages.one, f"{FIRST}&x=asinh")
    tokens = seen.stats["first"].largest
    spot = page.run(f"""{PLOT} const {{x, y}} = pointsOf(open.site);
        const at = [...x.keys()].sort((a, b) => x[b] - x[a])[0];
        return [plot.across(x[at]) - plot.width / 2, plot.upwards(y[at]) - plot.high / 2]""")
    ActionChains(page.driver).move_to_element_with_offset(first_plot(page), *map(round, spot)).perform()
    first, second = page.texts(".tip:not([hidden]) div")
    assert first == f"sample {int(tokens.sample[0])}, token {int(tokens.position[0])} · channel 3"
    assert second.startswith("x 300 ")


def test_a_pick_lights_up_in_every_site(page):
    page.click("input[value=channel]")
    assert len(page.texts("#colour-key .key")) == 4 and page.texts("#colour-key .key")[0] == "channel 3"
    before = page.painted()
    search = page.driver.find_element(By.ID, "search")
    search.send_keys("channel 3")
    assert [text.split(" max")[0] for text in page.texts(".results button")] == ["channel 3"]
    page.click(".results button")
    assert page.painted() != before and "pick=channel%3A3" in page.run("return location.hash")
    assert page.texts("#colour-key .key") == [] and len(page.texts(".chip")) == 1  # a colour stands for one channel
    page.run("stepSite(1)")
    lit = page.painted()
    page.click(".chip")
    assert page.painted() != lit and page.run("return state.picks.length") == 0
    page.driver.find_element(By.ID, "search").send_keys("sample 2")
    assert page.texts(".results button") and all(text.startswith("sample 2") for text in page.texts(".results button"))


def test_zoom_and_back(page):
    low, high, *_ = page.run(LIMITS)
    pointer = ActionChains(page.driver).move_to_element_with_offset(first_plot(page), -60, -60)
    pointer.click_and_hold().move_by_offset(120, 90).release().perform()
    from_, to, *_ = page.run(LIMITS)
    assert low < from_ < to < high
    across, width = page.run(f"{PLOT} return [plot.width / 2 - 60 - plot.box.left, plot.box.width]")
    assert from_ == pytest.approx(low + across / width * (high - low), abs=0.02 * (high - low))
    assert to - from_ == pytest.approx(120 / width * (high - low), rel=0.02)
    ActionChains(page.driver).double_click(first_plot(page)).perform()
    assert page.run(LIMITS)[:2] == [low, high]


def test_keys_zoom_the_figure_that_has_the_focus(page):
    whole = page.run(LIMITS)
    figure = page.driver.find_element(By.CSS_SELECTOR, ".plot svg")
    low, high = whole[:2]
    middle, length = (low + high) / 2, high - low
    for key, expected in [
        (Keys.ARROW_RIGHT, None),  # nothing to move: the next site opens
        ("+", (middle - length / 4, middle + length / 4)),
        (Keys.ARROW_RIGHT, (middle - length / 8, middle + 3 * length / 8)),
        ("+", (middle, middle + length / 4)),
        ("-", (middle - length / 8, middle + 3 * length / 8)),
        ("0", (low, high)),
    ]:
        figure.send_keys(key)
        if expected is None:
            assert page.run("return open.site.name") == "second"
            page.press("ArrowLeft")
            figure = page.driver.find_element(By.CSS_SELECTOR, ".plot svg")
        else:
            assert page.run(LIMITS)[:2] == pytest.approx(expected, abs=1e-6 * length), key
    assert page.run("return open.site.name") == "first" and page.run(LIMITS) == pytest.approx(whole)


def accessible(page, *roles):
    """Names and descriptions of the parts of these roles, as a screen reader gets them."""
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    chosen = [node for node in nodes if node.get("role", {}).get("value") in roles]
    return [tuple(node.get(part, {}).get("value", "") for part in ("name", "description")) for node in chosen]


def test_charts_describe_their_data(page, fits):
    described = dict(accessible(page, "image", "img"))
    [text] = [text for name, text in described.items() if name.startswith("S-curve of 0 first")]
    assert text.startswith("output y, before the affine step against norm input x")
    words = re.search(r"tanh: lowest (\S+) at (\S+), highest (\S+) at (−?[\d.]+\d)", text).groups()
    lowest, low, highest, high = (float(word.replace("−", "-")) for word in words)
    values = [float(fits["first", "tanh"](torch.tensor([end]).double())) for end in (low, high)]
    assert low < 0 < high and [lowest, highest] == pytest.approx(values, rel=0.01)  # three digits


@pytest.mark.parametrize("view", VIEWS)
def test_names_of_controls_contain_their_visible_text(browser, pages, view):
    """WCAG 2.5.3: whoever speaks the words on a button presses it."""
    page = browser.open(pages.one if view in ("check", "swap") else pages.two, f"#view={view}&pick=channel:3")
    visible = page.run("""return [...document.querySelectorAll("button[aria-label]")].map((button) => (
        [button.ariaLabel, button.innerText.replace(/[^\\p{L}\\d ]/gu, "").trim()]))""")
    assert visible and [pair for pair in visible if pair[1].lower() not in pair[0].lower()] == []


def test_fits_show_every_column_beside_each_other(browser, pages):
    page = browser.open(pages.one, FIRST)
    width, room = page.run("const s = document.querySelector('.scrolls'); return [s.scrollWidth, s.clientWidth]")
    assert width <= room and page.texts("th")[-1] == "saturated"


def test_a_check_is_a_row_per_question_with_its_sites_folded(browser, pages, hostile):
    page = browser.open(pages.one, "#view=check")
    assert page.texts(".answer .verdict") == ["note", "omitted"]
    assert page.texts(".answer strong") == ["attention <b>: ", "γ: "]
    assert (
        page.texts(".answer code") == ["normscope simplify"]
        and "see normscope simplify <b>" in page.texts("summary")[0]
    )
    assert page.run("return document.querySelector('details').open") is False
    page.driver.find_element(By.CSS_SELECTOR, "summary").send_keys(Keys.ENTER)
    assert page.run("return document.querySelector('details').open") is True
    cells = page.texts("details td")
    assert cells[1:6] == ["1230", "16", "yes", "–", "<b>, two"] and cells[7:10] == ["0.5", "16", "no"]
    page.click("details tr:nth-child(2) .link")
    assert page.texts("h2") == ["1 second"]


def test_rows_of_zeros_alone_are_not_drawn(browser, pages):
    page = browser.open(pages.one)
    for number in (0, 2):
        page.run("open.site.numbers.massive_channels = arguments[0]; render()", number)
        shown = page.texts(".strip h3")
        assert "Amplitude A" in shown and ("Massive channels, and massive tokens of 16" in shown) is bool(number)


def touch(page, *spots):
    """Where each finger is now; none where all have left."""
    kind = "touchMove" if page.fingers == len(spots) else "touchEnd" if len(spots) < page.fingers else "touchStart"
    page.fingers = len(spots)
    points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(spots)]
    page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    # The browser hands movements on once a frame.
    page.driver.execute_async_script("const done = arguments[0]; setTimeout(() => requestAnimationFrame(done), 80)")


def test_two_fingers_zoom_and_one_scrolls(browser, pages):
    page = browser.open(pages.one, FIRST, width=390)
    page.fingers = 0
    page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    whole = page.run(LIMITS)
    left, top, width, height = page.run(
        f"""{PLOT} plot.host.scrollIntoView({{block: "center"}});
        const box = plot.host.getBoundingClientRect();
        return [box.left + plot.box.left, box.top + plot.box.top, plot.box.width, plot.box.height]"""
    )

    def spot(across, upwards):
        return left + across * width, top + (1 - upwards) * height

    try:
        scrolled = page.run("return window.scrollY")
        touch(page, spot(0.4, 0.5))
        for one, two in ((0.4, 0.6), (0.35, 0.75), (0.3, 0.9)):
            touch(page, spot(one, 0.5), spot(two, 0.5))
        zoomed = page.run(LIMITS)
        # The fingers hold what they took: the middle of 0.4 and 0.6 is where 0.3 and 0.9 have theirs, at three times.
        middles = [low + share * (high - low) for (low, high), share in ((zoomed[:2], 0.6), (whole[:2], 0.5))]
        assert middles[0] == pytest.approx(middles[1], abs=0.02 * (whole[1] - whole[0]))
        assert (zoomed[1] - zoomed[0]) / (whole[1] - whole[0]) == pytest.approx(1 / 3, rel=0.03)
        assert (zoomed[3] - zoomed[2]) / (whole[3] - whole[2]) == pytest.approx(1 / 3, rel=0.03)
        touch(page, spot(0.55, 0.5), spot(0.6, 0.5))
        assert page.run(LIMITS) == pytest.approx(whole)
        touch(page)
        assert page.run("return window.scrollY") == scrolled
        for up in (0.2, 0.3, 0.4, 0.6, 0.8, 0.9):
            touch(page, spot(0.5, up))
        touch(page)
        assert page.run(LIMITS) == pytest.approx(whole)
        assert page.run("return window.scrollY") > scrolled + 20
    finally:
        page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_keys(page):
    for key, script, expected in [
        ("ArrowRight", "return open.site.name", "second"),
        ("ArrowLeft", "return open.site.name", "first"),
        ("t", "return state.colour", "token"),
        ("l", "return palette.theme", "dark"),
        ("/", "return document.activeElement.id", "search"),
        ("3", "return state.view", "explorer"),
        ("1", "return state.view", "overview"),
        ("?", "return document.getElementById('help').open", True),
    ]:
        page.press(key)
        assert page.run(script) == expected, key


def test_light_and_dark_follow_the_system_until_asked(browser, pages):
    for scheme in ("dark", "light"):
        page = browser.open(pages.one, scheme=scheme)
        assert page.run("return document.documentElement.dataset.theme") == scheme
    page.open(pages.one, FIRST)
    light = page.painted()
    page.click("#theme")
    assert page.run("return document.documentElement.dataset.theme") == "dark" and page.painted() != light
    page.driver.refresh()
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.press("l")
    assert page.painted() == light


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_telephone(browser, pages, view):
    page = browser.open(pages.one if view in ("check", "swap") else pages.two, f"#view={view}", width=390)
    assert page.run("return document.documentElement.scrollWidth") <= 390
    ends = page.run("return [...document.querySelectorAll('figcaption button')].map((b) => b.getBoundingClientRect())")
    assert all(end["width"] > 0 and end["right"] <= 390 for end in ends)


def test_headings_sort_a_table_and_define_themselves(browser, pages):
    page = browser.open(pages.one)
    column = "return [...document.querySelectorAll('tbody td:nth-child(8)')].map((cell) => cell.textContent)"
    before = page.run(column)
    heading = page.driver.find_element(By.CSS_SELECTOR, "th:nth-child(8) button")
    assert heading.text.startswith("tanh R²") and heading.get_attribute("title") == definitions("fit")["R²"]
    heading.send_keys(Keys.ENTER)
    state = "return [...document.querySelectorAll('th')].map((cell) => cell.ariaSort).filter(Boolean)"
    numbers = sorted((text for text in before if text != "–"), key=float)
    missing = ["–"] * before.count("–")
    assert page.run(column) == [*numbers, *missing] and page.run(state) == ["ascending"]
    heading.send_keys(Keys.ENTER)
    assert page.run(column) == [*reversed(numbers), *missing] and page.run(state) == ["descending"]
    page.click("tbody tr .link")
    assert page.run("return score(open.site.fits[0].r2)") == numbers[-1]


def test_tables_are_saved_as_csv(page, fits):
    page.run("window.download = (blob, ...name) => { window.saved = [blob, name.join()]; }")
    press_button(page, "Save CSV")
    text, name = page.driver.execute_async_script("saved[0].text().then((text) => arguments[0]([text, saved[1]]))")
    lines = text.splitlines()
    assert name == "0 first fits,csv"
    assert lines[0].startswith("curve,A,α,s,slope,R²,held-out R²,ceiling")
    row = next(line for line in lines if line.startswith("isru,")).split(",")
    fit = fits["first", "isru"]
    assert [float(cell) for cell in row[5:8]] == [fit.r2, fit.r2_cv, fit.r2_ceiling]
    cells = [["=1+1", "-3", '"quoted", twice', "two\nlines"]]  # a spreadsheet runs none of them
    assert page.run("return csv(arguments[0])", cells) == '\'=1+1,-3,"""quoted"", twice","two\nlines"'


def test_figures_are_saved(page):
    text = page.run(f"{PLOT} return plot.asSvg()")
    assert text.startswith("<svg") and "data:image/png;base64" in text and "norm input x" in text
    assert "1 second" not in text and "0 first" in text
    # Its key: a line and a name for each curve that is not switched off.
    assert [name in text for name in (">E[y|x]<", ">tanh<", ">isru<", ">derf<")] == [True] * 4
    press_button(page, "isru")
    assert ">isru<" not in page.run(f"{PLOT} return plot.asSvg()")
    picture = page.driver.execute_async_script(f"""const done = arguments[0]; {PLOT}
        asPng(new Blob([plot.asSvg()], {{type: "image/svg+xml"}}), 2)
            .then((blob) => createImageBitmap(blob))
            .then((map) => done([map.width, map.height]), (error) => done(String(error)))""")
    assert picture == page.run(f"{PLOT} return [2 * plot.width, 2 * (plot.high + plot.key().height)]")


def test_what_has_nothing_to_say_says_why(browser, pages):
    page = browser.open(pages.one, "#view=site&site=off")
    assert "There is nothing to draw here: all zero." in page.texts(".warning")
    page.run("go({view: 'explorer'})")
    assert "There is nothing to fit: all zero." in page.texts(".warning")
    assert "These weights are not trained: random weights, seed 0." in page.texts(".warning")


def test_an_address_that_means_nothing_opens_the_overview(browser, pages):
    address = "#view=nothing&site=<b>&capture=99&pick=token:zz&curve=__proto__&hide=%F0%90&beside=9.9+__proto__.1"
    page = browser.open(pages.one, address)
    assert page.run("return [state.view, state.site, state.picks.length, state.curve]") == ["overview", 0, 0, None]
    assert page.run("return Object.keys(state.beside)") == [] and page.logs()[0] == []


def test_the_swap_tab_shows_drift_quality_and_speed(browser, pages):
    page = browser.open(pages.one, "#view=swap")
    cells = page.texts("td")
    assert {"DyT", "0.6", "0.4", "0.9 (0.8 – 0.95)", "1.5 ×", "slower; <b>", "∞"} <= {*cells}
    assert "compiled" in page.texts(".note")
    plots = "return [...document.querySelectorAll('.plot')]"
    marks = page.run(f"{plots}.map((plot) => plot.querySelectorAll('[data-mark]').length)")
    assert marks == [1, 2]  # of an output that is infinitely far there is no mark
    ticks = f"{plots}.map((plot) => [...plot.querySelectorAll('[data-tick=x]')].map((tick) => tick.textContent))"
    assert page.run(ticks) == [["1", "2"], ["1", "2"]]  # the numbers of the sites; how many are swapped
    page.run("go({view: 'overview'})")
    assert "Drift with one site swapped, relative L2" in page.texts(".strip h3")


def test_compared_sites_stand_side_by_side_on_the_same_axes(browser, pages):
    page = browser.open(pages.two, "#view=compare&capture=2&site=second")
    limits = "return [...Plot.all.values()].map((p) => [p.x.low, p.x.high, p.y.low, p.y.high])"
    chosen = ".side-by-side option:checked"
    one, two = page.run(limits)
    assert one == two and page.texts(".side-by-side h3")[1] == "2 the other"
    assert page.texts(chosen) == ["1 second", "1 second"] and page.texts("td:first-child").count("2 the other") == 2
    page.run("const s = document.getElementById('beside-0'); s.value = 0; s.dispatchEvent(new Event('change'))")
    page.driver.refresh()  # the address holds the choice
    one, two = page.run(limits)
    assert one == two and page.texts("td:nth-child(2)") == ["first"] * 2 + ["second"] * 2
    assert page.texts(chosen) == ["0 first", "1 second"]
    page.press("ArrowRight")
    assert page.texts(chosen) == ["2 groups", "2 groups"]


def test_all_of_it_is_printed_white_and_within_the_paper(browser, pages):
    page = browser.open(pages.one, scheme="dark")
    page.run("""window.seen = [];
        const pixels = ({width, height}, context) => context.getImageData(0, 0, width, height).data;
        const inked = ({canvas}) => pixels(canvas, canvas.getContext("2d")).some(Boolean);
        window.addEventListener("beforeprint", () => window.seen.push(palette.theme,
            [...Plot.all.values()].every(({width = 0}) => width <= 700),
            [...Plot.all.values()].filter(({small}) => small).map(inked),
            // A browser repeats the text of a head on the next page, but no button.
            getComputedStyle(document.querySelector("th button")).display));
        const width = () => document.querySelector("table").getBoundingClientRect().width;
        window.widths = [width()];
        window.addEventListener("beforeprint", () => window.widths.push(width()));
        window.addEventListener("afterprint", () => window.widths.push(width()))""")
    paper = base64.b64decode(page.driver.print_page())
    assert page.run("return window.seen") == ["light", True, [True] * 5, "contents"] and paper.startswith(b"%PDF")
    assert page.run("return [palette.theme, document.documentElement.dataset.print === undefined]") == ["dark", True]
    before, printed, after = page.run("return window.widths")  # of 29 columns
    assert before == after > 1280 and 650 < printed <= 701


def test_names_are_short_and_whole_in_the_tooltip(browser, other, tmp_path):
    names = ["encoder.layer.0.attention.output.LayerNorm", "encoder.layer.1.output.LayerNorm"]
    two = other.only("first,second")
    sites = [dataclasses.replace(site, name=name) for site, name in zip(two.sites, names, strict=True)]
    stats = dict(zip(names, two.stats.values(), strict=True))
    seen = dataclasses.replace(two, sites=sites, stats=stats)
    page = browser.open(normscope.report(seen).save(tmp_path / "bert.html"))
    shown = page.run("return [...document.querySelectorAll('.thumbnail')].map((one) => [one.innerText, one.title])")
    assert [(text.splitlines()[0], title) for text, title in shown] == [("0 0.attn", names[0]), ("1 1.out", names[1])]
    assert page.texts("tbody .link") == names


def test_sites_that_are_calls_open_by_their_names(browser, other, tmp_path):
    names = ["(model):layer_norm.0", "blocks.3.attn:rms_norm.0"]
    two = other.only("first,second")
    sites = [dataclasses.replace(site, name=name) for site, name in zip(two.sites, names, strict=True)]
    seen = dataclasses.replace(two, sites=sites, stats=dict(zip(names, two.stats.values(), strict=True)))
    page = browser.open(normscope.report([seen, seen]).save(tmp_path / "calls.html"))
    for place, name in enumerate(names):
        page.run("go({view: 'overview'}); document.querySelectorAll('.thumbnail')[arguments[0]].click()", place)
        page.driver.refresh()  # the address holds the name
        assert page.run("return open.site.name") == name and page.texts("h2")[0].startswith(f"{place} ")
        page.run("location.hash = `view=site&site=${arguments[0]}`", name)  # as typed by hand
        assert page.run("return open.site.name") == name
        page.run("go({view: 'compare'})")
        assert page.texts("td:nth-child(2)") == [name] * 4 and page.logs()[0] == []


def test_a_long_list_of_channels_names_the_tokens_when_they_are_searched(browser, tmp_path):
    x = torch.randn(4, 3, 70, generator=torch.Generator().manual_seed(0))
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(70)), [x])
    page = browser.open(normscope.report(seen, normscope.fit(seen, "tanh")).save(tmp_path / "wide.html"), "#view=site")
    lines = page.texts(".results li")
    assert len(lines) == 61 and all(line.startswith("channel ") for line in lines[:60])
    assert lines[60] == "and 10 more channels, and the tokens"
    page.driver.find_element(By.ID, "search").send_keys("sample 2")
    largest = [line.split(" · ")[0] for line in page.texts(".results li")]
    reach = x[2].abs().amax(1)
    expected = [f"sample 2, token {token} max |x| {reach[token]:.3g}" for token in reach.argsort(descending=True)]
    assert largest == expected


def test_arrows_scroll_a_table_and_step_through_sites_elsewhere(browser, pages):
    page = browser.open(pages.one, FIRST, width=390)
    table = page.driver.find_element(By.CSS_SELECTOR, ".scrolls")
    table.send_keys(Keys.ARROW_RIGHT)
    page.driver.execute_async_script(
        """const done = arguments[1];
        arguments[0].scrollLeft ? done() : arguments[0].addEventListener("scrollend", () => done())""",
        table,
    )
    assert page.run("return [open.site.name, arguments[0].scrollLeft > 0]", table) == ["first", True]
    page.driver.find_element(By.ID, "theme").send_keys(Keys.ARROW_RIGHT)
    assert page.run("return open.site.name") == "second"


def test_the_explorers_sliders_are_below_its_curve_on_a_telephone(browser, pages):
    page = browser.open(pages.one, "#view=explorer&site=first", width=390)
    order = "return [...document.querySelectorAll('.plot, #slider-alpha')].map((e) => e.getBoundingClientRect().top)"
    curve, slider, residual = page.run(order)
    assert curve < slider < residual


def test_counts_have_ticks_at_whole_numbers(page):
    assert page.run("return axisOf([0, 0], {zero: true, whole: true}).ticks(100, 28)") == [0, 1]
    assert page.run("return axisOf([0, 2], {zero: true, whole: true}).ticks(140, 28)") == [0, 1, 2]


def test_a_site_opens_at_its_top_and_the_focus_outlasts_a_step(browser, pages):
    page = browser.open(pages.one)
    page.run("window.scrollTo(0, 900); document.querySelectorAll('.thumbnail')[1].click()")
    assert page.run("return [open.site.name, window.scrollY]") == ["second", 0]
    page.run("document.querySelector('[aria-label=\"Next site\"]').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.run("return [open.site.name, document.activeElement.ariaLabel]") == ["groups", "Next site"]
    page.driver.find_element(By.ID, "tab-explorer").send_keys(Keys.ENTER)
    assert page.run("return [state.view, document.activeElement.id]") == ["explorer", "tab-explorer"]
