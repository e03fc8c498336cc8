"""One headless Chromium for all pages. It needs the Debian packages chromium and chromium-driver."""

import os
import shutil
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def chrome() -> Iterator[object]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    binary, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    assert binary and driver, "these tests open pages in Chromium: install chromium and chromium-driver"
    os.environ["SE_OFFLINE"] = "true"  # the driver is here: nothing is to be looked for on the network
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    window.set_page_load_timeout(60)
    yield window
    window.quit()


@pytest.fixture
def page(chrome):
    """A function that opens an HTML file at a width in a colour scheme, and returns the driver."""

    def open_(path, *, width: int = 1200, dark: bool = False, media: str = "screen"):
        chrome.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        scheme = "dark" if dark else "light"
        chrome.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        chrome.get_log("browser")  # what an earlier page said
        chrome.get(f"file://{path}")
        return chrome

    return open_
