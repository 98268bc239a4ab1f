"""What a release is made of and how: pinned, locked, with few rights, alike when built twice (S39, S40).

Workflows cannot be run here; `scripts/lint` has zizmor look at them, and these tests at what we promise of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))

every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
    return found


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in jobs(path).items():
            for step in job.get("steps", ()):
                yield f"{path.stem} {name}", step


# -- workflows ---------------------------------------------------------------------------------


@every_workflow
def test_actions_are_pinned_by_commit(path: Path) -> None:
    for used, comment in re.findall(r"uses: (\S+)(?: # (\S+))?", path.read_text()):
        if not used.startswith("./"):
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", used), used
            assert re.fullmatch(r"v\d+\.\d+\.\d+", comment), f"{used} does not say its version"


def test_an_action_has_one_pin() -> None:
    pins = {step["uses"] for _, step in steps() if "uses" in step}
    assert len(pins) == len({pin.partition("@")[0] for pin in pins})


@every_workflow
def test_rights_are_given_by_job(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {}
    for name, job in jobs(path).items():
        rights = job["permissions"]
        assert isinstance(rights, dict), f"{name} takes every right there is"
        if any(
            "scripts/" in step.get("run", "") or "pip install" in step.get("run", "") for step in job.get("steps", ())
        ):
            assert rights == {"contents": "read"}, f"{name} runs code of others"


def test_nobody_holds_a_token() -> None:
    """Trusted publishing: the only secret that is named is the one that each run is given and loses."""
    for path in WORKFLOWS:
        assert set(re.findall(r"secrets\.(\w+)", path.read_text())) <= {"GITHUB_TOKEN"}
    for where, step in steps():
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False, where


def test_what_is_published_was_tested_and_attested() -> None:
    release = jobs(ROOT / ".github/workflows/release.yml")
    assert release["test"]["uses"] == "./.github/workflows/test.yml"

    def before(name: str) -> set[str]:
        needs = release[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*map(before, direct))

    assert before("pypi") >= {"test", "build", "attest"}
    assert before("image") >= {"test", "build"}
    (publish,) = [s for s in release["pypi"]["steps"] if s["uses"].startswith("pypa/gh-action-pypi-publish@")]
    assert publish["with"] == {"attestations": True}
    assert release["pypi"]["permissions"] == {"id-token": "write"}
    assert release["pypi"]["environment"] == "pypi"


def test_every_python_that_is_promised_is_tested() -> None:
    promised = {name.rpartition(" ")[2] for name in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", name)}
    matrix = jobs(ROOT / ".github/workflows/test.yml")["test"]["strategy"]["matrix"]
    assert set(matrix["python"]) == promised
    assert {system.partition("-")[0] for system in matrix["system"]} == {"ubuntu", "macos"}


def test_before_a_commit_the_same_checks_run() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    assert [hook["entry"] for hook in repo["hooks"]] == ["scripts/lint"]
    assert "\nscripts/lint\n" in (ROOT / "scripts/test").read_text()


# -- what it is made of ------------------------------------------------------------------------


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_locks_are_exact_and_hashed(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text, "a lock names no host"
    for entry in re.split(r"\n(?=\S)", text.strip()):
        assert re.match(r"[\w.-]+(\[[\w, -]+\])?==\S+", entry), entry[:80]
        assert "--hash=sha256:" in entry, entry[:80]


def test_every_lock_is_audited() -> None:
    (audit,) = [step["run"] for _, step in steps() if "pip-audit" in step.get("run", "")]
    assert "requirements/*.txt" in audit


def test_the_image_stands_on_a_digest() -> None:
    lines = re.findall(r"(?m)^FROM (\S+)(?: AS (\S+))?$", (ROOT / "deploy/docker/Dockerfile").read_text())
    names = {name for _, name in lines}
    for image, _ in lines:
        assert image in names or re.fullmatch(r"\S+:[\w.-]+@sha256:[0-9a-f]{64}", image), image


def test_a_major_of_the_framework_is_not_taken_unseen() -> None:
    needed = [text.partition(";")[0] for text in PROJECT["project"]["dependencies"]]
    bounded = {re.split(r"[<>=!~\[ ]", text)[0] for text in needed if "<" in text}
    assert bounded == {"starlette"}


def test_a_wheel_is_the_same_twice(tmp_path: Path) -> None:
    built = [build(tmp_path / name) for name in ("one", "two")]
    assert built[0] == built[1]


def build(folder: Path) -> str:
    program = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", program, folder],
        cwd=ROOT,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
        text=True,
        check=True,
    )
    return hashlib.sha256((folder / made.stdout.split()[-1]).read_bytes()).hexdigest()
