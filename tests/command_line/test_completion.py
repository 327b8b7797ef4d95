"""What a shell completes once it has read the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_freescale.command_line.main import COMMANDS, main

SHELLS = ("bash", "zsh", "tcsh")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "freescale.bash"
    command = [sys.executable, "-m", "lightning_freescale", "completion", "bash"]
    path.write_text(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    return path


def _completed(script: Path, words: list[str]) -> set[str]:
    """Of the last of ``words``, in a folder with one file ``shop.yaml``."""
    line, last, before = " ".join(f"'{word}'" for word in words), words[-1], words[-2]
    code = (
        f"source {script}; touch shop.yaml; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_TYPE=9\n"
        f"$(complete -p freescale | sed 's/.*-F \\([^ ]*\\) .*/\\1/') freescale '{last}' '{before}'\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], cwd=script.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
def test_commands_options_choices_and_files_are_completed(script: Path) -> None:
    for line, completed in {
        "con": {"consolidate"},
        "fit --trainer.max_e": {"--trainer.max_epochs"},
        "fit --config sh": {"shop.yaml"},
        "balance simulate --assignment-mode s": {"slack"},
        "simulate --coll": {"--collision-rate"},
        "balance --ra": {"--ranks"},
        "profile co": {"compare"},
        "profile page --la": {"--label"},
        "profile run --every": {"--every-n-steps"},
        "consolidate sh": {"shop.yaml"},
        "completion z": {"zsh"},
        "fit --no_such": set(),
    }.items():
        assert _completed(script, ["freescale", *line.split(" ")]) == completed, line
    assert _completed(script, ["freescale", ""]) >= set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS[1:])
def test_other_shells_get_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


def test_another_shell_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "fish"])
    told = capsys.readouterr().err
    assert all(shell in told for shell in SHELLS)


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "bash"])
    assert "shtab" in (error := capsys.readouterr().err) and "pip install 'lightning-freescale[cli]'" in error
