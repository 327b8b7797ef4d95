import pytest

from lightning_freescale.profiling.reporting.page import write_page
from tests.helpers.browser import Browser


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture
def show(browser, tmp_path):
    """Opens pages of documents. When the test is over, none of them may have complained or asked for anything."""
    pages = []

    def show(*documents, width=1200, dark=False):
        pages.append(browser.open_page(write_page(tmp_path / "report.html", documents), width, dark))
        return pages[-1]

    yield show
    for page in pages:
        browser.close_page(page)
        assert (page.console, page.requests) == ([], [])
