"""`make audit` passes only if every package but Regard was looked up."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
from packaging.version import Version

SOURCE = Path(__file__).parents[2] / "tools" / "audit.py"
ANSWER = json.loads((Path(__file__).parent / "audit_answer.json").read_text())
SPECIFICATION = importlib.util.spec_from_file_location("audit", SOURCE)
audit = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(audit)


def test_the_answer_has_the_form_of_pip_audit() -> None:
    """audit_answer.json was not recorded but written by hand, where the service could not be reached. So it is compared
    with what pip-audit's own formatter (here 2.10.1, class JsonFormat) writes about the same packages."""
    json_form = pytest.importorskip("pip_audit._format.json")
    service = pytest.importorskip("pip_audit._service")
    packages = {}
    for package in ANSWER["dependencies"]:
        if "skip_reason" in package:
            packages[service.SkippedDependency(**package)] = []
        else:
            assert package["vulns"] == []
            packages[service.ResolvedDependency(package["name"], Version(package["version"]))] = []
    written = json_form.JsonFormat(output_desc=True, output_aliases=True).format(packages, [])
    assert json.loads(written) == ANSWER


def test_a_recorded_answer_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert any(package["name"] == "regard" and "skip_reason" in package for package in ANSWER["dependencies"])
    assert audit.report(json.dumps(ANSWER), "") == 0
    assert capsys.readouterr().out == f"{len(ANSWER['dependencies'])} packages, 0 problems\n"


def test_a_skipped_package_fails(capsys: pytest.CaptureFixture[str]) -> None:
    answer = copy.deepcopy(ANSWER)
    answer["dependencies"][0] = {"name": "torch", "skip_reason": "torch (2.13.0+cpu) is not on the index"}
    assert audit.report(json.dumps(answer), "") == 1
    assert "torch was skipped: torch (2.13.0+cpu) is not on the index" in capsys.readouterr().err


def test_a_vulnerability_fails(capsys: pytest.CaptureFixture[str]) -> None:
    answer = copy.deepcopy(ANSWER)
    answer["dependencies"][1]["vulns"] = [{"id": "PYSEC-2099-1", "fix_versions": ["9.9"], "aliases": []}]
    assert audit.report(json.dumps(answer), "Found 1 known vulnerability in 1 package") == 1
    name = f"{answer['dependencies'][1]['name']} {answer['dependencies'][1]['version']}"
    assert f"{name} has PYSEC-2099-1; repaired in 9.9" in capsys.readouterr().err


def test_no_service_is_not_audited(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report("", "ERROR:pip_audit: a service\nERROR: could not be reached\n") == 1
    assert audit.report("no JSON", "") == 1
    told = "not audited: ERROR: could not be reached\nnot audited: pip-audit did not answer\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "{}",
        '{"dependencies": []}',
        '{"dependencies": [3]}',
        '{"dependencies": [{"version": "1"}]}',
        '{"dependencies": [{"name": "regard", "skip_reason": "editable"}]}',
        '{"dependencies": [{"name": "torch", "skip_reason": "none"}, {"name": "rich", "skip_reason": "none"}]}',
    ],
)
def test_an_answer_without_packages_is_not_audited(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report(text, "No known vulnerabilities found") == 1
    assert capsys.readouterr().err.startswith("not audited: ")


@pytest.mark.parametrize("package", [{"name": "torch"}, {"name": "torch", "version": "2.15.0"}])
def test_a_package_without_a_result_fails(package: dict[str, str]) -> None:
    answer = copy.deepcopy(ANSWER)
    answer["dependencies"].append(package)
    assert audit.report(json.dumps(answer), "") == 1
