"""Look at a page that is open."""

from tests.helpers.documents import PART_NAMES, document

LEFT = 56  # where the pictures begin, right of the labels


def rows(page, section):
    """Cells of the body of a section's table."""
    cells = "Array.from(tr.cells, c => c.innerText.replace(/\\s+/g, ' ').trim())"
    table = page.run(f"Array.from(document.querySelectorAll('#{section} tbody tr'), tr => {cells})")
    return [[plain(cell) for cell in line] for line in table]


def plain(text):
    """With blanks, dashes, crosses and quotes that every keyboard has."""
    return text.translate(str.maketrans("\u00a0\u2013\u2212\u00d7\u2019", " --x'"))


def words(page, selector):
    return plain(page.text(selector))


def every(page, selector, expression):
    """A JavaScript expression of each element ``e``."""
    return page.run(f"Array.from(document.querySelectorAll({selector!r}), e => {expression})")


def colour(page, name):
    value = page.run(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
    return tuple(int(value[i : i + 2], 16) for i in (1, 3, 5))


def pixel(page, canvas, x, y):
    """Colour of one, read from a copy: a canvas that is read time and again complains."""
    return tuple(
        page.run(
            "(() => { const copy = document.createElement('canvas').getContext('2d');"
            f"copy.drawImage(document.getElementById('{canvas}'), -{x}, -{y});"
            "return Array.from(copy.getImageData(0, 0, 1, 1).data); })()"
        )
    )[:3]


def hover(page, canvas, x, y):
    box = page.run(
        f"(() => {{ const c = document.getElementById('{canvas}'); c.scrollIntoView({{block: 'center'}});"
        "const r = c.getBoundingClientRect(); return [r.left, r.top]; })()"
    )
    page.move(box[0] + x, box[1] + y)
    return words(page, "#tip")


def cells(*steps):
    """A report of one part of compute and one of waiting; ``steps`` are lists of (forward, straggler wait) per rank in µs."""
    made = document(len(steps[0]), len(steps))
    zero = dict.fromkeys(PART_NAMES, 0)
    made["series"]["microseconds"] = [
        [[({**zero, "wall": f + w, "forward": f, "straggler_wait": w})[name] for name in PART_NAMES] for f, w in step]
        for step in steps
    ]
    return made


def pieces(*ranks, step=7):
    return document(len(ranks), 2, median_step={"step": step, "ranks": [list(map(list, rank)) for rank in ranks]})
