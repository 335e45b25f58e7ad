"""The page of `GET /` in headless Chromium: chat, stop, keys, the live view, narrow and dark screens."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, running_server

from slotline.server.keys import Keys

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="needs chromium and chromedriver on the PATH"),
]
MARKUP = "<b>bold</b><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    """A server that asks for a key and has few blocks."""
    settings = {"dtype": "float32", "cache.memory": "64MiB", "observability.check_integrity": True}
    with running_server(Keys((b"user-key",), ()), **settings) as running:
        yield running


class Page:
    """A tab with the page."""

    def __init__(self, server: RunningServer, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.server = server

    def open(self, *, key: str = "user-key", width: int = 1200, scheme: str = "light") -> None:
        """Load the page anew and give it a key."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.get(f"{self.server.url}/")
        if key:
            self.fill("key", key + "\t")
            self.wait(lambda: self.text("state") == "ready" and self.run("return last !== null"))

    def run(self, script: str) -> Any:
        """Run a script in the page."""
        return self.driver.execute_script(script)

    def text(self, name: str) -> str:
        """The text of an element."""
        return self.driver.find_element("id", name).text

    def fill(self, name: str, text: str) -> None:
        """Type into a field."""
        field = self.driver.find_element("id", name)
        field.clear()
        field.send_keys(text)

    def click(self, name: str) -> None:
        """Click on a button."""
        self.driver.find_element("id", name).click()

    def wait(self, condition: Callable[[], object], seconds: float = 30) -> None:
        """Wait until something holds."""
        webdriver.support.wait.WebDriverWait(self.driver, seconds, 0.05).until(lambda _: condition())

    def answered(self) -> str:
        """Wait for the end of the answer, and return what is said of it."""
        self.wait(lambda: self.driver.find_element("id", "send").is_enabled())
        return self.text("note")


