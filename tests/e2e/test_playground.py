"""The playground as a person meets it: a real browser against the real system."""

import base64
import io
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

playwright_api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.check,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
).split()
MAX_PAGE_BYTES = 80_000
STAGES = ("queue", "fetch", "decode media", "encode", "store", "prefill", "generate")
FINISHED = ".turn:not(.running)"


@dataclass
class Visit:
    """A fresh tab, and everything it complained about or asked the network for."""

    page: Any
    url: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    async def open(self) -> None:
        await self.page.goto(f"{self.url}/playground")
        await self.page.wait_for_selector("#model span:not(:empty)", state="attached")
        await self.page.wait_for_selector("#examples li:nth-child(3)")

    async def ask(self, question: str, *, max_tokens: int = 12) -> Any:
        """Ask, wait until the answer is over, and return its turn."""
        await self.page.locator("#max-tokens").evaluate("(box, n) => box.value = n", max_tokens)
        turns = await self.page.locator(".turn").count()
        await self.page.fill("#question", question)
        await self.page.press("#question", "Enter")
        turn = self.page.locator(".turn").nth(turns)
        await turn.and_(self.page.locator(FINISHED)).wait_for()
        return turn

    async def drop(self, name: str, data: bytes) -> None:
        """Let a file fall on the page, as a person would with the mouse."""
        transfer = await self.page.evaluate_handle(
            """([name, base64]) => {
              const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
              const transfer = new DataTransfer();
              transfer.items.add(new File([bytes], name, { type: "image/png" }));
              return transfer;
            }""",
            [name, base64.b64encode(data).decode()],
        )
        await self.page.dispatch_event("main", "dragover", {"dataTransfer": transfer})
        assert await self.page.is_visible("#dropzone")
        await self.page.dispatch_event("main", "drop", {"dataTransfer": transfer})
        assert not await self.page.is_visible("#dropzone")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with playwright_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Any, stack: Any) -> AsyncIterator[Visit]:
    context = await browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = await context.new_page()
    visit = Visit(page, stack.rest_url)
    page.on("console", lambda line: visit.problems.append(line.text))
    page.on("pageerror", lambda error: visit.problems.append(str(error)))
    page.on("request", lambda request: visit.requests.append(request.url))
    yield visit
    await context.close()


