import pytest

from lightning_freescale.profiling.reporting.page import write_page
from tests.helpers.browser import browser, open_page  # noqa: F401
from tests.helpers.shown_page import DRAWN


@pytest.fixture
def show(open_page, tmp_path):  # noqa: F811
    """Opens pages of documents. When the test is over, none of them may have complained or asked for anything."""
    watches = []

    def show(*documents, width=1200):
        page, watch = open_page(write_page(tmp_path / "report.html", documents), width)
        page.wait_for_selector(DRAWN)
        watches.append(watch)
        return page

    yield show
    for watch in watches:
        assert (watch.console, watch.requests) == ([], [])