@pytest.fixture(scope="module")
def browser(guarded: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    import selenium.webdriver.support.wait  # noqa: F401

    page = Page(guarded, tmp_path_factory.mktemp("profile"))
    try:
        yield page
    finally:
        page.driver.quit()


@pytest.fixture
def page(browser: Page, guarded: RunningServer) -> Iterator[Page]:
    browser.driver.get_log("browser")
    yield browser
    said = [one["message"] for one in browser.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]
    assert [one for one in said if "401" not in one] == [], "no error, and nothing against the policy"
    guarded.everything_returned()


def asked(page: Page, path: str) -> Any:
    return httpx.get(page.server.url + path, headers={"authorization": "Bearer user-key"}).json()


def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page) -> None:
    page.open(key="")
    page.wait(lambda: page.text("state") == "The server asks for an API key.")
    page.fill("key", "wrong\t")
    page.fill("input", "def main(")
    page.click("send")
    assert page.answered().startswith("Not answered: invalid_api_key")
    assert page.run("return document.getElementById('input').value") == "def main("
    page.fill("key", "user-key\t")
    page.wait(lambda: page.text("state") == "ready")
    page.driver.refresh()
    page.wait(lambda: page.text("state") == "ready")
    assert page.run("return [sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


def test_a_conversation_is_streamed_and_goes_on(page: Page) -> None:
    page.open()
    page.driver.find_element("css selector", "summary").click()
    page.fill("most", "12")
    page.fill("temperature", "0")
    page.fill("system", "# code")
    page.fill("input", "def main(\ue007")  # Enter
    assert re.fullmatch(r"\d+ tokens, [\d.]+ s, [\d.]+ tokens a second, ended by (stop|length)", page.answered())
    messages: list[Any] = [{"role": "system", "content": "# code"}, {"role": "user", "content": "def main("}]
    for text in ("def main(", MARKUP):
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        headers = {"authorization": "Bearer user-key"}
        answer = httpx.post(f"{page.server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
        content = answer["choices"][0]["message"]["content"]
        assert page.run("return turns.at(-1)") == {"role": "assistant", "content": content}
        shown = page.run("return [...document.querySelectorAll('.turn')].map((one) => one.lastChild.data)")
        assert shown[-2:] == [text, content]
        if text != MARKUP:
            page.fill("input", MARKUP)
            page.click("send")
            page.answered()
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": MARKUP}]
    assert page.run("return document.querySelectorAll('#talk img, #talk b b').length") == 0, "texts are no markup"
    page.click("clear")
    assert page.run("return [turns.length, document.querySelectorAll('.turn').length]") == [0, 0]


def test_an_answer_is_seen_in_the_engine_and_stopped(page: Page) -> None:
    page.open()
    page.driver.find_element("css selector", "summary").click()
    page.fill("most", "1900")
    page.fill("temperature", "20")  # an end is no more likely than any other token
    page.fill("input", "def main(")
    page.click("send")
    page.wait(lambda: page.text("running") == "1 of 256" and float(page.text("rate").replace(",", "")) > 0)
    assert page.run("return last.cache.used") > 0
    assert re.search(r"\n\S+ running \d+ \d+ \d+ 0 [\d.]+$", page.driver.find_element("css selector", "table").text)
    used = "return last.cache.groups[0].cells.length === 512 && drawn('#2f6fd0')"
    drawn = """
        const drawn = (color) => {
          const canvas = document.querySelector("#maps canvas");
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const wanted = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
          for (let at = 0; at < pixels.length; at += 4) {
            if (wanted.every((value, index) => pixels[at + index] === value)) return true;
          }
          return false;
        };
    """
    assert page.run(drawn + used)
    assert page.run("return document.getElementById('talk').ariaBusy") == "true"
    page.click("stop")
    assert "stopped" in page.answered()
    page.server.everything_returned()
    page.wait(lambda: page.text("running") == "0 of 256")
    assert page.run("return turns.length") == 2, "what came is part of the conversation"


def test_a_model_without_a_chat_template_continues_texts(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.server.state.llm.tokenizer.transformers, "chat_template", None)
    page.open()
    page.run("document.getElementById('most').value = 8")
    page.wait(lambda: page.text("input-label") == "Text to go on with (the model has no chat template)")
    page.fill("input", "def main(")
    page.click("send")
    assert "ended by" in page.answered()
    assert page.run("return [turns.length, document.querySelectorAll('.turn.raw').length]") == [0, 2]


def test_the_plan_is_shown_with_each_rejection_and_its_code(page: Page) -> None:
    page.open()
    plan = asked(page, "/v1/plan")
    shown = page.text("decisions")
    for group in (*plan["cache_groups"], *plan["groups"]):
        assert group["reason"] in shown
        for rejected in group["rejected"]:
            for reason in rejected["reasons"]:
                assert f"{reason['code']} {reason['text']}" in shown
    assert plan["graphs"]["reason"] in shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_and_both_schemes_are_readable(scheme: str, page: Page) -> None:
    page.open(width=360, scheme=scheme)
    assert page.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    names = ("text", "quiet", "wrong", "accent", "panel", "back", "mine", "on-accent", "used", "cached", "shared")
    colors = page.run(f"return Object.fromEntries({json.dumps(names)}.map((name) => [name, color(name).trim()]))")
    for ground in ("panel", "back", "mine"):
        for ink in ("text", "quiet"):
            assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground)
    for ink, ground, least in (("wrong", "panel", 4.5), ("wrong", "back", 4.5), ("on-accent", "accent", 4.5)):
        assert contrast(colors[ink], colors[ground]) >= least, (ink, ground)
    assert all(contrast(colors[state], colors["panel"]) >= 3 for state in ("used", "cached", "shared"))
    dark = contrast(colors["back"], "#ffffff") > contrast(colors["back"], "#000000")
    assert dark == (scheme == "dark")


def test_each_control_has_a_name_and_the_keyboard_reaches_it(page: Page) -> None:
    page.open()
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = {"button", "combobox", "textbox", "spinbutton", "log", "region", "image"}
    found = [
        (node["role"]["value"], node["name"]["value"]) for node in nodes if node.get("role", {}).get("value") in roles
    ]
    assert {role for role, _ in found} >= {"button", "combobox", "textbox", "log", "region"}
    assert all(name for _, name in found), found
    page.run("document.getElementById('model').focus()")
    reached = []
    for _ in range(6):
        page.driver.switch_to.active_element.send_keys("\t")
        reached.append(page.run("const at = document.activeElement; return at.id || at.tagName.toLowerCase()"))
    assert reached == ["key", "summary", "talk", "input", "send", "clear"]


def contrast(one: str, other: str) -> float:
    """The ratio of contrast of two colors, as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
