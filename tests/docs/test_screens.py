"""The site in a browser: everything fits on wide and narrow screens, in both themes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.helpers.browser import browser  # noqa: F401

pytestmark = pytest.mark.slow

WIDTHS, THEMES = (1280, 390), ("default", "slate")
CUT = """theme => {
  document.body.dataset.mdColorScheme = theme;
  const wide = document.documentElement.scrollWidth, found = wide > innerWidth ? [`the page has ${wide} px`] : [];
  const page = document.querySelector(".md-content").getBoundingClientRect();
  for (const each of document.querySelectorAll("article *")) {
    const box = each.getBoundingClientRect(), style = getComputedStyle(each);
    if (!box.width || !box.height || style.display == "inline") continue;
    const outside = Math.round(Math.max(box.right - page.right, page.left - box.left));
    const hidden = style.overflowX == "visible" ? 0 : each.scrollWidth - each.clientWidth;
    const text = `${each.tagName} ${each.className} "${each.textContent.trim().slice(0, 60)}"`;
    if (outside > 1 || hidden > 1) found.push(`${text}: ${outside} px outside, ${hidden} px hidden`);
  }
  for (const head of document.querySelectorAll("article th:first-child"))
    if (head.textContent.trim() && !head.offsetHeight) found.push(`not shown: ${head.textContent}`);
  return found;
}"""
"""Returns what is outside of the article, is shown only by scrolling sideways, or is a hidden name of a first column."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site with this interpreter; ``-o`` skips the set-up."""
    folder = tmp_path_factory.mktemp("site")
    command = ["make", "-o", "setup", "docs", f"BIN={Path(sys.executable).parent}", f"SITE={folder}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def test_the_site_has_names_and_examples(site: Path) -> None:
    strategy = (site / "api" / "index.html").read_text()
    assert 'id="lightning_freescale.FreeScaleStrategy"' in strategy and "split_backward" in strategy
    assert ":class:`" not in strategy, "roles are links"
    assert (site / "index.html").exists() and (site / "repository" / "examples" / "sasrec.py").exists()


def test_nothing_is_cut_off(site: Path, browser: Any) -> None:  # noqa: F811
    page, found = browser.new_page(), []
    pages = [path for path in sorted(site.rglob("*.html")) if "repository" not in path.parts and path.stem != "404"]
    assert len(pages) > 50
    for path in pages:
        page.goto(path.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            for theme in THEMES:
                found += [f"{path.relative_to(site)}, {width} px, {theme}: {cut}" for cut in page.evaluate(CUT, theme)]
    for mistake in ("pre > code { white-space: pre !important }", "p { width: 800px }", "thead { display: none !important }"):
        page.goto((site / "benchmarks" / "gpu.html").as_uri())
        page.add_style_tag(content=mistake)
        assert page.evaluate(CUT, THEMES[0]), f"not noticed: {mistake}"
    page.close()
    assert found == []
