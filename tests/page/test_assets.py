"""The page in a browser: it loads alone and quietly, and each of its controls does what it says."""

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

FIRST = "#view=site&site=first"
VIEWS = ("overview", "site", "explorer", "swap", "compare")


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
    plot = page.driver.find_elements(By.CSS_SELECTOR, ".strip .plot")[0]
    at = page.run("const p = [...Plot.all.values()].find((p) => p.host === arguments[0]); return p.across(1)", plot)
    box = page.run("const b = arguments[0].getBoundingClientRect(); return [b.width, b.height]", plot)
    chain = ActionChains(page.driver).move_to_element_with_offset(plot, at - box[0] / 2, 0).perform()
    assert chain is None and "second" in page.texts(".tip:not([hidden]) div")[0]
    ActionChains(page.driver).click().perform()
    assert page.texts("h2") == ["1 second"]
    assert "site=second" in page.run("return location.hash") and "view=site" in page.run("return location.hash")
    page.driver.back()
    assert page.run("return state.view") == "overview"


def test_colours_scales_and_curves_redraw_what_they_name(page):
    pictures = {page.painted()}
    for colour in ("token", "channel"):
        page.click(f"input[value={colour}]")
        pictures.add(page.painted())
        assert f"colour={colour}" in page.run("return location.hash")
    page.click("input[value=asinh]")
    pictures.add(page.painted())
    assert len(pictures) == 4
    lines = "return [...document.querySelector('.plot').querySelectorAll('[data-line]')].map((e) => e.dataset.line)"
    assert {"tanh", "isru"} <= set(page.run(lines))
    press_button(page, "isru")
    assert "isru" not in page.run(lines) and "tanh" in page.run(lines)
    page.driver.refresh()
    assert page.run("return [state.colour, state.scale, [...state.hidden].join()]") == ["channel", "asinh", "isru"]


def test_hovering_names_the_pair(browser, pages, seen):
    page = browser.open(pages.one, f"{FIRST}&x=asinh")
    plot = first_plot(page)
    tokens = seen.stats["first"].largest
    spot = page.run(
        """const plot = [...Plot.all.values()].find((p) => p.host === arguments[0]);
        const {x} = pointsOf(open.site);
        const at = [...x.keys()].sort((a, b) => x[b] - x[a])[0];
        return [plot.across(x[at]) - plot.width / 2, plot.upwards(pointsOf(open.site).y[at]) - plot.high / 2]""",
        plot,
    )
    ActionChains(page.driver).move_to_element_with_offset(plot, *map(round, spot)).perform()
    first, second = page.texts(".tip:not([hidden]) div")
    assert first == f"sample {int(tokens.sample[0])}, token {int(tokens.position[0])} · channel 3"
    assert second.startswith("x 300 ")


def test_a_pick_lights_up_in_every_site(page):
    page.click("input[value=channel]")
    assert len(page.texts("#colour-key .key")) == 4 and page.texts("#colour-key .key")[0] == "channel 3"
    before = page.painted()
    search = page.driver.find_element(By.ID, "search")
    search.send_keys("channel 3")
    assert [text.split("max")[0] for text in page.texts(".results button")] == ["channel 3"]
    page.click(".results button")
    assert page.painted() != before and "pick=channel%3A3" in page.run("return location.hash")
    assert page.texts("#colour-key .key") == [] and len(page.texts(".chip")) == 1  # a colour stands for one channel
    page.run("stepSite(1)")
    lit = page.painted()
    page.click(".chip")
    assert page.painted() != lit and page.run("return state.picks.length") == 0
    search = page.driver.find_element(By.ID, "search")
    search.send_keys("sample 2")
    assert page.texts(".results button") and all(text.startswith("sample 2") for text in page.texts(".results button"))


def test_zoom_and_back(page):
    plot = first_plot(page)
    limits = "const p = [...Plot.all.values()].find((p) => p.host === arguments[0]); return [p.x.low, p.x.high]"
    low, high = page.run(limits, plot)
    pointer = ActionChains(page.driver).move_to_element_with_offset(plot, -60, -60)
    pointer.click_and_hold().move_by_offset(120, 90).release().perform()
    zoomed = page.run(limits, plot)
    assert low < zoomed[0] < zoomed[1] < high
    ActionChains(page.driver).double_click(plot).perform()
    assert page.run(limits, plot) == [low, high]


