"""The playground in a real browser: Debian's chromium, by pointer and by keyboard, wide and narrow, light and dark."""

import json
import os
import re
import shutil
import time
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
from PIL import Image

from freenergy import ResidualModel, UserError, load
from freenergy.models.residual import no_energy
from freenergy.recipes import load_run
from freenergy.samplers import Metropolis
from freenergy.web.playground import EVENNESS
from freenergy.web.settings import Limits

from .playground_fixtures import LENGTH, NASTY, nasty_joint, repeats, served, small_joint, until

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
Keys = webdriver.Keys
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no browser here: apt-get install chromium chromium-driver to see the page"
    ),
]
IS_FOR_DOCS = os.environ.get("FREENERGY_PICTURES") == "1"
RUN = os.environ.get("FREENERGY_PICTURES_RUN")  # a run to show instead of the small model
DOCS = Path(__file__).parents[2] / "docs" / "pictures"
VIEWS = [
    ("playground", (1100, 1560), "light", "html"),
    ("playground-rising", (1100, 640), "light", "#rising-heading"),
    ("playground-phone", (390, 844), "dark", "#candidates-section"),
]
TOKEN = "a-token-of-this-test"
SHOWN = "#prefix=You%20may&candidates=24&seed=3"


@pytest.fixture(scope="module")
def joint():
    return small_joint()


@pytest.fixture(scope="module")
def address(joint):
    with served(joint, limits=Limits(rows=8)) as (where, _):
        yield where


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(downloads):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
    yield driver
    driver.quit()


@pytest.fixture
def see(browser):
    """Opens a page as it is seen with a scheme and a width."""

    def open_page(where, fragment="", *, scheme="light", width=1280, height=900, is_ready=True):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get("about:blank")  # another fragment alone would not load the page again
        for log in ("browser", "performance"):
            browser.get_log(log)  # what was said of the page before
        browser.get(f"{where}/{fragment}")
        if is_ready:
            until(lambda: browser.execute_script("return 'ready' in document.body.dataset"))
        return browser

    return open_page


def one(browser, selector):
    return browser.find_element("css selector", selector)


def words(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def number_of(browser, selector):
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def write(browser, seconds=20.0):
    one(browser, "#write").click()
    finished(browser, seconds)


def finished(browser, seconds=20.0):
    until(lambda: words(browser, "#status") == "written" or one(browser, "#error").is_displayed(), seconds)
    assert not one(browser, "#error").is_displayed(), words(browser, "#error")


def too_wide(browser):
    """By how many pixels the page can be scrolled sideways."""
    page = "document.documentElement"
    return browser.execute_script(f"return {page}.scrollWidth - {page}.clientWidth")


def complaints(browser):
    return [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


def requested(browser):
    """The addresses that the page asked for."""
    found = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    return [one["params"]["request"]["url"] for one in found if one["method"] == "Network.requestWillBeSent"]


LOOKS = [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)]


def ask_the_rest(browser):
    """Open every table, colour the picked text, look at the next token."""
    browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    one(browser, "#picked-colour").click()
    until(lambda: one(browser, "#rising").is_displayed())
    one(browser, "#next-go").click()
    until(lambda: number_of(browser, "#next-table tbody tr") > 0)


@pytest.fixture(params=LOOKS, ids=lambda p: f"{p[0]}-{p[1]}")
def written(request, see, address):
    """A page on which a text was written and coloured, and every table is open."""
    scheme, width = request.param
    browser = see(address, SHOWN, scheme=scheme, width=width)
    write(browser)
    ask_the_rest(browser)
    return browser, scheme, width


def test_a_text_is_written(written, address, joint):
    browser, _, width = written
    assert number_of(browser, "#axis .mark") == 24
    assert number_of(browser, "#axis .chosen-ring") == 1
    found = joint.sample("You may", candidates=24, seed=3)
    assert words(browser, "#chosen-text") == found[0].text
    assert words(browser, "#chosen-prefix") == "You may"
    assert words(browser, "#word") in EVENNESS
    assert f"{found.to_json()['steps'][0]['ess']:.1f} of 24 candidates" in words(browser, "#evidence")
    cards = [words(browser, f"#cards .{name} .written") for name in ("base", "model", "best", "worst")]
    rows = found.to_json(candidates=True)["steps"][0]["candidates"]
    by_energy = sorted(rows, key=lambda row: row["energy"])
    assert cards == [rows[0]["text"], found[0].text, by_energy[0]["text"], by_energy[-1]["text"]]
    assert number_of(browser, "#candidates-table tbody tr") == 24
    assert number_of(browser, "#candidates-table tr.main") == 1
    assert number_of(browser, "#next-table tbody tr") == 6
    assert number_of(browser, "#coloured .piece") > 3
    assert words(browser, "#coloured") == found[0].text
    svg = one(browser, "#axis svg")
    assert svg.size["width"] > 0.6 * min(width, 500)
    assert too_wide(browser) <= 0, "the page scrolls sideways"
    assert complaints(browser) == []
    asked = requested(browser)
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((f"{address}/", "data:,"))] == [], "something was fetched"


