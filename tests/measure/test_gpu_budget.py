"""benchmarks/gpu_budget.py: what it counts, and that its backward pass is that of PyTorch."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from regard import Grid, Site, parse

pytestmark = pytest.mark.untyped
SITE = Site(32, 2, Grid(8, 8))


@pytest.fixture(scope="module")
def budget() -> ModuleType:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_budget

    torch._C._ensureCUDADeviceGuardSet()
    return gpu_budget


def layer(budget: ModuleType, text: str, execution: str = "auto") -> tuple[Any, ...]:
    subject: tuple[Any, ...] = budget.layer_of(parse(text), SITE, 4)
    budget.set_execution(subject[0], execution)
    return subject


def test_softmax_is_three_launches(budget: ModuleType) -> None:
    forward, both = budget.count(*layer(budget, "Softmax()"))
    assert forward.by_name == {"addmm": 2, "_scaled_dot_product_flash_attention": 1}
    assert both.by_name["_scaled_dot_product_flash_attention_backward"] == 1
    assert both.by_name["mm"] == 4  # the gradients of two weights and of their inputs
    numbers = 4 * 64 * 32  # of a map of all channels; in bfloat16
    weights = 2 * (4 * 32 * 32 + 4 * 32)
    assert forward.bytes - weights - 2 * (1 + 3 + 3 + 1 + 1 + 1) * numbers < 4096  # the log-sum-exp and random state
    assert forward.products >= 4 * 4 * 64 * 32 * 32


def test_tables_are_made_once(budget: ModuleType) -> None:
    forward, _ = budget.count(*layer(budget, "Window(size=3, shift=1)"))
    assert "arange" not in forward.by_name
    assert forward.launches < 15


def test_kernels_of_triton_are_counted(budget: ModuleType) -> None:
    pytest.importorskip("triton")
    forward, both = budget.count(*layer(budget, "DynamicConv(kernel=3)"))
    assert forward.by_name["_sum_taps (Triton)"] == 1
    assert both.by_name["_kernels_gradient (Triton)"] == 1
    forward, both = budget.count(*layer(budget, "Linear()", "triton"))
    # no copy of the queries to learn a dtype, which `to` would make and looks like a view
    assert forward.by_name == {"addmm": 2, "_sum_keys (Triton)": 1, "_read_queries (Triton)": 1}
    assert both.launches < budget.count(*layer(budget, "Linear()"))[1].launches // 2


@pytest.mark.parametrize("text", ["MiTA(m=4, k=4)", "Linear()", "Window(size=3)", "DynamicConv(kernel=3)", "XCA()"])
def test_the_tape_gives_the_gradients_of_pytorch(budget: ModuleType, text: str) -> None:
    torch.manual_seed(0)
    layer = parse(text).build(SITE).double()
    x = torch.randn(2, SITE.grid.tokens, 32, dtype=torch.float64, requires_grad=True)
    out = layer(x, SITE.grid)
    gradient = torch.randn_like(out)
    leaves = [x, *layer.parameters()]
    found = budget.pull(out, gradient, leaves)
    out = layer(x, SITE.grid)
    for gained, expected in zip(found, torch.autograd.grad(out, leaves, gradient), strict=True):
        assert torch.allclose(gained, expected, atol=1e-12)


COMPILED = """
import json, sys
sys.path.append(sys.argv[1])
import torch
import gpu_budget as budget
from regard import Grid, Site, parse

torch._C._ensureCUDADeviceGuardSet()
site = Site(32, 2, Grid(8, 8))
cases = {text: budget.layer_of(parse(text), site, 4) for text in ("Softmax()", "FLatten()", "Linear()")}
for depth in (1, 2):
    cases[f"SKA() {depth}"] = budget.model_of(f"vit_tiny_patch16_224(depth={depth})", parse("SKA()"), 64, 2)
budget.set_execution(cases["Linear()"][0], "triton")
print(json.dumps({name: budget.count_compiled(*case) for name, case in cases.items()}))
"""
"""In a process of its own: PyTorch remembers for good whether there is a GPU, which is pretended."""


@pytest.fixture(scope="module")
def compiled(budget: ModuleType) -> dict[str, tuple[Any, Any]]:
    """Of each case, the budgets of both passes."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", COMPILED, str(Path(budget.__file__).parent)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counted = json.loads(printed.splitlines()[-1])
    return {name: (budget.Budget(*forward), budget.Budget(*both)) for name, (forward, both) in counted.items()}


def test_compiled_layers_join_what_lies_between_products(
    budget: ModuleType, compiled: dict[str, tuple[Any, Any]]
) -> None:
    forward, both = compiled["Softmax()"]
    assert forward.by_name == {"aten.addmm.out": 2, "aten._scaled_dot_product_flash_attention.default": 1}
    assert both.by_name["aten.mm.out"] == 4
    rest = budget.count(*layer(budget, "Softmax()"))[0].bytes - forward.bytes
    assert 0 <= rest < 4096  # the log-sum-exp and random state, which nothing reads
    plain, joined = budget.count(*layer(budget, "FLatten()")), compiled["FLatten()"]
    assert joined[0].launches < plain[0].launches / 2
    assert joined[1].bytes < plain[1].bytes / 2
    by_triton = {"aten.addmm.out": 2, "_sum_keys (Triton)": 1, "_read_queries (Triton)": 1}
    assert compiled["Linear()"][0].by_name == by_triton


def test_a_whole_model_is_its_layers_and_the_rest(compiled: dict[str, tuple[Any, Any]]) -> None:
    small, large = (compiled[f"SKA() {depth}"] for depth in (1, 2))
    more = large[0].launches - small[0].launches
    assert 6 <= more <= 12  # four products, attention and two norms of a block
    assert large[1].bytes > small[1].bytes
