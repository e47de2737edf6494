"""A headless Chromium, driven through its own chromedriver. Tests that need it skip with the reason where a part is missing."""

import contextlib
import json
import os
import shutil
import time
from urllib.parse import urlsplit

import pytest


@contextlib.contextmanager
def browsing(download_folder):
    """The driver of a browser that logs every request and every message of its console."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (requirements-dev.txt)")
    chromium, chromedriver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        missing = "chromium" if chromium is None else "chromedriver"
        pytest.skip(f"no {missing} here (Debian: chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (
        "headless=new",
        "disable-dev-shm-usage",
        "disable-gpu",
        "disable-background-networking",
        "no-first-run",
    ):
        options.add_argument(f"--{option}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with one
    options.add_experimental_option("prefs", {"download.default_directory": str(download_folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The driver's path is given, so that selenium looks for none on the network.
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        yield driver
    finally:
        driver.quit()


def console_errors(driver):
    """Since they were last asked for; what the page's policy refused and failed requests are among them."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requested_hosts(driver):
    """Hosts of all requests since they were last asked for; of data: and blob: the scheme."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    return {urlsplit(url).hostname or urlsplit(url).scheme for url in urls}


class Page:
    """What the tests do on a page."""

    def __init__(self, driver, url):
        self.driver, self.url = driver, url

    def open(self, width=1400, height=900, scheme="light", is_phone=False):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(self.url)
        return self

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait_until(self, is_so):
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline, console_errors(self.driver)
            time.sleep(0.02)
