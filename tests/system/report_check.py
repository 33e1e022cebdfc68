"""The report in a real browser, as ``make test-report`` runs it.

Opens the page of a made-up run and of a hostile log in headless Chromium: wide, and 400 pixels wide
in dark mode. Exit status 77 where chromium or chromedriver is missing. ``REPORT_SHOTS`` names a
directory for screenshots.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from run_log_support import failed_run, logged, restored_at, write_log
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from emergency_ckpt.tools.cli.main import main as eckpt

MISSING = 77
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror=window.broken=2>"
LINK = "<a href='https://example.org/'>a link</a>"


@contextmanager
def browser(width: int, *, dark: bool) -> Iterator[webdriver.Chrome]:
    """Yield a Chromium with a new profile and a window of ``width`` CSS pixels."""
    with tempfile.TemporaryDirectory(prefix="eckpt-report-") as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in (*FLAGS, f"--user-data-dir={profile}", "--force-device-scale-factor=1"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            size = {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def check(page: Path, name: str, width: int, *, dark: bool) -> None:
    """Open ``page`` and check what a person needs of it."""
    with browser(width, dark=dark) as driver:
        driver.get(page.as_uri())
        assert driver.find_elements(By.CSS_SELECTOR, "svg rect")
        assert driver.get_log("browser") == [], driver.get_log("browser")
        assert driver.execute_script("return window.broken") is None
        requests = "return performance.getEntriesByType('resource').length"
        assert driver.execute_script(requests) == 0
        overflow = "return document.documentElement.scrollWidth - innerWidth"
        assert driver.execute_script(overflow) <= 0, "the page scrolls sideways"
        select = "getSelection().selectAllChildren(document.body); return String(getSelection())"
        selected = driver.execute_script(select)
        for words in ("steps lost, all", "recoveries", "RPO"):
            assert words in selected, f"{words!r} cannot be selected"
        colour = "return getComputedStyle(document.body)."
        back = driver.execute_script(colour + "backgroundColor")
        assert back == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"), back
        ink = driver.execute_script(
            "return getComputedStyle(document.querySelector('svg text')).fill"
        )
        assert ink == driver.execute_script(colour + "color"), ink
        links = driver.execute_script("return [...document.links].map(a => a.href)")
        assert not any(each.startswith("http") for each in links), links
        assert driver.find_elements(By.CSS_SELECTOR, "svg a") == []
        shots = os.environ.get("REPORT_SHOTS")
        if shots:
            whole = driver.execute_script("return document.documentElement.scrollHeight")
            size = {"width": width, "height": whole, "deviceScaleFactor": 1, "mobile": width < 600}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.save_screenshot(str(Path(shots) / f"{name}.png"))
    print(f"{name}: drawn, no message in the console, no request, text selectable")


def change_of_scheme(page: Path) -> None:
    """Check that an open page follows the system from light to dark."""
    with browser(1200, dark=False) as driver:
        driver.get(page.as_uri())
        scheme = {"name": "prefers-color-scheme", "value": "dark"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        fill = "return getComputedStyle(document.querySelector('svg text')).fill"
        WebDriverWait(driver, 30).until(lambda d: d.execute_script(fill) == "rgb(230, 237, 243)")
    print("scheme: figures follow a change from light to dark")


def main() -> int:
    """Check all pages; return 77 where no browser is installed."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        print(f"{' and '.join(missing)} not found; apt-get install chromium chromium-driver")
        return MISSING
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        moved = {"step": 20, "holder": HOSTILE, "size_bytes": 1 << 20}
        hostile = [
            logged(1060, "restore.quarantined", 1, 1, step=20, holder=HOSTILE, detail=LINK),
            logged(1061, "warning", 0, 1, cause="setting", text=HOSTILE),
            logged(1056, "restore.stage", 1, 1, stage="received", **moved),
            restored_at(1057.3, 1, bytes_peer=1 << 20),
        ]
        for name, events in (("run", []), ("hostile", hostile)):
            write_log(root / name, [*failed_run(), *events])
            page = root / f"{name}.html"
            assert eckpt(["report", str(root / name), "-o", str(page)]) == 0
            check(page, f"{name}-wide", 1200, dark=False)
            check(page, f"{name}-narrow-dark", 400, dark=True)
        change_of_scheme(root / "run.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