def picture(seed: int) -> bytes:
    """A PNG of its own for every seed, so that no other test has had it encoded."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


async def test_loads_without_complaint_and_asks_nobody_else(visit: Visit) -> None:
    await visit.open()
    assert visit.problems == []
    assert visit.requests
    assert all(url.startswith((visit.url, "blob:", "data:")) for url in visit.requests)


async def test_the_page_is_light() -> None:
    files = [file for file in (resources.files("gateway") / "web").iterdir() if file.is_file()]
    assert sum(len(file.read_bytes()) for file in files) < MAX_PAGE_BYTES


async def test_text_streams_in_and_ends_with_its_timings(visit: Visit) -> None:
    await visit.open()
    await visit.page.evaluate(
        """() => {
          window.growth = 0;
          const count = (records) => (window.growth += records.length);
          const options = { subtree: true, characterData: true };
          new MutationObserver(count).observe(document.querySelector("#turns"), options);
        }"""
    )
    turn = await visit.ask("Hello!")
    assert (await turn.locator(".answer").inner_text()).strip()
    assert await visit.page.evaluate("window.growth") > 1
    report = await turn.locator(".report").inner_text()
    assert [name for name in ("total", "first token", *STAGES) if name not in report] == []
    assert re.search(r"\d+ prompt tokens", report)
    assert re.search(r"text\s+\d", report) and re.search(r"cached\s+\d", report)
    assert re.search(r"request\s+req_\w+", report)
    assert visit.problems == []


async def test_a_dropped_picture_is_encoded_for_the_first_question_only(visit: Visit) -> None:
    await visit.open()
    await visit.drop("noise.png", picture(1))
    assert "noise.png" in await visit.page.inner_text("#tray")
    first = await visit.ask("What do you see?")
    assert "miss" in await first.locator(".items li").inner_text()
    second = await visit.ask("Which colour is it?")
    item = await second.locator(".items li").inner_text()
    assert "hit" in item and "noise.png" in item
    assert re.search(r"image\s+[1-9]", await second.locator(".report").inner_text())


async def test_every_example_is_answered(visit: Visit) -> None:
    await visit.open()
    await visit.page.locator("#max-tokens").evaluate("(box) => box.value = 12")
    for number in (1, 2, 3):
        await visit.page.click(f"#examples li:nth-child({number}) button")
        await visit.page.wait_for_selector(FINISHED)
        assert await visit.page.locator(".report").is_visible()
        await visit.page.click("#reset")
    assert visit.problems == []


async def test_stop_keeps_what_was_said_and_the_next_question_works(visit: Visit) -> None:
    async def never_ending(route: Any) -> None:
        body = json.loads(route.request.post_data)
        await route.continue_(post_data=json.dumps({**body, "ignore_eos": True}))

    await visit.open()
    await visit.page.route("**/v1/chat/completions", never_ending, times=1)
    await visit.page.locator("#max-tokens").evaluate("(box) => box.value = 4000")
    await visit.page.fill("#question", "Count to five.")
    await visit.page.press("#question", "Enter")
    await playwright_api.expect(visit.page.locator(".answer")).to_have_text(re.compile(r"\w"))
    await visit.page.click("#stop")
    await visit.page.wait_for_selector(FINISHED)
    assert re.search(r"Stopped\. req_\w+", await visit.page.inner_text(".footer"))
    assert await visit.page.is_visible("#send") and not await visit.page.is_visible("#stop")
    turn = await visit.ask("Hello!")
    assert await turn.locator(".report").is_visible()


async def test_a_corrupt_picture_is_explained_and_can_be_taken_back(visit: Visit) -> None:
    await visit.open()
    whole = picture(2)
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": whole[: len(whole) // 2]}
    await visit.page.set_input_files("#files", [broken])
    turn = await visit.ask("What do you see?")
    error = await turn.locator(".error").inner_text()
    assert "invalid_media" in error
    assert "messages[0].content[0]" in error
    assert "broken.png" in error
    assert re.search(r"request\s+req_\w+", error)
    await turn.get_by_role("button", name="Edit and ask again").click()
    assert await visit.page.input_value("#question") == "What do you see?"
    await visit.page.get_by_role("button", name="Remove broken.png").click()
    turn = await visit.ask("Hello!")
    assert await turn.locator(".report").is_visible()


async def test_the_copied_command_asks_the_same(visit: Visit) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    await visit.open()
    await visit.drop("it's noise.png", picture(3))
    turn = await visit.ask('What\'s in it? $HOME `id` \\ "quoted"')
    await turn.get_by_role("button", name="Copy as curl").click()
    await visit.page.wait_for_selector("text=Copied")
    command = await visit.page.evaluate("navigator.clipboard.readText()")
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    events = [line for line in answer.stdout.splitlines() if line.startswith("data:")]
    assert events[-1] == "data: [DONE]"
    items = json.loads(events[-2].removeprefix("data:"))["mimo"]["items"]
    assert [item["cache"] for item in items] == ["hit"]


async def test_everything_can_be_done_from_the_keyboard(visit: Visit) -> None:
    await visit.open()
    keyboard = visit.page.keyboard
    await _tab_to(visit.page, "#options-toggle")
    await keyboard.press("Enter")
    await _tab_to(visit.page, "#max-tokens")
    await keyboard.press("Control+A")
    await keyboard.type("12")
    await _tab_to(visit.page, "#question", backwards=True)
    await keyboard.type("Hello!")
    await keyboard.press("Shift+Enter")
    await keyboard.type("Who are you?")
    assert await visit.page.input_value("#question") == "Hello!\nWho are you?"
    await keyboard.press("Enter")
    await visit.page.wait_for_selector(FINISHED)
    await _tab_to(visit.page, ".actions button:last-child", backwards=True)
    await _tab_to(visit.page, ".report summary", backwards=True)
    await keyboard.press("Enter")
    assert not await visit.page.locator(".report .chart").first.is_visible()
    await _tab_to(visit.page, "#reset", backwards=True)
    await keyboard.press("Enter")
    assert await visit.page.locator(".turn").count() == 0
    assert await visit.page.is_visible("#welcome")


async def test_markup_stays_text(visit: Visit) -> None:
    await visit.open()
    turn = await visit.ask("<img src=x onerror=alert(1)><b>bold</b>")
    assert await turn.locator("b:text('bold')").count() == 0
    assert "<b>bold</b>" in await turn.locator(".question").inner_text()
    assert visit.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_is_legible_named_and_fits_a_small_phone(visit: Visit, scheme: str) -> None:
    await visit.page.emulate_media(color_scheme=scheme)
    await visit.page.set_viewport_size({"width": 320, "height": 640})
    await visit.open()
    assert await visit.page.evaluate(FAINT_TEXT) == []
    await visit.page.click("#options-toggle")
    await visit.page.set_input_files(
        "#files",
        [
            {"name": "noise.png", "mimeType": "image/png", "buffer": picture(4)},
            {"name": "a" * 80 + ".png", "mimeType": "image/png", "buffer": b"nothing of the sort"},
        ],
    )
    turn = await visit.ask("What do you see?")
    await turn.locator(".error").wait_for()
    await visit.ask("Hello!")
    assert await visit.page.evaluate(FAINT_TEXT) == []
    assert await visit.page.evaluate(NAMELESS_CONTROLS) == []
    assert await visit.page.evaluate("document.documentElement.scrollWidth") == 320


async def _tab_to(page: Any, selector: str, *, backwards: bool = False) -> None:
    """Move the focus to an element by Tab alone; whatever has it on the way must show it."""
    for _ in range(40):
        await page.keyboard.press("Shift+Tab" if backwards else "Tab")
        has_arrived, is_shown = await page.evaluate(
            """(selector) => {
              const style = (element) => getComputedStyle(element);
              const focused = document.activeElement;
              const ring = style(focused).outlineStyle !== "none";
              const composer = style(document.querySelector("#composer"));
              const glow = focused.id === "question" && composer.boxShadow !== "none";
              return [focused.matches(selector), ring || glow || focused === document.body];
            }""",
            selector,
        )
        assert is_shown
        if has_arrived:
            return
    raise AssertionError(f"Tab never reaches {selector}")


# Text whose contrast to what lies behind it is below 4.5:1. Colours are read back from a canvas,
# which knows every notation.
FAINT_TEXT = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return { rgb: [r, g, b], alpha: a / 255 };
  };
  const over = (top, below) => top.rgb.map((c, i) => c * top.alpha + below[i] * (1 - top.alpha));
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own.alpha === 1 ? own.rgb : over(own, behind(element.parentElement));
  };
  const light = (rgb) => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((channel) => linear(channel / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim();
    const element = texts.currentNode.parentElement;
    if (!text || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest(".unseen, script, noscript")) continue;
    const ground = behind(element);
    const ink = over(rgba(getComputedStyle(element).color), ground);
    const [low, high] = [light(ink), light(ground)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) faint.push(`${text} ${ratio.toFixed(2)}`);
  }
  return faint;
}"""

NAMELESS_CONTROLS = """() =>
  [...document.querySelectorAll("button, input, textarea, select, audio, video, img, summary, a")]
    .filter((element) => element.checkVisibility())
    .filter((element) => !(
      element.getAttribute("aria-label") || element.getAttribute("alt") ||
      element.labels?.[0]?.textContent.trim() || element.textContent.trim()
    ))
    .map((element) => element.outerHTML)
"""
