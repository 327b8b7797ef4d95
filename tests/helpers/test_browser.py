import pytest

from tests.helpers.browser import Browser


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.mark.parametrize(
    ("body", "said", "asked"),
    [
        ("<script>undefined_name()</script>", "undefined_name is not defined", []),
        ("<script>setTimeout(() => { throw new Error('late') })</script>", "late", []),
        ("<script>Promise.reject(new Error('rejected'))</script>", "rejected", []),
        ("<script>console.error('said', 'so')</script>", "error: said so", []),
        ("<script>console.log('hello')</script>", "log: hello", []),
        ("<script>1 +</script>", "SyntaxError", []),
        ("<img src='http://127.0.0.1:9/picture.png'>", "ERR_", ["http://127.0.0.1:9/picture.png"]),
        (
            "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\"><img src='http://127.0.0.1:9/x.png'>",
            "Content Security Policy",
            ["http://127.0.0.1:9/x.png"],
        ),
    ],
)
def test_a_broken_page_is_noticed(browser, tmp_path, body, said, asked):
    (tmp_path / "broken.html").write_text(f"<!doctype html><title>x</title>{body}")
    page = browser.open_page(tmp_path / "broken.html")
    page.run("new Promise(done => setTimeout(done, 200))")
    browser.close_page(page)
    assert any(said in line for line in page.console), page.console
    assert page.requests == asked
