"""What pyproject.toml promises about versions, against the constraints that tests run with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]


def pinned(name: str) -> dict[str, str]:
    """Read the versions of a file in constraints/."""
    text = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)", text, flags=re.MULTILINE))


def test_floor_is_the_lower_bound_of_each_requirement() -> None:
    """`make test-floor` runs the oldest versions that are promised, but for torch: its oldest has no CPU build."""
    lower = {r.name: next(s.version for s in r.specifier if s.operator == ">=") for r in REQUIREMENTS}
    floor = pinned("floor")
    assert floor.keys() == lower.keys()
    del lower["torch"]
    for name, version in lower.items():  # the first release may have more digits than the bound: 1.18.1 for 1.18
        assert f"{floor[name]}.".startswith(f"{version}."), f"{name}: pyproject.toml says {version}"
    assert floor["torch"] == pinned("cpu")["torch"]


def test_newest_is_the_last_that_is_allowed() -> None:
    """`make test-newest` runs the newest transformers that is promised."""
    (version,) = pinned("newest").values()
    above = next(s.version for r in REQUIREMENTS if r.name == "transformers" for s in r.specifier if s.operator == "<")
    major, minor = Version(version).release[:2]
    assert above == f"{major}.{minor + 1}"


@pytest.mark.parametrize("name", ["floor", "cpu", "newest", "cuda"])
def test_pinned_versions_are_allowed(name: str) -> None:
    """No constraint lies outside of the ranges."""
    versions = pinned(name)
    for requirement in REQUIREMENTS:
        if requirement.name in versions:
            assert requirement.specifier.contains(Version(versions[requirement.name])), requirement.name


def test_the_packages_of_the_site_are_pinned_within_their_ranges() -> None:
    versions = pinned("docs")
    for requirement in map(Requirement, PROJECT["optional-dependencies"]["docs"]):
        assert requirement.specifier.contains(Version(versions[requirement.name])), requirement.name
