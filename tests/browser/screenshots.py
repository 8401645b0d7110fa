"""Takes screenshots of every page for the documentation: light and dark, desktop and phone.

python -m tests.browser.screenshots [FOLDER]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path

from playwright.async_api import Browser, async_playwright

from omniq.models import TaskStatus
from tests.browser.chromium import PATH
from tests.browser.seed import demo_queue
from tests.browser.served import SECRET, served

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "dashboard"
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}
WARM_UP = 8
"""Snapshots of the sampler before the first screenshot, so that the charts have data."""

REMOVE_FOLDERS = """(folders) => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        let text = walker.currentNode.textContent;
        for (const folder of folders) text = text.replaceAll(folder, '');
        if (text !== walker.currentNode.textContent) walker.currentNode.textContent = text;
    }
}"""
"""Removes local paths from the page, so that a screenshot does not show them."""


async def main(folder: Path) -> None:
    """Take all screenshots."""
    async with AsyncExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        queue = await stack.enter_async_context(demo_queue(Path(temporary)))
        address, app = await stack.enter_async_context(served(queue))
        await app.state.dashboard.sampler.current()
        await _keep_busy(queue, app)
        letters = await queue.dead.list(limit=1)
        running = await queue.list_tasks(status=TaskStatus.RUNNING, limit=1)
        pages = {
            "overview": "/",
            "tasks": "/tasks?limit=15",
            "task-dead": f"/tasks/{letters[0].task_id}",
            "task-running": f"/tasks/{running[0].id}",
            "dead": "/dead?limit=10",
            "functions": "/functions?range=15m",
            "queue": "/queues/mail?range=15m",
            "search": "/tasks?limit=15&q=queue:mail",
            "limits": "/limits",
            "workers": "/workers",
            "schedules": "/schedules",
            "queues": "/queues",
            "storage": "/storage",
            "api": "/api",
        }
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(executable_path=PATH)
        for scheme in ("light", "dark"):
            for device in SIZES:
                await _screenshot(browser, address, folder, pages, scheme, device)
        await browser.close()


async def _keep_busy(queue, app) -> None:
    shop = import_module("shop")
    for round_number in range(WARM_UP * 4):
        await queue.enqueue_many(
            shop.send_receipt,
            [
                (round_number * 40 + number, "a@example.org")
                for number in range(4 + round_number % 9)
            ],
        )
        await asyncio.sleep(0.5)


async def _screenshot(browser: Browser, address, folder, pages, scheme, device) -> None:
    width, height = SIZES[device]
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
    )
    page = await context.new_page()
    await page.goto(f"{address}/login")
    await page.fill("input[name=secret]", SECRET)
    await page.click("main button")
    for name, path in pages.items():
        await page.goto(address + path)
        await page.wait_for_selector(".live[data-state=on]")
        await page.evaluate(REMOVE_FOLDERS, [f"{ROOT}/", tempfile.gettempdir()])
        await page.screenshot(path=folder / f"{name}-{scheme}-{device}.png", full_page=True)
    await context.close()


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    chosen.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(chosen))