SEEN = """
const seen = getComputedStyle(document.querySelector(arguments[0]));
let under = document.querySelector(arguments[0]);
while (getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
return [seen[arguments[1]], getComputedStyle(under).backgroundColor];
"""


def brightness(colour):
    """Relative luminance (WCAG 2)."""
    parts = [float(part) for part in re.findall(r"[\d.]+(?:e-?\d+)?", colour)[:3]]
    parts = parts if colour.startswith("color(") else [part / 255 for part in parts]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_everything_stands_out(written):
    """Contrasts of WCAG 2: 4.5 for words, 3 for what is drawn."""
    browser, scheme, _ = written
    browser.execute_script(
        "for (const one of document.querySelectorAll('.key')) one.style.setProperty('--much', 'var(--mix)')"
    )
    wanted = {("body", "color"): 7, (".hint", "color"): 4.5, ("#write", "color"): 4.5, ("#stop", "color"): 4.5,
              ("#axis .tick", "fill"): 4.5, ("#axis .axis-name", "fill"): 7, (".frame", "stroke"): 3,
              (".chosen-ring", "stroke"): 3, (".mark", "fill"): 3, ("#prefix", "borderTopColor"): 3,
              (".key.rises", "color"): 4.5, (".key.falls", "color"): 4.5, ("caption", "color"): 4.5,
              ("thead th", "color"): 4.5, (".numbers", "color"): 4.5}  # fmt: skip
    for (selector, what), least in wanted.items():
        pair = sorted(brightness(colour) for colour in browser.execute_script(SEEN, selector, what))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (selector, what, scheme)
    paper = brightness(browser.execute_script(SEEN, "body", "color")[1])
    assert (paper > 0.9) == (scheme == "light")
    assert (paper < 0.05) == (scheme == "dark")


def test_colour_is_not_the_only_sign(written):
    """What rises has a solid line below, what falls a dotted one, both the thicker the more."""
    browser, _, _ = written
    found = browser.execute_script(
        "return [...document.querySelectorAll('.piece')].map(one => [one.classList.contains('rises'),"
        " one.classList.contains('falls'), getComputedStyle(one).borderBottomStyle,"
        " parseFloat(getComputedStyle(one).borderBottomWidth), one.getAttribute('aria-label')])"
    )
    sizes = {}
    for rises, falls, style, width, label in found:
        assert not (rises and falls)
        if rises or falls:
            assert style == ("solid" if rises else "dotted")
            assert ("rises by" if rises else "falls by") in label
            sizes[float(re.search(r"by ([\d.]+)", label)[1])] = width
    assert len(sizes) > 3
    order = [sizes[size] for size in sorted(sizes)]
    assert order == sorted(order)
    assert order[-1] > order[0]


def press(browser, *keys):
    for key in keys:
        browser.switch_to.active_element.send_keys(key)


def tab_to(browser, selector):
    """Go on with the tab key, as somebody without a pointer does."""
    for _ in range(80):
        if browser.execute_script("return document.activeElement.matches(arguments[0])", selector):
            return
        press(browser, Keys.TAB)
    raise AssertionError(f"the tab key does not come to {selector}")