def touch(page, *spots):
    """Where each finger is now; none where all have left."""
    kind = "touchMove" if page.fingers == len(spots) else "touchEnd" if len(spots) < page.fingers else "touchStart"
    page.fingers = len(spots)
    points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(spots)]
    page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    # The browser hands movements on once a frame, and the figure follows in the next one.
    page.driver.execute_async_script("const done = arguments[0]; setTimeout(() => requestAnimationFrame(done), 80)")


def test_two_fingers_zoom_and_one_scrolls(browser, pages):
    page = browser.open(pages.one, f"{FIRST}&x=linear", width=390)
    page.fingers = 0
    page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    state = "const p = [...Plot.all.values()][0]; return [p.x.low, p.x.high, p.y.low, p.y.high]"
    whole = page.run(state)
    left, top, width, height = page.run(
        """const p = [...Plot.all.values()][0]; p.host.scrollIntoView({block: "center"});
        const box = p.host.getBoundingClientRect();
        return [box.left + p.box.left, box.top + p.box.top, p.box.width, p.box.height]"""
    )

    def spot(across, upwards):
        return left + across * width, top + (1 - upwards) * height

    def at(limits, across, upwards):
        x, to_x, y, to_y = limits
        return x + across * (to_x - x), y + upwards * (to_y - y)

    try:
        scrolled = page.run("return window.scrollY")
        touch(page, spot(0.4, 0.5))
        touch(page, spot(0.4, 0.5), spot(0.6, 0.5))
        touch(page, spot(0.35, 0.5), spot(0.75, 0.5))
        touch(page, spot(0.3, 0.5), spot(0.9, 0.5))
        zoomed = page.run(state)
        # The fingers hold what they took: the middle of 0.4 and 0.6 is where 0.3 and 0.9 have theirs, at three times.
        assert at(zoomed, 0.6, 0.5) == pytest.approx(at(whole, 0.5, 0.5), abs=0.02 * (whole[1] - whole[0]))
        assert (zoomed[1] - zoomed[0]) / (whole[1] - whole[0]) == pytest.approx(1 / 3, rel=0.03)
        assert (zoomed[3] - zoomed[2]) / (whole[3] - whole[2]) == pytest.approx(1 / 3, rel=0.03)
        touch(page, spot(0.55, 0.5), spot(0.6, 0.5))
        assert page.run(state) == pytest.approx(whole)
        touch(page)
        assert page.run("return window.scrollY") == scrolled
        for up in (0.2, 0.3, 0.4, 0.6, 0.8, 0.9):
            touch(page, spot(0.5, up))
        touch(page)
        assert page.run(state) == pytest.approx(whole)
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
    page = browser.open(pages.two, f"#view={view}", width=390)
    assert page.run("return document.documentElement.scrollWidth") <= 390


def test_tables_are_copied_as_csv(page, fits):
    page.run("window.taken = null; window.copied = (text) => { window.taken = text; }")
    press_button(page, "Copy CSV")
    lines = page.run("return window.taken").splitlines()
    assert lines[0].startswith("curve,A,α,s,slope,R²")
    row = next(line for line in lines if line.startswith("isru,")).split(",")
    assert float(row[5]) == fits["first", "isru"].r2
    cells = [["=1+1", "-3", '"quoted", twice', "two\nlines"]]  # a spreadsheet runs none of them
    assert page.run("return csv(arguments[0])", cells) == '\'=1+1,-3,"""quoted"", twice","two\nlines"'


def test_figures_are_saved(page):
    text = page.run("return [...Plot.all.values()][0].asSvg()")
    assert text.startswith("<svg") and "data:image/png;base64" in text and "norm input x" in text
    assert "1 second" not in text and "0 first" in text
    # Its key: a line and a name for each curve that is not switched off.
    assert [name in text for name in (">E[y|x]<", ">tanh<", ">isru<", ">derf<")] == [True] * 4
    press_button(page, "isru")
    assert ">isru<" not in page.run("return [...Plot.all.values()][0].asSvg()")
    picture = page.driver.execute_async_script("""const done = arguments[0]; const plot = [...Plot.all.values()][0];
        asPng(new Blob([plot.asSvg()], {type: "image/svg+xml"}), 2)
            .then((blob) => createImageBitmap(blob))
            .then((map) => done([map.width, map.height]), (error) => done(String(error)))""")
    size = page.run("const plot = [...Plot.all.values()][0]; return [plot.width, plot.high + plot.key().height]")
    assert picture == [2 * size[0], 2 * size[1]]


