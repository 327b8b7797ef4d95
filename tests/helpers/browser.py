"""Fixtures that open pages in a real browser; a conftest that imports them has them."""

import shutil

import pytest
from playwright.sync_api import sync_playwright

from tests.helpers.shown_page import PageWatch


@pytest.fixture(scope="module")  # several at one time would share an event loop
def browser():
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--disable-dev-shm-usage", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a file in a browser of its own and waits until it is drawn; returns the page and what it said and asked for."""
    pages = []

    def open_page(path, width=1200, dark=False):
        page = browser.new_page(
            viewport={"width": width, "height": 900}, is_mobile=width < 600, color_scheme="dark" if dark else "light"
        )
        pages.append(page)
        watch = PageWatch(page, path.resolve().as_uri())
        page.goto(watch.address)
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return page, watch

    yield open_page
    for page in pages:
        page.close()
