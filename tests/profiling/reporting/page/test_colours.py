import re
from importlib.resources import files

import numpy as np
import pytest

from tests.helpers.documents import PART_NAMES
from tests.helpers.shown_page import cells, colour, pixels


def _palettes():
    css = files("lightning_freescale.profiling.reporting.page").joinpath("page.css").read_text()
    light, _, dark = css.partition("prefers-color-scheme: dark")
    found = (dict(re.findall(r"--(\w+): #([0-9a-f]{6})", text)) for text in (light, dark))
    return dict(zip(("light", "dark"), found))


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
SIGHTS = {
    "all colours": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def _oklab(rgb, sight):
    value = np.array([int(rgb[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_lms = [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
    to_lab = [
        [0.21045426, 0.79361779, -0.00407205],
        [1.9779985, -2.42859221, 0.45059371],
        [0.02590404, 0.78277177, -0.80867577],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_lms) @ np.clip(np.array(sight) @ linear, 0, 1))


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("names", [[*PART_NAMES[1:-1], "paper"], ["data_s", "hardware_s", "jitter_s", "paper"]])
def test_colours_can_be_told_apart(theme, sight, names):
    palette = _palettes()[theme]
    seen = [_oklab(palette[name], SIGHTS[sight]) for name in names]
    assert min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]) > 0.1


def test_pictures_follow_the_theme(show):
    page = show(cells([(10, 90)]))
    (light,) = pixels(page, "series-picture", [(0.5, 0.95)], "xy3")
    assert light == colour(page, "forward")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(500)
    (dark,) = pixels(page, "series-picture", [(0.5, 0.95)], "xy3")
    assert dark == colour(page, "forward") != light