def test_what_has_nothing_to_say_says_why(browser, pages):
    page = browser.open(pages.one, "#view=site&site=off")
    assert "There is nothing to draw here: all zero." in page.texts(".warning")
    page.run("go({view: 'explorer'})")
    assert "There is nothing to fit: all zero." in page.texts(".warning")
    assert "These weights are not trained: random weights, seed 0." in page.texts(".warning")


def test_an_address_that_means_nothing_opens_the_overview(browser, pages):
    page = browser.open(pages.one, "#view=nothing&site=<b>&capture=99&pick=token:zz&curve=__proto__&hide=%F0%90")
    assert page.run("return [state.view, state.site, state.picks.length, state.curve]") == ["overview", 0, 0, None]
    assert page.logs()[0] == []


def test_the_swap_tab_shows_drift_quality_and_speed(browser, pages):
    page = browser.open(pages.one, "#view=swap")
    cells = page.texts("td")
    assert {"dyt", "0.6", "0.4", "50.0 %", "0.9 (0.8 – 0.95)", "1.5 ×", "slower; <b>", "∞"} <= {*cells}
    assert "compiled" in page.texts(".note")
    plots = "return [...document.querySelectorAll('.plot')]"
    marks = page.run(f"{plots}.map((plot) => plot.querySelectorAll('[data-mark]').length)")
    assert marks == [1, 2]  # of an output that is infinitely far there is no mark
    page.run("go({view: 'overview'})")
    assert "Drift with one site swapped, relative L2" in page.texts(".strip h3")


def test_compared_sites_stand_side_by_side_on_the_same_axes(browser, pages):
    page = browser.open(pages.two, "#view=compare&capture=2&site=second")
    limits = "return [...Plot.all.values()].map((p) => [p.x.low, p.x.high, p.y.low, p.y.high])"
    assert page.texts(".side-by-side h3")[1] == "2 the other"
    assert page.texts(".side-by-side option:checked") == ["1 second", "1 second"]
    one, two = page.run(limits)
    assert one == two and page.texts("td:first-child").count("2 the other") == 2
    choose = "const s = document.getElementById('beside-0'); s.value = 0; s.dispatchEvent(new Event('change'))"
    page.run(choose)
    page.driver.refresh()  # the address holds the choice
    assert page.texts(".side-by-side option:checked") == ["0 first", "1 second"]
    one, two = page.run(limits)
    assert one == two and page.texts("td:nth-child(2)") == ["first"] * 2 + ["second"] * 2
    page.press("ArrowRight")
    assert page.texts(".side-by-side option:checked") == ["2 groups", "2 groups"]


def test_it_is_printed_white_and_within_the_paper(browser, pages):
    page = browser.open(pages.one, FIRST, scheme="dark")
    page.run("""window.seen = [];
        window.addEventListener("beforeprint", () => window.seen.push(palette.theme,
            [...Plot.all.values()].every(({width = 0}) => width <= 700)))""")
    page.driver.print_page()
    assert page.run("return window.seen") == ["light", True]
    assert page.run("return [palette.theme, document.documentElement.dataset.print === undefined]") == ["dark", True]


def test_a_site_opens_at_its_top_and_the_focus_outlasts_a_step(browser, pages):
    page = browser.open(pages.one)
    page.run("window.scrollTo(0, 900); document.querySelectorAll('.thumbnail')[1].click()")
    assert page.run("return [open.site.name, window.scrollY]") == ["second", 0]
    page.run("document.querySelector('[aria-label=\"Next site\"]').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.run("return [open.site.name, document.activeElement.ariaLabel]") == ["groups", "Next site"]
    page.driver.find_element(By.ID, "tab-explorer").send_keys(Keys.ENTER)
    assert page.run("return [state.view, document.activeElement.id]") == ["explorer", "tab-explorer"]
