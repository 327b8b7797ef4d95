from tests.helpers.browser import browser, open_page  # noqa: F401
