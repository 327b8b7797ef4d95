"""``freescale explain`` finds the module of a message that the package raises, and the section about it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_freescale import BalanceOptions, FreeScaleStrategy
from lightning_freescale.balance import assign
from lightning_freescale.checkpoint.conversion import read_checkpoint
from lightning_freescale.command_line.explain import PACKAGE, SECTIONS, find_module, section
from lightning_freescale.command_line.main import main
from lightning_freescale.data import read_interactions


def test_sections_and_modules_exist() -> None:
    headings = re.findall(r"^## (.+)$", Path("docs/limits.md").read_text(), re.MULTILINE)
    assert set(SECTIONS.values()) <= set(headings)
    modules = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")]
    used = {next(prefix for prefix in SECTIONS if module.startswith(prefix)) for module in modules}
    assert used == set(SECTIONS), "a prefix that no module has, or that another one hides"
    assert all(section(module) for module in modules)


@pytest.mark.parametrize(
    ("raises", "heading"),
    [
        (lambda: FreeScaleStrategy(checkpoint="twice"), "Trainer and strategy"),
        (lambda: read_checkpoint(Path("missing.ckpt")), "Checkpoints"),
        (lambda: assign([1.0, 2.0, 3.0], 2, assignment_mode="none"), "Data module"),
        (lambda: BalanceOptions(padding="sideways"), "Data module"),
        (lambda: read_interactions("missing.csv"), "Interactions and Parquet files"),
    ],
)
def test_a_raised_message_leads_to_its_section(raises: Callable[[], object], heading: str) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        raises()
    for message in (str(error.value), str(error.value)[:60]):
        module = find_module(message)
        assert module is not None
        assert section(module).startswith(heading)


def test_the_command_prints_the_section(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "ValueError: FreeScaleStrategy(checkpoint='twice'): pass 'single', 'sharded' or 'async'"])
    assert "Trainer and strategy" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "a message of another package"])
    assert stopped.value.code == 2
