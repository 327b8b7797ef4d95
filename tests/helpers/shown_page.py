"""Look at a page that is open."""

from tests.helpers.documents import PART_NAMES, document

LEFT = 56  # where the pictures begin, right of the labels


class PageWatch:
    """Collects what a page says or throws, and the addresses it asks for besides its own, refused ones among them."""

    def __init__(self, page, address):
        self.address, self.console, self.requests = address, [], []
        page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.console.append(f"thrown: {error}"))
        page.on("request", lambda request: request.url != address and self.requests.append(request.url))


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


def pixel(page, canvas, x, y):
    """Colour of one, read from a copy: a canvas that is read time and again complains."""
    return tuple(
        page.evaluate(
            "(() => { const copy = document.createElement('canvas').getContext('2d');"
            f"copy.drawImage(document.getElementById('{canvas}'), -{x}, -{y});"
            "return Array.from(copy.getImageData(0, 0, 1, 1).data); })()"
        )
    )[:3]


def hover(page, canvas, x, y):
    box = page.evaluate(
        f"(() => {{ const c = document.getElementById('{canvas}'); c.scrollIntoView({{block: 'center'}});"
        "const r = c.getBoundingClientRect(); return [r.left, r.top]; })()"
    )
    page.mouse.move(box[0] + x, box[1] + y)
    return words(page, "#tip")


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
