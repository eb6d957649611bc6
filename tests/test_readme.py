"""The Python of the README and of the page of hosts runs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_python_blocks_run() -> None:
    first, *others = blocks(README)
    names: dict = {}
    exec(compile(first, str(README), "exec"), names)
    assert names["torch"].equal(names["model"](names["images"]), names["plain"])
    assert len([line for line in first.splitlines() if line and not line.startswith(("import", "from"))]) <= 11
    for code in others:
        exec(compile(code, str(README), "exec"), {})


def test_attention_in_a_resnet_changes_nothing_at_first() -> None:
    [code] = blocks(ROOT / "docs" / "hosts.md")
    names: dict = {}
    exec(compile(code, "hosts.md", "exec"), names)
    assert names["torch"].equal(names["model"](names["images"]), names["plain"])
    assert any(name.endswith("attn.gamma") for name in names["model"].state_dict())
