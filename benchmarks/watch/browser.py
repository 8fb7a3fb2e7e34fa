"""Headless browser, driven by Chromium's debugging protocol: text and pictures of a page.

``P2PDILOCO_BROWSER`` names a browser that is not in the path.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]
START_S, WAIT_S = 40.0, 40.0
LOOK_S = 0.1


def found() -> str | None:
    """Where one is."""
    return os.environ.get("P2PDILOCO_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page in it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []
        """What the console and the security policy said."""

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            told = await self._socket.receive_json(timeout=WAIT_S)
            if told.get("id") == self._number:
                assert "error" not in told, told
                return dict(told["result"])
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(str(told["params"]))

    async def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Go there."""
        is_phone = width < 600
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])
        for domain in ("Page", "Runtime", "Log"):
            await self.ask(f"{domain}.enable")
        await self.ask("Page.navigate", url=address)

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression."""
        told = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def text(self, element: str) -> str:
        """What stands in an element, by its id."""
        return str(await self.value(f"document.getElementById({element!r})?.textContent ?? ''"))

    async def until(self, expression: str, what: str) -> None:
        """Wait until it is true."""
        async with asyncio.timeout(WAIT_S):
            while not await self.value(expression):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        assert await self.value(expression), what

    async def press(self, key: str) -> None:
        """A key, as typed."""
        for kind in ("keyDown", "keyUp"):
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, text=key if kind == "keyDown" else "")

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """As PNG."""
        more: dict[str, Any] = {}
        if whole:
            size = (await self.ask("Page.getLayoutMetrics"))["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        told = await self.ask("Page.captureScreenshot", format="png", **more)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(told["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """One with one tab; it ends with the block."""
    program = found()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(  # noqa: ASYNC220
            [program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what is in the path may be a script, whose end is not the browser's
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=64 << 20) as socket:
                    yield Tab(socket)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _port(path: Path) -> int:
    async with asyncio.timeout(START_S):
        while True:
            with suppress(OSError, ValueError, IndexError):
                return int((await asyncio.to_thread(path.read_text)).splitlines()[0])
            await asyncio.sleep(LOOK_S)