def test_a_keyboard_is_enough(see, address):
    browser = see(address, "#candidates=12&seed=5")
    tab_to(browser, "#prefix")
    press(browser, "You may")
    tab_to(browser, "input[name=law]")
    press(browser, Keys.ARROW_RIGHT)
    assert one(browser, "input[value=model]").is_selected()
    tab_to(browser, "#write")
    press(browser, Keys.ENTER)
    finished(browser)
    assert browser.execute_script("return document.activeElement.id") == "write", "the focus was lost"
    tab_to(browser, "#axis svg")
    energies = []
    press(browser, Keys.HOME)
    for _ in range(12):
        energies.append(float(re.search(r"E (\S+),", words(browser, "#picked-numbers"))[1].replace("−", "-")))
        press(browser, Keys.ARROW_RIGHT)
    assert energies == sorted(energies)
    assert len(set(energies)) > 8
    active = one(browser, "#axis svg").get_attribute("aria-activedescendant")
    assert one(browser, f"#{active}").get_attribute("aria-selected") == "true"
    tab_to(browser, "#picked-colour")
    press(browser, Keys.ENTER)
    until(lambda: browser.execute_script("return document.activeElement.id") == "coloured")
    press(browser, Keys.END)
    assert "energy up to here" in words(browser, "#rise-readout")
    assert number_of(browser, ".piece[aria-selected=true]") == 1
    assert browser.execute_script(
        "return getComputedStyle(document.activeElement).outlineStyle"
    ) != "none", "the focus cannot be seen"  # fmt: skip
    tab_to(browser, "#next-go")
    press(browser, Keys.ENTER)
    until(lambda: number_of(browser, "#next-table tbody tr") > 0)
    assert complaints(browser) == []


def test_a_pointer_finds_candidates(see, address):
    browser = see(address, SHOWN)
    write(browser)
    found = set()
    for mark in browser.find_elements("css selector", "#axis .mark")[:6]:
        webdriver.ActionChains(browser).move_to_element(mark).perform()
        number = int(mark.get_attribute("id").removeprefix("mark-"))
        found.add((number + 1, int(words(browser, "#picked-title").removeprefix("Candidate ").split()[0])))
    assert sum(a == b for a, b in found) >= 4, found  # some lie under others


def test_settings_live_in_the_address(see, address):
    browser = see(address, "#prefix=a%20%22b%22%20%26%20c%2B%23&candidates=7&top_k=5&temperature=0.7&seed=9&law=model")
    value = "return document.getElementById(arguments[0]).value"
    assert browser.execute_script(value, "prefix") == 'a "b" & c+#'
    for name, number in (
        ("candidates", "7"),
        ("top_k", "5"),
        ("temperature", "0.7"),
        ("seed", "9"),
        ("length", str(LENGTH)),
    ):
        assert browser.execute_script(value, name) == number
    assert browser.execute_script(value, "candidates-range") == "7"
    assert one(browser, "input[value=model]").is_selected()
    one(browser, "#prefix").clear()
    one(browser, "#prefix").send_keys("new & <old>")
    one(browser, "#candidates-range").send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script(value, "candidates") == "8"
    address_now = browser.current_url
    assert "length" not in address_now, "a default is in the address"
    browser.refresh()
    until(lambda: browser.execute_script("return 'ready' in document.body.dataset"))
    assert browser.current_url == address_now
    assert browser.execute_script(value, "prefix") == "new & <old>"
    assert browser.execute_script(value, "candidates") == "8"
    browser = see(address, "#candidates=many&seed=&law=all&strange=1")
    assert browser.execute_script(value, "candidates") == "64"
    assert browser.execute_script(value, "seed") == "0"
    assert complaints(browser) == []


