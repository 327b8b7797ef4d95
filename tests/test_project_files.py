"""What the repository says about the package agrees with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_freescale
from lightning_freescale._torchrec import FITTING
from tests.helpers.requirements import requirements_in_pyproject

ROOT = Path(__file__).parents[1]
GITHUB = sorted((ROOT / ".github").rglob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _yaml(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def test_citation_is_of_this_version_and_names_the_paper() -> None:
    citation = _yaml(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["message"]
    assert citation["version"] == lightning_freescale.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "lightning_freescale contributors"}]
    (paper,) = citation["references"]
    assert paper["identifiers"] == [{"type": "other", "value": "arXiv:2604.24073"}]
    assert paper["type"] and paper["title"].startswith("FreeScale")
    assert all(set(author) == {"given-names", "family-names"} for author in paper["authors"])


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_parses(path: Path) -> None:
    assert _yaml(path)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_ask_for_the_least(path: Path) -> None:
    workflow = _yaml(path)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job in workflow["jobs"].values():
        writes = {name for name, access in job.get("permissions", {}).items() if access == "write"}
        assert writes <= {"attestations", "id-token"}
        assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)


def test_nothing_is_published_that_was_not_checked() -> None:
    jobs = _yaml(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["needs"] == "build"
    steps = [step.get("run", step.get("uses", "")) for step in jobs["build"]["steps"]]
    order = ["__version__", "python -m build", "twine check --strict", "attest-build-provenance", "upload-artifact"]
    at = [next(i for i, step in enumerate(steps) if words in step) for words in order]
    assert at == sorted(at)


def test_every_python_that_is_promised_is_tested_with_every_torch() -> None:
    test = _yaml(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]
    rows = test["strategy"]["matrix"]["include"]
    pythons, extras = ["3.10", "3.11", "3.12", "3.13"], [f"torch{minor.replace('.', '')}" for minor in FITTING]
    newest = [(row["python"], row["torch"]) for row in rows if row["dependencies"] == "newest"]
    assert sorted(newest) == [(python, extra) for python in pythons for extra in extras]
    oldest = [(row["python"], row["torch"]) for row in rows if row["dependencies"] == "oldest"]
    assert oldest == [(pythons[0], extras[0])]
    assert test["steps"][-1]["run"] == "make test-fast PYTHON=python TORCH=${{ matrix.torch }}"
    assert 'requires-python = ">=3.10,<3.14"' in (ROOT / "pyproject.toml").read_text()


def test_the_oldest_dependencies_are_the_lower_bounds() -> None:
    lines = (ROOT / ".github" / "oldest.txt").read_text().splitlines()
    oldest = {one.name: one.specifier for one in map(Requirement, (line for line in lines if not line.startswith("#")))}
    bounds = {
        one.name: min(bound.version for bound in one.specifier if bound.operator == ">=")
        for key in ("dependencies", "cli", "fast", "plot", "report")
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
    for key in ("dependencies", "cli", "fast", "plot", "docs", "test", "lint"):
        for one in requirements_in_pyproject(key):
            assert one.specifier.contains(versions[canonicalize_name(one.name)]), one
