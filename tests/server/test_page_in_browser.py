"""The page at / as Chromium shows it, wide and narrow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator

import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import DEMO, Served, demo_tokenizer, make_service, serving

from llmpq.assigner.planner import even_plan
from llmpq.dist.metrics.progress import Event
from llmpq.server.page.plan_view import PlanView

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.browser
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
KEY = "a-key-of-the-server"


@pytest.fixture(scope="module")
def chromium():
    assert None not in (CHROMIUM, DRIVER), "expected Debian's chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield made
    made.quit()


@pytest.fixture(params=[1400, 420], ids=["wide", "narrow"])
def page(request, chromium) -> Page:
    metrics = {"width": request.param, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    return Page(chromium, request.param)


class Page:
    """The page in a browser of a width, in pixels."""

    def __init__(self, driver, width: int) -> None:
        self.driver, self.width = driver, width

    def open(self, served: Served) -> None:
        self.driver.get_log("performance")
        self.driver.get(f"{served.url}/")
        self.driver.execute_script("sessionStorage.clear()")

    def __getitem__(self, id: str):
        return self.driver.find_element(By.ID, id)

    def wait(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so; an answer that failed meanwhile will not make it so."""
        WebDriverWait(self.driver, PATIENCE_S).until(lambda _: is_so() or self._has_failed())
        assert is_so(), self.messages

    def _has_failed(self) -> bool:
        found = self.driver.find_elements(By.CSS_SELECTOR, ".message")
        return bool(found) and "failed" in (found[-1].get_attribute("class") or "")

    def ask(self, text: str) -> None:
        self["prompt"].send_keys(text, Keys.ENTER)

    @property
    def messages(self) -> list[str]:
        found = self.driver.find_elements(By.CSS_SELECTOR, ".message .text")
        return [element.get_property("textContent") for element in found]

    @property
    def figures(self) -> str:
        found = self.driver.find_elements(By.CSS_SELECTOR, ".message .figures")
        return found[-1].text if found else ""

    def check_layout(self) -> None:
        """Nothing is wider than the window, and no two elements of a row overlap."""
        script = "return document.documentElement.scrollWidth"
        assert self.driver.execute_script(script) <= self.width
        send, prompt = self["send"].rect, self["prompt"].rect
        assert prompt["x"] + prompt["width"] <= send["x"]
        assert send["x"] + send["width"] <= self.width

    def requested(self) -> set[str]:
        """Return the addresses that the browser has asked for."""
        events = (json.loads(line["message"]) for line in self.driver.get_log("performance"))
        return {
            event["message"]["params"]["request"]["url"]
            for event in events
            if event["message"]["method"] == "Network.requestWillBeSent"
        }


@pytest.fixture
def view() -> PlanView:
    plan = even_plan(DEMO, bits=[16, 8, 4, 3], stages=2, shape=(4, 300, 200), micro_batch=(2, 2))
    return PlanView(plan)


@pytest.fixture
def served(view) -> Iterator[Served]:
    with serving(make_service(FakeEngine(step_s=0.01)), view=view) as server:
        yield server


def test_conversation_streams_and_is_sent_whole(page, served):
    page.open(served)
    page.wait(lambda: page["model"].text == "demo")
    page.driver.execute_script("document.getElementById('max-tokens').value = 12")
    page.driver.execute_script("document.getElementById('system').value = 'Be short'")
    page.ask("One")
    page.wait(lambda: "12 tokens" in page.figures)
    assert "tokens/s" in page.figures
    page.ask("Two")
    page.wait(lambda: len(page.messages) == 4 and "12 tokens" in page.figures)
    first, answer, second, _ = page.messages
    assert (first, second) == ("One", "Two")
    prompts = [one.prompt_token_ids for one in served.engine.requests.values()]
    expected = f"<system>Be short\n<user>One\n<assistant>{answer}\n<user>Two\n<assistant>"
    assert demo_tokenizer().decode(prompts[-1], skip_special_tokens=False) == (
        demo_tokenizer().decode(
            demo_tokenizer().encode(expected, add_special_tokens=False), skip_special_tokens=False
        )
    )
    page.check_layout()
    assert all(url.startswith((served.url, "data:")) for url in page.requested())
    # The page of the test before may have asked its server until this one was opened.
    lines = [line for line in page.driver.get_log("browser") if served.url in line["message"]]
    assert [line for line in lines if line["level"] == "SEVERE"] == []