def test_every_sampler_is_in_the_menu(see, address, joint):
    """Of a sampler without candidates: its settings are sent, what it does not have is off, its text is shown."""
    browser = see(address, "#prefix=You%20may&seed=3&sampler=metropolis&settings=steps%3D9")
    listed = [option.text for option in browser.find_elements("css selector", "#sampler option")]
    assert listed[0] == "resampling"
    assert {"rejection", "sequential", "autoregressive", "base", "independence"} <= set(listed)
    assert not one(browser, "#candidates").is_enabled()
    assert one(browser, "#top_k").is_enabled()
    write(browser)
    found = joint.sample("You may", sampler=Metropolis(steps=9), seed=3)
    assert words(browser, "#chosen-text") == found[0].text
    assert "metropolis" in words(browser, "#evidence")
    assert not one(browser, "#candidates-section").is_displayed()
    one(browser, "#sampler").send_keys("resampling")
    assert one(browser, "#candidates").is_enabled()
    one(browser, "#write").click()
    until(lambda: one(browser, "#error").is_displayed())
    assert "the sampler resampling has no setting 'steps'" in words(browser, "#error")
    one(browser, "#sampler-settings").clear()
    write(browser)
    assert words(browser, "#chosen-text") == joint.sample("You may", candidates=64, seed=3)[0].text
    assert "sampler" not in browser.current_url, "a default is in the address"


def test_an_example_becomes_the_prefix(see, address):
    browser = see(address)
    one(browser, "#example").send_keys(Keys.ARROW_DOWN)
    until(lambda: one(browser, "#prefix").get_property("value") != "")
    assert "prefix=" in browser.current_url


def test_a_long_text_comes_part_by_part(see, address):
    browser = see(address, f"#prefix=You%20may&candidates=10&length={2 * LENGTH + 5}&seed=1")
    write(browser)
    assert number_of(browser, "#part option") == 3
    text = words(browser, "#chosen-text")
    last = words(browser, "#cards .model .written")
    one(browser, "#part").send_keys(Keys.HOME)
    until(lambda: words(browser, "#cards .model .written") != last)
    assert text.startswith(words(browser, "#cards .model .written"))
    assert number_of(browser, "#axis .mark") == 10
    one(browser, "#picked-colour").click()
    until(lambda: one(browser, "#rising").is_displayed())
    assert words(browser, "#coloured") == words(browser, "#cards .model .written")


@pytest.mark.parametrize("width", [1280, 360])
def test_what_a_model_writes_is_text(see, width):
    """Scripts, quotes, text from right to left and endless words are shown, and nothing runs."""
    with served(nasty_joint()) as (where, _):
        browser = see(where, f"#prefix={quote(' '.join(NASTY))}&candidates=40", width=width)
        title = browser.title
        write(browser)
        ask_the_rest(browser)
        shown = words(browser, "#candidates-table")
        assert all(bad in shown for bad in NASTY)
        assert NASTY[0] in words(browser, "#chosen-prefix")
        assert number_of(browser, "script") == 1
        assert number_of(browser, "main img") == 0
        time.sleep(0.2)
        assert browser.title == title
        assert too_wide(browser) <= 0
        assert complaints(browser) == []


def test_the_server_may_ask_for_a_token(see, joint):
    with served(joint, token=TOKEN) as (where, _):
        browser = see(where, SHOWN, is_ready=False)
        until(lambda: one(browser, "#ask-token").is_displayed())
        press(browser, "wrong", Keys.ENTER)
        until(lambda: one(browser, "#token").get_property("value") == "" and one(browser, "#ask-token").is_displayed())
        press(browser, Keys.ESCAPE)
        until(lambda: one(browser, "#error").is_displayed())
        assert "token" in words(browser, "#error")
        browser.refresh()
        until(lambda: one(browser, "#ask-token").is_displayed())
        press(browser, TOKEN, Keys.ENTER)
        until(lambda: browser.execute_script("return 'ready' in document.body.dataset"))
        write(browser)
        assert number_of(browser, "#axis .mark") == 24
        assert TOKEN not in browser.current_url
        browser.refresh()
        until(lambda: browser.execute_script("return 'ready' in document.body.dataset"))
        assert not one(browser, "#ask-token").is_displayed(), "it was asked for twice"


def test_stop_ends_the_work(see):
    def slow(x):
        time.sleep(0.1)
        return repeats(x)

    with served(small_joint(slow), limits=Limits(rows=2, least_rows=1)) as (where, engine):
        browser = see(where, "#prefix=You%20may&candidates=200")
        one(browser, "#write").click()
        until(lambda: number_of(browser, "#axis .mark") >= 2)
        one(browser, "#stop").click()
        until(lambda: words(browser, "#status") == "stopped")
        until(lambda: len(engine.turns) == 0)
        assert engine.counts.cancelled == 1
        assert 2 <= number_of(browser, "#axis .mark") < 200
        assert not one(browser, "#stop").is_displayed()
        assert not one(browser, "#error").is_displayed()
        browser.execute_script("document.getElementById('candidates').value = 4")
        write(browser)
        assert number_of(browser, "#axis .mark") == 4


