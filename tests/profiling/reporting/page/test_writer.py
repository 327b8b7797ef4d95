from html.parser import HTMLParser

import pytest

from lightning_freescale.profiling.reporting.document import check
from lightning_freescale.profiling.reporting.page import write_page
from tests.helpers.documents import bare, document, hostile


def test_the_page_is_written_and_replaced(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_page(path, [document()]) == path
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_folder_is_made(tmp_path):
    assert write_page(tmp_path / "a" / "b" / "report.html", [document()]).is_file()


@pytest.mark.parametrize("made", [document(), document(8, 30), document(1, 1), document(divided=False), bare(), hostile()])
def test_the_reports_shown_here_are_reports(made):
    check(made)


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([], "documents is empty; pass at least one"),
        (
            [document(), {}],
            r"documents\[1\] has format None and version None, not 'lightning_freescale.bubble_report' and 1; pass",
        ),
        ([{**document(), "version": 2}], r"documents\[0\] has format 'lightning_freescale.bubble_report' and version 2"),
        ([{**document(), "format": "x"}], r"documents\[0\] has format 'x'"),
        (
            [document(), document(summary={"bubble": float("nan")})],
            r"documents\[1\] cannot be shown: .*not JSON compliant; replace",
        ),
    ],
)
def test_what_is_no_report_is_refused_and_the_old_page_stays(tmp_path, documents, says):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(ValueError, match=says):
        write_page(tmp_path / "report.html", documents)
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_page_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match=r"report\.html"):
        write_page(tmp_path / "report.html", [document()])
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.comments = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_comment(self, data):
        self.comments.append(data)


@pytest.mark.parametrize("documents", [[document()], [hostile(), hostile()]], ids=["plain", "strange strings"])
def test_the_file_loads_nothing_and_has_the_scripts_it_is_meant_to_have(tmp_path, documents):
    tags = _Tags()
    tags.feed(write_page(tmp_path / "report.html", documents).read_text(encoding="utf-8"))
    assert [attrs for tag, attrs in tags.found if tag == "script"] == [{"type": "application/json", "id": "content"}, {}]
    assert tags.comments == []
    assert not [tag for tag, attrs in tags.found if {"src", "href", "srcset", "data", "action"} & set(attrs)]
    policy = next(attrs["content"] for tag, attrs in tags.found if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
