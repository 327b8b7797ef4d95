"""Draw the README's picture from a page of bubble reports: the runs compared, and the median step of the first and the last.

``python scripts/picture.py profile/report.html docs/images/bubbles.png``, after ``end_to_end.py --profile profile``. Needs
``playwright`` with its Chromium, or Chromium of the system, and ``Pillow``.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, sync_playwright

WIDTH, MARGIN = 900, 16
STYLE = """
section { border: 0; padding: 0; margin: 0 0 8px }
h1 { font-size: 16px; margin: 8px 0 0 }
#ablation h2, #ablation > p, #waterfall h2, #waterfall > p { display: none }
"""
"""A picture has its text beside it."""
DRAWN = "body:not([aria-busy])"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, device_scale_factor=2, color_scheme="light")
        page.goto(options.page.resolve().as_uri())
        page.add_style_tag(content=STYLE)
        page.wait_for_selector(DRAWN)
        parts = [_shot(page.locator("#ablation"))]
        chosen = page.locator("#selector select")
        for run in (0, chosen.locator("option").count() - 1):
            chosen.select_option(index=run)
            page.wait_for_selector(DRAWN)
            parts += [_shot(page.locator("#label")), _shot(page.locator("#waterfall"))]
        browser.close()
    joined = Image.new("RGB", (2 * WIDTH, sum(part.height for part in parts) + 2 * MARGIN), "white")
    top = MARGIN
    for part in parts:
        joined.paste(part, ((joined.width - part.width) // 2, top))
        top += part.height
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    joined.quantize(64).save(options.picture, optimize=True)


def _shot(place: Locator) -> Image.Image:
    return Image.open(io.BytesIO(place.screenshot()))


if __name__ == "__main__":
    main()
