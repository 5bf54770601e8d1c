"""A rater in a real browser: comes by a link, answers, closes the browser, comes back and goes on."""

import os
import re
import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'freenergy[web]'")
import uvicorn
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from freenergy.apps.study import Store, Study, StudySettings, simulate, summarise
from freenergy.apps.study.items import Item
from freenergy.apps.study.web import create_study_app
from freenergy.report.study import write_study_page
from freenergy.web.running import address, bound
from freenergy.web.security import LOOPBACK_HOSTS

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="no browser here: apt-get install chromium chromium-driver to see the page"
    ),
]
PICTURES = Path(__file__).resolve().parents[3] / "docs" / "pictures"
TEXTS = [  # a beginning, what a model might write, what a person wrote
    (
        " The lighthouse at the end of the bay was built in 1874, after three ships had been lost in one winter.",
        " It was the first of the bay to be the first in the bay, and in 1874 the bay was built by the winter.",
        " Its keeper wrote a line every night into a book that is still kept in the town hall.",
    ),
    (
        " In its second season the series moved to Sunday evenings, where it met a larger audience, and the critics",
        " of the season were of the second audience of the series, which was of the season of the critics.",
        " who had called it slow a year before now praised its patience.",
    ),
    (
        " The species was first described by a schoolmaster from Leeds, who had found it under the bark of",
        " the species of the described and found under the first of it, which it is also known as the bark.",
        " a fallen oak while looking for something else.",
    ),
    (
        " Construction of the bridge began in May, but the river rose so high in June that the engineers",
        " were constructed in the river of the June in the bridge and a number of the high and the high.",
        " had to wait until the end of summer, and two of them went home.",
    ),
]
SEED = 24  # whose first page shows four different beginnings
HUMAN = {human.strip() for _, _, human in TEXTS}


def made_up(folder, pairs):
    """A study of so many pairs."""
    settings = StudySettings(prefixes=pairs, qualification=4, seed=SEED)
    kinds = ["pair"] * pairs + ["check"] * settings.num_checks + ["qualification"] * 4
    items = [
        Item(number=i, kind=kind, prefix=prefix, a=a, b=b)
        for i, kind in enumerate(kinds)
        for prefix, a, b in [TEXTS[i % 4]]
    ]
    models = {"a": {"name": "wiki (base)", "run": None}, "b": {"name": "wiki (joint)", "run": None}}
    return Study(folder=folder, settings=settings, models=models, items=tuple(items)).write()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return made_up(tmp_path_factory.mktemp("study") / "rivers", 12)


@pytest.fixture(scope="module")
def served(study):
    """The study at an address, and its store."""
    with Store(study) as store, bound("127.0.0.1", 0) as listener:
        app = create_study_app(store, hosts=LOOPBACK_HOSTS)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield address(listener), store
        server.should_exit = True
        thread.join(10)


def open_browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


@pytest.fixture
def browser():
    driver = open_browser()
    yield driver
    driver.quit()


def shown_as(browser, scheme, width, height=900):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def heading(browser):
    return browser.find_element("tag name", "h1").text


def until(browser, words):
    wait = WebDriverWait(browser, 20, ignored_exceptions=[WebDriverException])  # the old page may go while it is read
    wait.until(lambda driver: heading(driver) == words)


def picture(browser, name, tmp_path):
    """Keep a picture for the docs when asked, else only see that it can be taken."""
    folder = PICTURES if os.environ.get("FREENERGY_PICTURES") else tmp_path
    folder.mkdir(exist_ok=True)
    assert browser.save_screenshot(str(folder / name))
    assert (folder / name).stat().st_size > 10_000


def sure_keys(browser):
    """The keys that choose the human text at each place."""
    boxes = browser.find_elements("css selector", ".comparison")
    firsts = [box.find_elements("css selector", ".words")[0].text for box in boxes]
    return ["1" if words.strip() in HUMAN else "2" for words in firsts]