def test_stop_ends_the_answer_and_keeps_what_was_said(page, served):
    page.open(served)
    page.wait(lambda: page["model"].text == "demo")
    page.ask("Go on for long")
    page.wait(lambda: len(page.messages) == 2 and page.messages[1])
    assert not page["send"].is_displayed()
    page["stop"].click()
    page.wait(lambda: "stopped" in page.figures)
    page.wait(lambda: not served.engine.active)
    assert page["send"].is_displayed()
    page["new"].click()
    assert page.messages == []


def test_plan_is_drawn_with_the_load_of_each_stage(page, served, view):
    page.open(served)
    if page.width < 860:
        assert not page["side"].is_displayed()
        page["show-plan"].click()
    view.report(Event(rank=0, kind="busy", done=250, total=1000))
    page.wait(lambda: "busy 25 %" in page["stages"].text)
    rows = page.driver.find_elements(By.CSS_SELECTOR, ".stage")
    assert len(rows) == 2
    cells = rows[0].find_elements(By.CSS_SELECTOR, "rect[class^=bits]")
    assert [cell.get_attribute("class") for cell in cells] == [
        f"bits{bits}" for bits in (16, 8, 4, 3, 16, 8)
    ]
    assert "layers 6 to 11" in rows[1].text
    assert page["legend"].text.split("\n") == ["3 bits", "4 bits", "8 bits", "16 bits"]


def test_error_is_shown_and_the_talk_goes_on(page, served):
    page.open(served)
    page.wait(lambda: page["model"].text == "demo")
    page.driver.execute_script("document.getElementById('max-tokens').value = 100000")
    page.ask("Too long")
    page.wait(lambda: len(page.messages) == 2 and "maximum context length" in page.messages[1])
    page.driver.execute_script("document.getElementById('max-tokens').value = 3")
    page.ask("Short")
    page.wait(lambda: "3 tokens" in page.figures)
    assert page.messages[2] == "Short"


def test_markup_of_a_model_is_text(page):
    text = "<img src=x onerror=alert(1)>"
    script = demo_tokenizer().encode(text, add_special_tokens=False)
    with serving(make_service(FakeEngine(script=script))) as served:
        page.open(served)
        page.wait(lambda: page["model"].text == "demo")
        page.ask("Draw")
        page.wait(lambda: "tokens" in page.figures)
    assert text in page.messages[1]
    assert page.driver.find_elements(By.CSS_SELECTOR, ".message img") == []


def test_model_without_a_template_continues_the_text(page):
    service = make_service(FakeEngine(), tokenizer=demo_tokenizer(None))
    with serving(service) as served:
        page.open(served)
        page.wait(lambda: page["model"].text == "demo")
        page.ask("The server listens on")
        page.wait(lambda: "128 tokens" in page.figures)
        assert "no chat template" in page["talk"].text


def test_server_with_a_key_asks_for_it(page):
    with serving(make_service(FakeEngine()), api_keys=(KEY,)) as served:
        page.open(served)
        page.driver.refresh()
        page.wait(page["key"].is_displayed)
        page["key"].send_keys(KEY, Keys.ENTER)
        page.wait(lambda: page["model"].text == "demo")
        page.driver.execute_script("document.getElementById('max-tokens').value = 3")
        page.ask("Hello")
        page.wait(lambda: "3 tokens" in page.figures)
