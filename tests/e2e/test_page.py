"""The live page in a real browser, over a real server: what a person does with it.

The browser is Debian's ``chromium``, or the one that ``CHROMIUM`` names.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.conftest import ServeFactory
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from support.front_process import FrontProcess
from support.server_process import HOST, ServeProcess, free_ports

from inflight_client import InflightClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WAIT_MS = 60_000.0
RECOVER_MS = 120_000.0
ENDLESS = 8000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert path, "no chromium: `make test-all` installs Debian's, or name one in CHROMIUM"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """The page at ``url``; nothing may come from elsewhere, and no error stand in its console."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    problems: list[str] = []
    foreign: list[str] = []
    page.on("console", lambda each: problems.append(each.text) if each.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    base = url.partition("#")[0]
    page.on("request", lambda each: None if each.url.startswith(base) else foreign.append(each.url))
    page.goto(url)
    yield page
    context.close()
    assert problems == []
    assert foreign == []


@pytest.fixture(scope="module")
def page_url(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A front of the shared server."""
    with FrontProcess(tmp_path_factory.mktemp("front"), server.grpc_url) as front:
        yield front.url + "/"


def say(page: Page, text: str) -> Locator:
    """Send a message in the playground; what is answered."""
    page.get_by_label("Your message").fill(text)
    page.get_by_role("button", name="Send").click()
    return page.locator(".message").last


def has_come(page: Page) -> None:
    expect(page.get_by_role("status").first).to_have_text("live")


@contextmanager
def endless_stream(running: ServeProcess, request_id: str) -> Iterator[threading.Thread]:
    """A request that runs until it is stopped, on a thread that ends with it."""
    with InflightClient(running.grpc_url) as client:
        stream = client.stream("1 2 3 4", ENDLESS, request_id=request_id)
        next(iter(stream))
        thread = threading.Thread(target=lambda: [None for _ in stream], daemon=True)
        thread.start()
        yield thread
        client.stop(request_id)
        thread.join(WAIT_MS / 1000)
        assert not thread.is_alive()


def test_a_chat_is_streamed_and_has_a_lane(browser: Browser, page_url: str) -> None:
    with opened(browser, page_url + "#playground") as page:
        has_come(page)
        page.get_by_label("Maximum tokens").fill("40")
        answer = say(page, "1 2 3 <img src=x onerror=alert(1)>")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.locator("#speed")).to_contain_text("first token after")
        assert page.locator("#messages img").count() == 0  # text, never HTML
        page.get_by_role("button", name="Show as curl").click()
        curl = page.locator("#curl-text")
        expect(curl).to_contain_text("/v1/chat/completions")
        expect(curl).to_contain_text('"max_tokens":40')
        answer.get_by_role("button", name="Its lane").click()
        details = page.get_by_label("The chosen request")
        expect(details).to_contain_text("ended")
        expect(details).to_contain_text("of at most 40 tokens")
        expect(details).to_contain_text("context for")
        expect(details).to_contain_text("chatcmpl-")
        assert "<img" not in details.inner_text()
        page.get_by_role("tab", name="Now").click()
        expect(page.locator("#number-first")).to_contain_text("99 %")
        expect(page.locator(".charts canvas")).to_have_count(5)


def test_a_request_is_stopped_with_the_keyboard(
    browser: Browser, page_url: str, server: ServeProcess
) -> None:
    with (
        opened(browser, page_url) as page,
        endless_stream(server, "to-be-stopped") as stream,
    ):
        has_come(page)
        expect(page.locator("#number-requests")).to_have_text("1 / 0 / 0")
        page.keyboard.press("2")
        lanes = page.locator("#lane-canvas")
        lanes.focus()
        details = page.get_by_label("The chosen request")
        for _ in range(50):
            lanes.press("ArrowDown")
            if "to-be-stopped" in details.inner_text():
                break
        expect(details).to_contain_text("generation")
        details.get_by_role("button", name="Stop this request").press("Enter")
        expect(details).to_contain_text("ended: stopped")
        stream.join(WAIT_MS / 1000)
        assert not stream.is_alive()
        lanes.press("Escape")
        expect(details).to_be_hidden()
        page.keyboard.press("3")
        expect(page.locator("#block-numbers")).to_contain_text("free")


def test_the_playground_stops_its_answer(
    browser: Browser, page_url: str, server: ServeProcess
) -> None:
    with opened(browser, page_url + "#playground") as page:
        has_come(page)
        page.get_by_label("Maximum tokens").fill(str(ENDLESS))
        answer = say(page, "1 2 3 4")
        expect(answer).to_contain_text("9")
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(answer).to_contain_text("(stopped)")
        page.get_by_role("tab", name="Now").click()
        expect(page.locator("#number-requests")).to_have_text("0 / 0 / 0")


def test_what_was_not_answered_is_in_no_conversation(browser: Browser, page_url: str) -> None:
    """A message that was refused comes back to be changed; a new chat begins empty at any time."""
    with opened(browser, page_url + "#playground") as page:
        bodies: list[Any] = []
        page.on(
            "request",
            lambda each: bodies.append(each.post_data_json) if each.post_data else None,
        )
        page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(json={}, status=200), times=1
        )
        has_come(page)
        say(page, "1 2")
        expect(page.get_by_label("Your message")).to_have_value("1 2")
        page.get_by_label("Maximum tokens").fill(str(ENDLESS))
        expect(say(page, "3 4")).to_contain_text("9")
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        page.get_by_label("Maximum tokens").fill("5")
        say(page, "5 6")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        said = [[each["content"] for each in body["messages"]] for body in bodies]
        assert said == [["1 2"], ["3 4"], ["5 6"]]


def test_the_last_minutes_under_other_settings(
    browser: Browser, page_url: str, server: ServeProcess
) -> None:
    with InflightClient(server.grpc_url) as client:
        for number in range(8):
            client.generate(f"1 2 3 {number}", 24)
    with opened(browser, page_url + "#whatif") as page:
        has_come(page)
        page.get_by_label("Policy").select_option("max_utilization")
        page.get_by_label("Batch size").fill("2")
        page.get_by_role("button", name="Predict").click()
        rows = page.locator("#whatif-result table tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(2)).to_contain_text("predicted: max_utilization")
        expect(rows.nth(2)).to_contain_text("batch 2")
        expect(page.locator("#whatif-result canvas")).to_have_count(2)


def test_the_page_outlives_a_server(browser: Browser, serve: ServeFactory) -> None:
    [port] = free_ports(1)
    running = serve(options=(f"--openai-port={port}",))
    assert f"http://{HOST}:{port}/" in running.stdout
    with opened(browser, f"http://{HOST}:{port}/#playground") as page:
        has_come(page)
        running.kill_model()
        state = page.locator("#status")
        expect(state).to_have_attribute("data-state", "down", timeout=RECOVER_MS)
        expect(state).to_have_attribute("data-state", "live", timeout=RECOVER_MS)
        expect(say(page, "1 2 3 4")).to_contain_text("8")


def test_a_key_is_asked_for(
    browser: Browser, server: ServeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_API_KEY", "secret")
    with FrontProcess(tmp_path, server.grpc_url) as front:
        context = browser.new_context()
        page = context.new_page()
        page.goto(front.url)
        dialog = page.get_by_role("dialog")
        calls = "Promise.all([live.call('/page/info'), live.call('/page/info')])"
        page.evaluate(
            f"() => {{ window.found = import('/page/live.js').then((live) => {calls}); }}"
        )
        for key in ("wrong", "secret"):
            expect(dialog).to_be_visible(timeout=WAIT_MS)
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use it").click()
        expect(page.get_by_role("status").first).to_have_text("live", timeout=WAIT_MS)
        # Calls that were refused at the same time share one question, and none is lost.
        assert (
            page.evaluate("window.found.then((all) => all.map((each) => each.status))") == [200] * 2
        )
        assert "secret" not in page.content()
        context.close()
        assert httpx.get(front.url + "/page/events").status_code == 401


def test_texts_are_asked_for_when_chosen_and_at_the_end(
    browser: Browser, server: ServeProcess, tmp_path: Path
) -> None:
    with (
        FrontProcess(tmp_path, server.grpc_url, ["--show-text"]) as front,
        opened(browser, front.url + "/#playground") as page,
    ):
        asked: list[str] = []
        page.on(
            "request", lambda each: asked.append(each.url) if "/page/text" in each.url else None
        )
        has_come(page)
        page.get_by_label("Maximum tokens").fill("400")
        answer = say(page, "1 2 3")
        expect(answer).to_contain_text("9")
        answer.get_by_role("button", name="Its lane").click()
        details = page.get_by_label("The chosen request")
        expect(details.locator(".text")).to_contain_text("1 2 3")
        expect(details).to_contain_text("ended")
        last = re.findall(r"\d+", answer.text_content() or "")[-1]
        expect(details.locator(".text pre").last).to_have_text(re.compile(rf" {last}\s*$"))
        assert 1 <= len(asked) <= 2, asked


def test_a_lane_taken_for_ended_comes_back(browser: Browser, page_url: str) -> None:
    ask = """async () => {
        const live = new (await import("/page/live.js")).Live();
        const answer = {
          cursor: "a:0:0", is_new: false, settings: {}, steps: [], standing: [], now_us: 1e6,
          first: [], gaps: [], stats: {}, requests: [], queued: [], num_queued: 0, about: {},
        };
        const lane = () => {
          const { end, endReason, state, segments } = live.lanes.get(7);
          return [end === null, endReason, state, segments.at(-1).kind];
        };
        live.take({ ...answer, is_new: true, queued: [[7, "", 3, 5, 10, "why"]], num_queued: 1 });
        live.take(answer);
        const found = [lane()];
        live.take({ ...answer, now_us: 2e6, requests: [[7, "generation", 1, 3, 1, 0, 0, ""]] });
        return [...found, lane()];
    }"""
    with opened(browser, page_url) as page:
        assert page.evaluate(ask) == [
            [False, "left", "ended", "waiting"],
            [True, "", "generation", "generation"],
        ]


def test_a_lane_is_chosen_before_it_is_told(browser: Browser, page_url: str) -> None:
    """A short answer may be over before the next event; another server counts from 1 again."""
    ask = """async () => {
        const live = new (await import("/page/live.js")).Live();
        const lanes = new (await import("/page/lanes.js")).Lanes(live, false);
        live.onChange(() => lanes.update());
        lanes.show(true);
        const answer = {
          is_new: true, settings: {}, steps: [], standing: [], now_us: 1e6, first: [], gaps: [],
          stats: {}, requests: [], queued: [], num_queued: 0, about: {},
        };
        const shown = () => !lanes.details.hidden && lanes.details.textContent;
        const tell = (cursor, name) => {
          const queued = [[1, name, 3, 5, 10, "why"]];
          live.take({ ...answer, cursor, queued, num_queued: 1 });
          return shown();
        };
        lanes.chooseName("mine");
        return [shown(), tell("a:0:0", "mine"), tell("a:9:9", "mine"), tell("b:0:0", "other")];
    }"""
    with opened(browser, page_url) as page:
        before, told, later, elsewhere = page.evaluate(ask)
    assert before == "Nothing is told of mine yet."
    assert told.startswith("Request 1")
    assert later.startswith("Request 1")
    assert not elsewhere


@pytest.mark.parametrize("part", ["now", "lanes", "blocks", "whatif", "playground"])
def test_it_fits_a_narrow_screen(browser: Browser, page_url: str, part: str) -> None:
    narrow: dict[str, Any] = {"viewport": {"width": 360, "height": 700}, "color_scheme": "dark"}
    with opened(browser, f"{page_url}#{part}", **narrow) as page:
        has_come(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
