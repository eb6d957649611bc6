"""The README's Python runs."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_python_blocks_run() -> None:
    first, *others = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(first, str(README), "exec"), names)
    assert names["torch"].equal(names["model"](names["images"]), names["plain"])
    assert len([line for line in first.splitlines() if line and not line.startswith(("import", "from"))]) <= 11
    for code in others:
        exec(compile(code, str(README), "exec"), {})
