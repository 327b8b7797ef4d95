"""Look at a page that is open."""

import gzip
import io
import json
import re
from base64 import b64decode

from PIL import Image

from lightning_freescale.profiling.analysis.breakdown import PART_NAMES
from tests.helpers.documents import document

DRAWN = "body:not([aria-busy])"


class PageWatch:
    """Collects what a page says or throws, and the addresses it asks for besides its own, refused ones among them."""

    def __init__(self, page, address):
        self.address, self.console, self.requests = address, [], []
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.console.append(f"thrown: {error}"))
        # a blob is memory of the page itself
        page.on("request", lambda r: r.url != address and not r.url.startswith("blob:") and self.requests.append(r.url))


def packed(path):
    """What a page's file holds: the reports, and the breakdown of each as bytes."""
    elements = re.findall(r'application/gzip" (?:id="content"|class="series")>(.*?)<', path.read_text(encoding="utf-8"))
    content, *planes = (gzip.decompress(b64decode(element)) for element in elements)
    return json.loads(content)["reports"], planes


def rows(page, section):
    """Cells of the body of a section's table."""
    cells = "Array.from(tr.cells, c => c.innerText.replace(/\\s+/g, ' ').trim())"
    table = page.evaluate(f"Array.from(document.querySelectorAll('#{section} tbody tr'), tr => {cells})")
    return [[plain(cell) for cell in line] for line in table]


def plain(text):
    """With blanks, dashes, crosses and quotes that every keyboard has."""
    return text.translate(str.maketrans("\u00a0\u2013\u2212\u00d7\u2019", " --x'"))


def words(page, selector):
    return plain(" ".join(page.text_content(selector).split()))


def every(page, selector, expression):
    """A JavaScript expression of each element ``e``."""
    return page.evaluate(f"Array.from(document.querySelectorAll({selector!r}), e => {expression})")


def colour(page, name):
    value = page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
    return tuple(int(value[i : i + 2], 16) for i in (1, 3, 5))


def inside(page, picture, panel="xy"):
    """Left, top, width and height of where a picture's values are, in the window; scrolls there."""
    page.evaluate(f"document.getElementById({picture!r}).scrollIntoView({{block: 'center'}})")
    box = f"document.querySelector('#{picture} .plot-container .{panel} .bg, #{picture} .draglayer .{panel} .nsewdrag')"
    return page.evaluate(f"(() => {{ const r = {box}.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; }})()")


def pixels(page, picture, places, panel="xy"):
    """Colours at (x, y), shares of the picture's width and height from the left and the top."""
    left, top, width, height = inside(page, picture, panel)
    seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    return [seen.getpixel((int(left + x * width), int(top + y * height))) for x, y in places]


def hover(page, picture, x, y, panel="xy"):
    """What is told at x, y, shares as in :func:`pixels`; lines apart by a bar."""
    left, top, width, height = inside(page, picture, panel)
    page.mouse.move(2, 2)
    page.mouse.move(left + x * width, top + y * height)
    page.wait_for_timeout(150)
    return said(page, picture)


def said(page, picture):
    """What a picture tells of the place that is pointed at; lines apart by a bar."""
    lines = (
        f"Array.from(document.querySelectorAll('#{picture} .hoverlayer text'), t => {{"
        "const lines = Array.from(t.querySelectorAll(':scope > .line'), l => l.textContent);"
        "return lines.length ? lines.join('|') : t.textContent; }).filter(Boolean).join('|')"
    )
    return plain(page.evaluate(lines))


def cells(*steps):
    """A report of one part of compute and one of waiting; ``steps`` are lists of (forward, straggler wait) per rank in µs."""
    made = document(len(steps[0]), len(steps))
    zero = dict.fromkeys(PART_NAMES, 0)
    made["series"]["breakdown_s"] = [
        [[({**zero, "wall": f + w, "forward": f, "straggler_wait": w})[name] / 1e6 for name in PART_NAMES] for f, w in step]
        for step in steps
    ]
    return made


def intervals(*ranks, step=7):
    """A report of one step; an interval is kind, name, start and end, these in µs."""
    made = [[[kind, name, start / 1e6, end / 1e6] for kind, name, start, end in rank] for rank in ranks]
    return document(len(ranks), 2, median_step={"step": step, "ranks": made})
