"""What the repository says about the package agrees with the package."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_freescale
from lightning_freescale._torchrec import FITTING

ROOT = Path(__file__).parents[1]
GITHUB = sorted((ROOT / ".github").rglob("*.yml"))


def _yaml(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def requirements_in_pyproject(key: str) -> list[Requirement]:
    """The list of that name; the file is read as text, for Python 3.10 has no reader of TOML."""
    text = (ROOT / "pyproject.toml").read_text().split(f"\n{key} = [")[1]
    one_line = text.split("\n")[0]
    listed = one_line if one_line.endswith("]") else text.split("\n]")[0] + "]"
    return [Requirement(one) for one in ast.literal_eval("[" + listed)]


def test_workflows_ask_for_the_least() -> None:
    assert _yaml(ROOT / "CITATION.cff")["version"] == lightning_freescale.__version__
    for path in GITHUB:
        workflow = _yaml(path)
        assert workflow, path
        if path.parent.name != "workflows":
            continue
        assert workflow["permissions"] in ({}, {"contents": "read"}), path
        for job in workflow["jobs"].values():
            writes = {name for name, access in job.get("permissions", {}).items() if access == "write"}
            assert writes <= {"attestations", "id-token"}, path
            assert all("@" in step["uses"] for step in job["steps"] if "uses" in step), path


def test_every_python_that_is_promised_is_tested_with_every_torch() -> None:
    test = _yaml(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]
    rows = test["strategy"]["matrix"]["include"]
    pythons, extras = ["3.10", "3.11", "3.12", "3.13"], [f"torch{minor.replace('.', '')}" for minor in FITTING]
    newest = [(row["python"], row["torch"]) for row in rows if row["dependencies"] == "newest"]
    assert sorted(newest) == [(python, extra) for python in pythons for extra in extras]
    oldest = [(row["python"], row["torch"]) for row in rows if row["dependencies"] == "oldest"]
    assert oldest == [(pythons[0], extras[0])]
    assert test["steps"][-1]["run"] == "make test PYTHON=python TORCH=${{ matrix.torch }}"
    assert 'requires-python = ">=3.10,<3.14"' in (ROOT / "pyproject.toml").read_text()


def test_the_oldest_dependencies_are_the_lower_bounds() -> None:
    lines = (ROOT / ".github" / "oldest.txt").read_text().splitlines()
    oldest = {one.name: one.specifier for one in map(Requirement, (line for line in lines if not line.startswith("#")))}
    bounds = {
        one.name: min(bound.version for bound in one.specifier if bound.operator == ">=")
        for key in ("dependencies", "cli", "report")
        for one in requirements_in_pyproject(key)
        if any(bound.operator == ">=" for bound in one.specifier)
    }
    assert set(oldest) == set(bounds)
    for name, bound in bounds.items():
        (pin,) = oldest[name]
        assert pin.operator == "==" and pin.version.startswith(bound)


def test_the_tested_versions_are_exact_and_are_what_the_project_asks_for() -> None:
    first, *lines = (ROOT / ".github" / "tested.txt").read_text().splitlines()
    assert first.startswith("# ") and "make tested" in first
    tested = {canonicalize_name(one.name): one for one in map(Requirement, lines)}
    assert all(not one.url and [bound.operator for bound in one.specifier] == ["=="] for one in tested.values())
    versions = {name: next(iter(one.specifier)).version for name, one in tested.items()}
    assert not any("+" in version for version in versions.values()), "a build that other machines have not"
    versions["fbgemm-gpu"] = versions["fbgemm-gpu-cpu"]
    for key in ("dependencies", "cli", "docs", "test", "lint"):
        for one in requirements_in_pyproject(key):
            assert one.specifier.contains(versions[canonicalize_name(one.name)]), one


def test_the_releases_that_fit_together_are_those_asked_for() -> None:
    """pip takes what is newest of each, or one set by its extra."""
    for minor, releases in FITTING.items():
        assert releases[0].startswith(f"{minor}.")
        asked = [*requirements_in_pyproject("dependencies"), *requirements_in_pyproject(f"torch{minor.replace('.', '')}")]
        for name, release in zip(("torch", "fbgemm-gpu", "torchrec"), releases):
            ranges = [one.specifier for one in asked if one.name == name]
            assert len(ranges) == 2 and all(release in one for one in ranges)