def test_errors_are_told_in_place(see):
    def breaks(x):
        raise UserError("the energy is <b>tired</b>: let it rest")

    with served(small_joint(breaks)) as (where, _):
        browser = see(where, SHOWN)
        one(browser, "#write").click()
        until(lambda: one(browser, "#error").is_displayed())
        assert words(browser, "#error") == "the energy is <b>tired</b>: let it rest"
        assert words(browser, "#status") == ""
        one(browser, "#rise-go").click()
        until(lambda: one(browser, "#rise-error").is_displayed())
        assert "is empty" in words(browser, "#rise-error")
        assert number_of(browser, "#error b") == 0
    one(browser, "#write").click()
    until(lambda: "does not answer" in words(browser, "#error"))


def test_a_run_without_an_energy_shows_its_base(see, joint):
    with served(ResidualModel(joint.base, no_energy, joint.tokenizer), limits=Limits(rows=4)) as (where, _):
        browser = see(where, "#prefix=You%20may&candidates=6")
        write(browser)
        assert not one(browser, "#axis").is_displayed()
        assert not one(browser, "#next").is_displayed()
        assert number_of(browser, "#candidates-table tbody tr") == 6
        assert words(browser, "#chosen-text")
        assert complaints(browser) == []


def test_the_picture_can_be_saved(see, address, downloads):
    browser = see(address, SHOWN, scheme="dark")
    write(browser)
    one(browser, "#save").click()
    path = downloads / "freenergy-candidates.svg"
    until(path.is_file)
    until(lambda: path.stat().st_size > 0)
    root = ElementTree.parse(path).getroot()
    name = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{name}circle")
    assert len(circles) == 24 + 2  # the chosen one and the one that is looked at have rings
    assert all(circle.get("fill") and not circle.get("class") for circle in circles)
    assert root.find(f"{name}rect").get("fill") == "rgb(21, 24, 29)"
    assert {text.text for text in root.findall(f"{name}text")} >= {"chosen", "energy E (low is likely)"}
    assert complaints(browser) == []


def test_the_pictures_of_the_docs(see, joint, tmp_path):
    """Of the small model, or of a run of WikiText; into the docs where that is asked for."""
    folder, fragment, known = DOCS if IS_FOR_DOCS else tmp_path, "#prefix=You%20may&candidates=128&seed=2", {}
    if RUN is not None:
        fragment = f"#prefix={quote('The song received positive reviews from critics , who praised')}&candidates=128"
        joint, known = load(RUN), {"name": load_run(RUN).recipe.name, "folder": Path(RUN)}
    folder.mkdir(exist_ok=True)
    with served(joint, **known) as (where, _):
        for name, (width, height), scheme, place in VIEWS:
            browser = see(where, fragment, width=width, height=height, scheme=scheme)
            write(browser, 120.0)
            one(browser, "#picked-colour").click()
            until(lambda browser=browser: one(browser, "#rising").is_displayed(), 60.0)
            browser.execute_script("document.activeElement.blur()")
            browser.execute_script("document.querySelector(arguments[0]).scrollIntoView()", place)
            time.sleep(0.3)
            path = folder / f"{name}.png"
            browser.save_screenshot(str(path))
            check_picture(path, (width, height))


def check_picture(path, size):
    """Something is on it, and it is small enough for the docs."""
    with Image.open(path) as picture:
        assert picture.size == size
        seen = picture.convert("RGB")
    seen.save(path, optimize=True)
    colours = seen.getcolors(1 << 24)
    assert len(colours) > 50, "the picture is blank"
    assert max(count for count, _ in colours) < 0.95 * size[0] * size[1]
    assert path.stat().st_size < 300_000


def test_the_docs_have_the_picture():
    page = (DOCS.parent / "playground.md").read_text(encoding="utf-8")
    for name, *_ in VIEWS:
        assert 10_000 < (DOCS / f"{name}.png").stat().st_size < 300_000
        assert f"pictures/{name}.png" in page
