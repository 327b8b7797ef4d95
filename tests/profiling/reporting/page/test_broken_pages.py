"""What the other tests rely on: a page that is broken does not pass."""

import pytest

pytestmark = pytest.mark.slow  # what the page shows in detail


@pytest.mark.parametrize(
    ("body", "said", "asked"),
    [
        ("<script>undefined_name()</script>", "undefined_name is not defined", []),
        ("<script>setTimeout(() => { throw new Error('late') })</script>", "late", []),
        ("<script>Promise.reject(new Error('rejected'))</script>", "rejected", []),
        ("<script>console.error('said', 'so')</script>", "error: said so", []),
        ("<script>console.log('hello')</script>", "log: hello", []),
        ("<script>1 +</script>", "Unexpected", []),
        ("<img src='http://127.0.0.1:9/picture.png'>", "ERR_", ["http://127.0.0.1:9/picture.png"]),
        (
            "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\"><img src='http://127.0.0.1:9/x.png'>",
            "Content Security Policy",
            ["http://127.0.0.1:9/x.png"],
        ),
    ],
)
def test_a_broken_page_is_noticed(open_page, tmp_path, body, said, asked):
    (tmp_path / "broken.html").write_text(f"<!doctype html><title>x</title>{body}")
    page, watch = open_page(tmp_path / "broken.html")
    page.wait_for_timeout(200)
    assert any(said in line for line in watch.console), watch.console
    assert watch.requests == asked
