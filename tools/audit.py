"""`make audit`: known vulnerabilities of the packages of an environment, by pip-audit.

Exit code 0 only if every package but Regard was looked up and none has a known vulnerability; otherwise 1.
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any


def problems(answer: Any) -> list[str]:
    """What is wrong in an answer of pip-audit: a line for each vulnerability and for each package it left out.

    Raises: ValueError if it is no answer of pip-audit about at least one package.
    """
    packages = answer.get("dependencies") if isinstance(answer, dict) else None
    if not isinstance(packages, list) or any(not isinstance(item, dict) or "name" not in item for item in packages):
        raise ValueError("pip-audit answered without a list of packages")
    others = [package for package in packages if package["name"].lower() != "regard"]
    if not others:
        raise ValueError("pip-audit looked at no package but Regard")
    if all("vulns" not in package for package in others):
        raise ValueError(f"all {len(others)} packages were skipped; the service knows none of them")
    lines = []
    for package in others:
        name = f"{package['name']} {package.get('version', '')}".strip()
        if "skip_reason" in package or "vulns" not in package:
            lines.append(f"{name} was skipped: {package.get('skip_reason', 'no reason is given')}")
            continue
        for found in package["vulns"]:
            fixed = ", ".join(found.get("fix_versions", ())) or "no version"
            lines.append(f"{name} has {found['id']}; repaired in {fixed}")
    return lines


def report(text: str, errors: str) -> int:
    """Print the result of an answer (JSON) and return the exit code."""
    try:
        answer = json.loads(text)
    except ValueError:
        print(f"not audited: {(errors.strip() or 'pip-audit did not answer').splitlines()[-1]}", file=sys.stderr)
        return 1
    try:
        lines = problems(answer)
    except ValueError as error:
        print(f"not audited: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(line, file=sys.stderr)
    print(f"{len(answer['dependencies'])} packages, {len(lines)} problems")
    return 1 if lines else 0


def main() -> int:
    """Audit the environment of an interpreter. pip-audit runs in the environment of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    python = parser.parse_args().python
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    environment = os.environ | {"PIPAPI_PYTHON_LOCATION": os.path.abspath(python)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return report(done.stdout, done.stderr)


if __name__ == "__main__":
    sys.exit(main())
