"""Files that GitHub reads: workflows, templates, hooks, citation; and the length of test names."""

import re
import tomllib

import pytest
import yaml

from conf.entry import REPOSITORY

GITHUB = sorted((REPOSITORY / ".github").rglob("*.yml"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(path: str) -> dict:
    return yaml.safe_load((REPOSITORY / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_the_files_for_github_are_yaml(path):
    assert read(path)


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_a_template_asks_questions_with_labels(name):
    template = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert template["name"] and template["description"]
    assert all(part["attributes"]["label"] for part in template["body"])
    ids = [part["id"] for part in template["body"]]
    assert len(set(ids)) == len(ids)


def test_the_workflow_runs_commands_of_the_makefile():
    jobs = read(".github/workflows/tests.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {"make lint", "make quick", "make test"} <= set(commands)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.MULTILINE), command


def test_the_workflow_tests_every_supported_python():
    versions = read(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    low, high = (int(minor) for minor in re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups())
    assert versions == [f"3.{minor}" for minor in range(low, high)]


def test_the_hooks_use_the_locked_version_of_ruff():
    (hooks,) = read(".pre-commit-config.yaml")["repos"]
    locked = re.search(r"^ruff==(.+)$", (REPOSITORY / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    assert hooks["rev"] == f"v{locked[1]}"
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_citation_has_the_version_and_license_of_the_project():
    citation = read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_names_of_tests_have_at_most_70_letters():
    names = [
        name
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def test_(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(names) > 500
    assert not [name for name in names if len(name) > 70]
