"""The paths for GPUs: whether they are right, and how long they take beside softmax attention; in short parts.

`python benchmarks/gpu.py --part all --out results/gpu.json --page gpu.html`
Every part takes a few minutes on one GPU and is kept in the file, so that a run that was stopped goes on with the parts
that are missing (`--again` repeats them). In bfloat16, forward and with the backward pass, times are those of CUDA
events, beside PyTorch's fused attention; a ratio below 1 is faster. Data are random numbers. What cannot run here is
left out, with the reason.

`--small` tries every part on a machine without a GPU: Triton's interpreter, tiny sizes, float32. Its times mean
nothing. `--lines` then lists the lines of the code for GPUs that no part executed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_kernels as kernels
import gpu_models as models
from gpu_kernels import Result, Setting

SOURCE = Path(__file__).parents[1] / "src" / "regard" / "mixers"
FILES = [
    SOURCE / name
    for name in (
        "mita/triton_kernels.py", "shared/routed_triton.py", "shared/triton_tiles.py", "shared/routed_varlen.py",
        "factors/flex.py", "convolutions/dynamic_triton.py", "shared/linear_triton.py", "shared/tile_triton.py",
    )
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts, print what they found, keep it; exit code 1 if a check failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=["all"], choices=["all", *PARTS])
    parser.add_argument("--out", type=Path, default=Path("results/gpu.json"), help="file of the results")
    parser.add_argument("--page", type=Path, help="write a page of all results in the file")
    parser.add_argument("--small", action="store_true", help="tiny sizes in Triton's interpreter")
    parser.add_argument("--again", action="store_true", help="repeat parts that are in the file")
    parser.add_argument("--lines", action="store_true", help="list lines that were never executed (slow)")
    options = parser.parse_args(arguments)
    if options.small:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not options.small and not torch.cuda.is_available():
        print("there is no CUDA device; --small tries the parts in Triton's interpreter", file=sys.stderr)
        return 2
    names = list(PARTS) if "all" in options.part else options.part
    executed = Executed() if options.lines else None
    kept = Kept(options.out, Setting(options.small))
    for name in names:
        if name in kept.parts and not options.again:
            print(f"{name}: done before")
            continue
        start = time.perf_counter()
        result = PARTS[name](Setting(options.small))
        kept.add(name, result, time.perf_counter() - start)
        print(f"{name}: {time.perf_counter() - start:.0f} s")
        for line in result.notes + [_line(timing) for timing in result.timings]:
            print(f"  {line}", flush=True)
    if executed:
        executed.report()
    if options.page:
        kept.page(options.page)
    return int(any("WRONG" in note for part in kept.parts.values() for note in part["notes"]))


class Kept:
    """The file of results: one entry for each part, of one device and one setting."""

    def __init__(self, path: Path, setting: Setting) -> None:
        """Raises: SystemExit for a file of another device or setting."""
        import torch

        name = "Triton's interpreter on a CPU" if setting.small else torch.cuda.get_device_name()
        self.path, self.head = path, {"device": name, "torch": torch.__version__}
        self.parts: dict[str, Any] = {}
        if path.exists():
            content = json.loads(path.read_text())
            if content["head"] != self.head:
                raise SystemExit(f"{path} holds results of {content['head']}, not of {self.head}; give another --out")
            self.parts = content["parts"]

    def add(self, name: str, result: Result, seconds: float) -> None:
        self.parts[name] = {"seconds": round(seconds, 1), **result._asdict()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"head": self.head, "parts": self.parts}, indent=1) + "\n")
        part.replace(self.path)

    def page(self, path: Path) -> None:
        """The page of `regard bench`, with the sentences of all parts as its notes."""
        from regard.measure.bench import Timing
        from regard.pages.bench_page import write_bench

        timings = [Timing(**timing) for part in self.parts.values() for timing in part["timings"]]
        notes = [f"{self.head['device']}, torch {self.head['torch']}; {'; '.join(self.parts)}"]
        notes += [f"{name}: {note}" for name, part in self.parts.items() for note in part["notes"]]
        if timings:
            print(f"page: {write_bench(path, timings, '', notes)}")


class Executed:
    """Records which lines of `FILES` run; made before they are imported."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.files = {str(path) for path in FILES}
        sys.settrace(self._call)

    def _call(self, frame: Any, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename in self.files else None

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def report(self) -> None:
        """Print the lines of functions that never ran, as ranges."""
        sys.settrace(None)
        for path in FILES:
            missing = sorted(_statements(path) - {line for name, line in self.lines if name == str(path)})
            print(f"never executed in {path.relative_to(SOURCE)}: {', '.join(map(str, missing)) or 'none'}")


def _statements(path: Path) -> set[int]:
    """The first lines of the statements inside functions, without docstrings."""
    import ast

    found: set[int] = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
            found |= {
                node.lineno for node in inside
                if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            }  # fmt: skip
    return found


def _line(timing: dict[str, Any]) -> str:
    kind = "training" if timing["backward"] else "forward"
    faster = 1 / timing["ratio"] if timing["ratio"] else 0.0
    memory = "" if timing["memory"] is None else f", {timing['memory'] / 1e6:.1f} MB"
    numbers = f"{timing['seconds'] * 1e3:9.3f} ms, {faster:5.2f} times as fast as the first{memory}"
    return f"{timing['grid']:>9} {kind:<8} {timing['mixer']:<34} {numbers}"


PARTS: dict[str, Callable[[Setting], Result]] = {
    "check-mita": kernels.check_mita,
    "check-blocks": kernels.check_blocks,
    "check-factors": kernels.check_factors,
    "check-static": kernels.check_static,
    "check-linear": kernels.check_linear,
    "check-window": kernels.check_window,
    "check-mechanisms": models.check_mechanisms,
    "check-compiled": models.check_compiled,
    "mita-1024": partial(kernels.time_mita, tokens=1024, m=64),
    "mita-2048": partial(kernels.time_mita, tokens=2048, m=64),
    "mita-4096": partial(kernels.time_mita, tokens=4096, m=64),
    "mita-16384": partial(kernels.time_mita, tokens=16384, m=128),
    "blocks": kernels.time_blocks,
    "factors": kernels.time_factors,
    "static": kernels.time_static,
    "linear-1024": partial(kernels.time_linear, tokens=1024),
    "linear-4096": partial(kernels.time_linear, tokens=4096),
    "linear-16384": partial(kernels.time_linear, tokens=16384),
    "window-1024": partial(kernels.time_window, tokens=1024),
    "window-4096": partial(kernels.time_window, tokens=4096),
    "dynamic": kernels.time_dynamic,
    "step": kernels.time_step,
    "dense": models.dense_memory,
}
"""The parts by name, in the order in which they are carried out."""

if __name__ == "__main__":
    sys.exit(main())
