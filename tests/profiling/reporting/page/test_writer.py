import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from lightning_freescale.profiling.reporting.page import write_page
from tests.helpers.documents import document, hostile
from tests.helpers.shown_page import every, packed, rows


def test_the_page_holds_the_documents_and_the_breakdown_to_the_microsecond(tmp_path):
    made = [document(3, 5), document(2, 7)]
    made[0]["series"]["breakdown_s"][1][2][0] = 2_500.000001  # more than 4 bytes of microseconds
    made[0]["series"]["breakdown_s"][2][1][9] = -0.000003
    path = tmp_path / "a" / "b" / "report.html"
    assert write_page(path, [document()]) == write_page(path, made) == path
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    shown, series = packed(path)
    for before, after, planes in zip(made, shown, series):
        steps, ranks, columns = np.shape(before["series"]["breakdown_s"])
        whole = np.frombuffer(planes, np.uint8).reshape(8, -1).T.copy().view("<i8").reshape(columns, ranks, steps)
        assert (whole.T / 1e6).tolist() == before["series"]["breakdown_s"]
        assert after == {**before, "series": {name: before["series"][name] for name in ("columns", "step")}}


def _not_finite():
    made = document()
    made["series"]["breakdown_s"][1][1][3] = float("inf")
    return made


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([], "documents is empty"),
        ([document(), {}], r"documents\[1\] has format None and version None"),
        ([{**document(), "version": 2}], r"documents\[0\] .*version 2"),
        ([{**document(), "format": "x"}], r"documents\[0\] has format 'x'"),
        ([document(), document(summary={"bubble": float("nan")})], r"documents\[1\]"),
        ([_not_finite()], r"documents\[0\].*breakdown_s"),
    ],
)
def test_what_is_no_report_is_refused_and_the_old_page_stays(tmp_path, documents, says):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(ValueError, match=says):
        write_page(tmp_path / "report.html", documents)
    assert (tmp_path / "report.html").read_text() == "old"


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
    text = write_page(tmp_path / "report.html", documents).read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(text)
    scripts = [attrs for tag, attrs in tags.found if tag == "script"]
    elements = [{"id": "content"}, *[{"class": "series"}] * len(documents), {"id": "library"}]
    assert text.startswith("<!doctype html>") and tags.comments == []
    assert scripts == [*({"type": "application/gzip", **attrs} for attrs in elements), {}]
    assert not [tag for tag, attrs in tags.found if {"src", "href", "srcset", "data", "action"} & set(attrs)]
    policy = next(attrs["content"] for tag, attrs in tags.found if attrs.get("http-equiv") == "Content-Security-Policy")
    scripts = "'sha256-[A-Za-z0-9+/]{43}=' 'sha256-[A-Za-z0-9+/]{43}='"
    assert re.fullmatch(f"default-src 'none'; style-src 'unsafe-inline'; script-src {scripts}; img-src data: blob:", policy)
    assert "MIT License" in text and "Plotly" in text and "permission notice shall be included" in text


def test_without_the_library_the_page_has_no_other_script_and_a_warning_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if it were not installed
    with pytest.warns(UserWarning, match=r"plotly.*'lightning-freescale\[report\]'"):
        text = write_page(tmp_path / "report.html", [document()]).read_text(encoding="utf-8")
    assert text.count("'sha256-") == 1 and 'id="library"' not in text and "MIT" not in text


@pytest.mark.slow
def test_without_the_library_a_notice_stands_in_place_of_each_picture(show, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.warns(UserWarning, match="plotly"):
        page = show(document(8, 30), document(8, 30, pace=0.4))
    notices = every(page, "#heatmap-picture, #waterfall-picture, #series-picture", "e.textContent")
    assert len(notices) == 3 and all("lightning-freescale[report]" in notice for notice in notices)
    assert len(rows(page, "ranks")) == 8 and len(rows(page, "ablation")) == 2
