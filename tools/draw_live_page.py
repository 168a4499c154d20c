"""Takes the pictures of the live page for the README and docs/page.md, in Debian's ``chromium``.

    python tools/draw_live_page.py [--folder FOLDER]

Starts `inflight serve` with the demo model and a small KV cache, sends it requests that come and
go, and pictures each part of the page while they run.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from inflight_client import InflightClient
from inflight_client.errors import InflightError

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
SETTINGS = {
    "max_tokens_in_paged_kv_cache": 6144,
    "batch_scheduler_policy": "max_utilization",
    "max_batch_size": 24,
    "max_num_tokens": 160,
}
NUM_CLIENTS = 30
WARM_SECONDS = 60.0
MAX_BYTES = 150_000
PARTS = {
    "now": ("light", (1180, 820)),
    "lanes": ("light", (1180, 640)),
    "blocks": ("dark", (1180, 640)),
    "whatif": ("light", (1180, 760)),
    "playground": ("dark", (1180, 700)),
}


def free_ports(number: int) -> list[int]:
    """Different ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def send_requests(url: str, number: int, is_over: threading.Event) -> None:
    """One client: a request after the other, with breaks."""
    rng = random.Random(number)
    with InflightClient(url) as client:
        count = 0
        while not is_over.wait(rng.expovariate(1.0)):
            count += 1
            start = rng.randrange(50)
            prompt = " ".join(str(start + k) for k in range(rng.choice((4, 20, 60, 120))))
            try:
                client.generate(
                    prompt,
                    rng.randrange(40, 600),
                    request_id=f"client-{number}-{count}",
                    temperature=rng.choice((0.0, 0.7)),
                    top_p=0.9,
                )
            except InflightError:
                return


def main() -> None:
    """Start, wait, take the pictures, stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=IMAGES)
    folder = parser.parse_args().folder
    http, grpc, metrics, openai = free_ports(4)
    command = [
        *(str(Path(sys.executable).parent / "inflight"), "serve", f"--http-port={http}"),
        *(f"--grpc-port={grpc}", f"--metrics-port={metrics}", f"--openai-port={openai}"),
        *(f"--set={key}={value}" for key, value in SETTINGS.items()),
    ]
    with tempfile.TemporaryFile("w+") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        is_over, url = threading.Event(), f"http://127.0.0.1:{openai}"
        try:
            wait_for(url, server)
            clients = [
                threading.Thread(
                    target=send_requests, args=(f"127.0.0.1:{grpc}", number, is_over), daemon=True
                )
                for number in range(NUM_CLIENTS)
            ]
            for client in clients:
                client.start()
            take(url, folder)
        finally:
            is_over.set()
            server.terminate()
            server.wait()


def wait_for(url: str, server: subprocess.Popen[str]) -> None:
    """Return when the front at ``url`` takes requests."""
    while server.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise SystemExit("the server has ended")


def take(url: str, folder: Path) -> None:
    """One picture of each part."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for part, (scheme, (width, height)) in PARTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            page.goto(f"{url}/#{part}")
            page.get_by_text("live", exact=True).wait_for()
            if part == "playground":
                page.get_by_label("Maximum tokens").fill("60")
                page.get_by_label("Your message").fill("1 2 3 4 5")
                page.get_by_role("button", name="Send").click()
                page.get_by_role("button", name="Its lane").wait_for()
                page.get_by_role("button", name="Show as curl").click()
            elif part == "whatif":
                page.get_by_label("Policy").select_option("guaranteed_no_evict")
                page.get_by_role("button", name="Predict").click()
                page.locator("#whatif-result canvas").last.wait_for()
            else:
                time.sleep(WARM_SECONDS if part == "now" else 5.0)
            if part == "lanes":
                page.locator("#lane-canvas").focus()
                for _ in range(6):
                    page.keyboard.press("ArrowDown")
                time.sleep(0.5)
            target = folder / f"page-{part}.png"
            page.screenshot(path=target)
            size = target.stat().st_size
            print(target, size)
            assert size <= MAX_BYTES, f"{target} has {size} bytes, more than {MAX_BYTES}"
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