def silent(browser):
    return [line for line in browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")] == []


def test_a_rater_closes_the_browser_and_goes_on(served, tmp_path):
    where, store = served
    link = f"{where}/#{store.invite(1)[0].token}"
    browser = open_browser()
    try:
        shown_as(browser, "light", 1280, 1180)
        browser.get(link)
        until(browser, "Page 1 of 1")  # the qualification
        assert browser.current_url == f"{where}/rate"
        browser.find_element("tag name", "body").send_keys(*sure_keys(browser))
        assert browser.find_element("id", "status").text == "4 of 4 chosen"
        assert browser.switch_to.active_element.text == "Submit"
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        until(browser, "Page 1 of at most 4")
        for box in browser.find_elements("css selector", ".comparison"):  # with the mouse
            texts = box.find_elements("css selector", ".words")
            next(text for text in texts if text.text.strip() in HUMAN).click()
        browser.execute_script("scrollTo(0, 0)")
        picture(browser, "study.png", tmp_path)
        browser.find_element("css selector", "button.main").click()
        until(browser, "Page 2 of at most 4")
        order = [box.text for box in browser.find_elements("css selector", ".comparison")]
        browser.find_elements("css selector", ".choice")[0].click()  # chosen, but not sent
        assert silent(browser)
    finally:
        browser.quit()
    again = open_browser()  # a new one, which knows no cookie
    try:
        again.get(link)
        until(again, "Page 2 of at most 4")
        assert [box.text for box in again.find_elements("css selector", ".comparison")] == order
        again.find_element("tag name", "body").send_keys(*sure_keys(again), Keys.ENTER)
        until(again, "Page 3 of at most 4")
        assert silent(again)
    finally:
        again.quit()
    found = summarise(store)["by_rater"][0]
    assert (found["pages"], found["votes"], found["for_b"], found["checks_failed"]) == (2, 6, 6, 0)
    assert found["qualification"] == {"right": 4, "given": 4}


def test_the_link_is_not_kept_in_the_history(served, browser):
    where, store = served
    token = store.invite(1)[0].token
    browser.get(f"{where}/#{token}")
    until(browser, "Page 1 of 1")
    entries = browser.execute_cdp_cmd("Page.getNavigationHistory", {})["entries"]
    assert entries[-1]["url"] == f"{where}/rate"
    assert token not in str(entries)


def test_a_token_can_be_typed_and_a_wrong_one_is_told(served, browser):
    where, store = served
    browser.get(where)
    browser.find_element("id", "token").send_keys("wrong", Keys.ENTER)
    WebDriverWait(browser, 20).until(lambda driver: driver.find_elements("css selector", "[role=alert]"))
    assert "not known" in browser.find_element("css selector", "[role=alert]").text
    browser.find_element("id", "token").send_keys(store.invite(1)[0].token, Keys.ENTER)
    until(browser, "Page 1 of 1")


def test_a_page_is_not_sent_with_choices_missing(served, browser):
    where, store = served
    browser.get(f"{where}/#{store.invite(1)[0].token}")
    until(browser, "Page 1 of 1")
    browser.find_elements("css selector", ".choice")[0].click()
    browser.find_element("css selector", "button.main").click()
    assert heading(browser) == "Page 1 of 1"
    assert browser.find_element("id", "status").text == "1 of 4 chosen"
    assert browser.find_element("css selector", "button.main").is_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_on_any_screen(served, browser, scheme, width):
    where, store = served
    shown_as(browser, scheme, width)
    browser.get(f"{where}/#{store.invite(1)[0].token}")
    until(browser, "Page 1 of 1")
    page = "document.documentElement"
    assert browser.execute_script(f"return {page}.scrollWidth - {page}.clientWidth") <= 0
    one, two = browser.find_elements("css selector", ".choice")[:2]
    is_stacked = two.location["y"] >= one.location["y"] + one.size["height"]
    assert is_stacked == (width == 360)
    assert contrast(browser, ".words") >= 7
    assert contrast(browser, ".prefix") >= 4.5
    radio = browser.find_element("css selector", "input[type=radio]")
    radio.send_keys(Keys.SPACE)
    radio.send_keys(Keys.ARROW_DOWN)
    chosen = browser.execute_script("return document.querySelector('input:checked').value")
    assert chosen == "2"
    focus = "return getComputedStyle(document.activeElement.closest('.choice')).outlineStyle"
    assert browser.execute_script(focus) == "solid"


def contrast(browser, selector):
    """WCAG contrast of an element's text with the page's paper."""
    colour = "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])"

    def luminance(where, name):
        parts = [int(part) / 255 for part in re.findall(r"\d+", browser.execute_script(colour, where, name))[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(selector, "color"), luminance("body", "background-color")))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_the_report_shows_the_counts(browser, tmp_path, scheme, width):
    folder = tmp_path / "rivers"
    with Store(made_up(folder, 60)) as store:
        simulate(store, 5, preference=0.6, attention=0.8, seed=1)
        summary = summarise(store)
    shown_as(browser, scheme, width)
    browser.get(write_study_page(folder, summary).as_uri())
    text = browser.find_element("tag name", "body").text
    decided, votes = summary["tests"]["decided"], summary["votes"]
    assert f"{decided['k']} of {decided['n']}" in text
    assert f"{summary['outcomes']['a']}, {summary['outcomes']['b']}, {summary['outcomes']['ties']}" in text
    assert f"{votes['kept']} counted" in text
    assert "5 of 5 raters are simulated" in text
    assert browser.find_element("css selector", "#outcomes svg").size["height"] > 10
    page = "document.documentElement"
    assert browser.execute_script(f"return {page}.scrollWidth - {page}.clientWidth") <= 0
    assert contrast(browser, ".summary") >= 7
    assert silent(browser)
    if width == 1280:
        picture(browser, "study-report.png", tmp_path)
