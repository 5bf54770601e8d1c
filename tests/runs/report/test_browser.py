"""The page in a real browser: Debian's chromium, in light and dark and as wide as a phone."""

import shutil

import pytest

from freenergy.core.progress import Silent
from freenergy.report import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no browser here: apt-get install chromium chromium-driver to see the page"
    ),
]
FIGURES = ("positions", "draws", "distinct", "densities")


@pytest.fixture(scope="module")
def address(write_run, all_measured, tmp_path_factory):
    evaluation = all_measured()
    evaluation["examples"][0]["prefix"] += "W" * 400  # a word that breaks nowhere
    return write_report(write_run(tmp_path_factory.mktemp("run"), evaluation), Silent()).as_uri()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(params=[("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)], ids=lambda p: f"{p[0]}-{p[1]}")
def shown(request, browser, address):
    """The page, opened from disk."""
    scheme, width = request.param
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for log in ("browser", "performance"):
        browser.get_log(log)  # what was said of the page before
    browser.get(address)
    return browser, scheme, width


def too_wide(browser):
    """By how many pixels the page can be scrolled sideways."""
    page = "document.documentElement"
    return browser.execute_script(f"return {page}.scrollWidth - {page}.clientWidth")


def test_the_page_is_shown_whole(shown, address):
    browser, _, width = shown
    for name in FIGURES:
        svg = browser.find_element("css selector", f"#figure-{name} svg")
        assert svg.is_displayed()
        assert svg.size["width"] > 0.6 * min(width, 500)
        assert svg.size["height"] > 100
    assert too_wide(browser) <= 0, "the page scrolls sideways"
    assert browser.title == "made up – freenergy report", "what a model wrote was run"
    said = browser.get_log("browser")
    assert [line for line in said if line["level"] in ("SEVERE", "WARNING")] == []
    requests = [line["message"] for line in browser.get_log("performance") if "requestWillBeSent" in line["message"]]
    assert requests
    assert all(address in message or '"url":"data:' in message for message in requests), "something was fetched"


def test_ink_stands_out_from_the_paper(shown):
    browser, scheme, _ = shown
    colour = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"

    def brightness(selector, name):
        value = browser.execute_script(colour, selector, name)
        return sum(int(part) for part in value[value.index("(") + 1 : -1].split(",")[:3]) / 765

    paper, tick = brightness("body", "background-color"), brightness("#figure-draws svg text", "fill")
    line = brightness("#figure-positions svg [style*='stroke: var(--joint']", "stroke")
    light = paper > 0.9 and tick < 0.3 and line < 0.5
    dark = paper < 0.2 and tick > 0.7 and line > 0.5
    assert (light, dark) == (scheme == "light", scheme == "dark")


def test_a_keyboard_reaches_everything(shown):
    """Links, tables that scroll, and what unfolds take the focus."""
    browser, _, _ = shown
    reachable = browser.execute_script(
        "return [...document.querySelectorAll('a, summary, [tabindex]')].filter(e => e.tabIndex >= 0).length"
    )
    tables = len(browser.find_elements("css selector", ".scroll"))
    assert tables == 5
    assert reachable >= tables + 10
    opened = browser.find_element("css selector", "#settings details")
    opened.find_element("tag name", "summary").send_keys("\ue007")
    assert opened.get_attribute("open")
    assert 'kind = "ngram"' in opened.text
    assert too_wide(browser) <= 0
