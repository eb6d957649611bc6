"""What a layer or a model asks of a GPU: launches of kernels and bytes, without a GPU. Beside them its products.

`python benchmarks/gpu_budget.py --side 32 --batch 16 --page budget.md`
Every mechanism runs on tensors that have sizes and a device but no numbers (PyTorch's FakeTensorMode on "cuda"), so
that each takes its path for GPUs. An operator of PyTorch that makes or changes a tensor counts as one launch, and as
the bytes of its inputs and outputs; Regard's Triton kernels count as they are launched. Operators of several kernels
(sort, topk) count once, so launches are "counted", not measured. The backward pass is the tape of the forward pass,
walked here: PyTorch's own engine wants a device. With --compiled, launches are the kernels that inductor plans. What
asks for a number of a tensor waits for the GPU, and is named.
"""

import argparse
import copy
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from regard import Grid, count_macs, create_model
from regard.core import RegardError, Site
from regard.mixers import MIXERS
from regard.mixers.shared import kept
from regard.mixers.spelling import parse

FREE = {"_unsafe_view", "lift_fresh", "detach_", "resolve_conj", "resolve_neg", "promote_types"}
"""Operators without a kernel that do not say so in their schema; allocations are named below."""
ALLOCATIONS = ("empty", "new_empty")
WRITES = ("zero_", "fill_")
"""Operators that do not read what they change."""


class Budget(NamedTuple):
    """Of one pass. products: multiply-accumulates of matrix products, convolutions and attention in PyTorch."""

    launches: int
    bytes: int
    products: int
    by_name: Counter[str]


class Counting(TorchDispatchMode):
    """Counts the operators that reach a device, and looks into those of Regard."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "regard":
            with self, self.triton():
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        free = func.namespace == "prim" or name in FREE or name.startswith(ALLOCATIONS)
        if not (free or _in_tables() or (func.is_view and _is_view(out, args))):
            self.add(name, tree_leaves(out if name in WRITES else (args, kwargs, out)))
            if (formula := flop_registry.get(func.overloadpacket)) is not None:
                self.products += formula(*args, **kwargs, out_val=out) // 2
        return out

    def add(self, name: str, values: Sequence[Any]) -> None:
        """One launch that reads and writes the tensors among values."""
        self.launches[name] += 1
        self.bytes += sum(_bytes(x) for x in values if isinstance(x, Tensor) and x.device.type == "cuda")

    @contextmanager
    def triton(self) -> Iterator[None]:
        """Launches of Triton's kernels are counted, not carried out."""
        from triton.runtime.jit import JITFunction

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            different = {id(x): x for x in args}  # a tensor in the place of one that is not given is not read again
            self.add(f"{kernel.fn.__name__} (Triton)", list(different.values()))

        with mock.patch.object(JITFunction, "run", launch):
            yield

    def budget(self) -> Budget:
        return Budget(self.launches.total(), self.bytes, self.products, self.launches)


def _is_view(out: Any, args: Any) -> bool:
    """Whether an operator that may make a view, such as `to`, made one."""
    results, held = tree_leaves(out), tree_leaves(args)
    kept = {x.untyped_storage()._cdata for x in held if isinstance(x, Tensor)}
    return all(x.untyped_storage()._cdata in kept for x in results)


def _in_tables() -> bool:
    """Whether a table that is kept between passes is made, as only the first pass does."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != kept.__file__:
        frame = frame.f_back
    return frame is not None


def _bytes(x: Tensor) -> int:
    """An expanded tensor is read once."""
    return x.itemsize * prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


class Fused(TorchFunctionMode):
    """Softmax attention takes the fused kernel that it has on a GPU; PyTorch chooses the plain form without one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend(*args, **(kwargs or {}))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    if attn_mask is None and q.shape[-1] == v.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal, scale=scale)[0]
    if attn_mask is not None:
        bias = attn_mask if attn_mask.dtype is not torch.bool else torch.where(attn_mask, 0.0, -torch.inf).to(q.dtype)
        attn_mask = bias.expand(*q.shape[:3], k.shape[-2])
    trains = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, trains, 0.0, is_causal, scale=scale
    )[0]


def pull(out: Tensor, gradient: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of inputs, computed as `torch.autograd.grad` does, without a device; None for what is not used."""
    edges = [torch.autograd.graph.get_gradient_edge(x) for x in inputs]
    ends = {edge.node for edge in edges}
    order: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(out.grad_fn, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            following = () if node in ends else node.next_functions
            stack.extend((other, False) for other, _ in following if other is not None)
    given: dict[Any, dict[int, Tensor]] = {out.grad_fn: {out.output_nr: gradient}}
    for node in reversed(order):
        if node in ends or not (own := given.pop(node, None)):
            continue
        into = [own.get(slot) for slot in range(len(node._input_metadata))]
        if hasattr(node, "apply"):  # of a torch.autograd.Function
            full = [torch.zeros(m.shape, dtype=m.dtype, device=m.device) if x is None and getattr(node, "zeros", True)
                    else x for x, m in zip(into, node._input_metadata, strict=True)]  # fmt: skip
            results, next_edges = _used(node, node.apply(*full))
        else:
            results, next_edges = node(*into), node.next_functions
        results = results if isinstance(results, tuple) else (results,)
        for (other, slot), result in zip(next_edges, results, strict=False):
            if other is not None and result is not None:
                there, wanted = given.setdefault(other, {}), other._input_metadata[slot]
                result = result.sum_to_size(wanted.shape).to(wanted.dtype)
                there[slot] = result if slot not in there else there[slot] + result
    return tuple(given.get(edge.node, {}).get(edge.output_nr) for edge in edges)


def _note_zeros(ctx: Any, value: bool) -> None:
    """As PyTorch's `set_materialize_grads`, which nothing can read: whether zeros are made in place of None."""
    ctx.materialize_grads = ctx.zeros = value


def _used(node: Any, results: Any) -> tuple[Any, Any]:
    """The results of a `torch.autograd.Function` that are gradients, and where they go: inputs that are no tensors have
    results, but nothing that follows.
    """
    results = results if isinstance(results, tuple) else (results,)
    used = tuple(result for result, needed in zip(results, node.needs_input_grad, strict=True) if needed)
    return used, tuple(edge for edge in node.next_functions if edge[0] is not None)


def place(layer: torch.nn.Module) -> None:
    """Replace parameters and buffers by ones on the device: sizes without numbers, floats in bfloat16."""
    for module in layer.modules():
        for held, kind in ((module._parameters, torch.nn.Parameter), (module._buffers, torch.as_tensor)):
            for name, x in held.items():
                if x is not None:
                    dtype = torch.bfloat16 if x.is_floating_point() else x.dtype
                    held[name] = kind(torch.empty(x.shape, dtype=dtype, device="cuda"))


def layer_of(config: Any, site: Site, batch: int) -> tuple[torch.nn.Module, tuple[int, ...], tuple[Any, ...]]:
    """A layer, the shape of its tokens, and its further arguments."""
    return config.build(site), (batch, site.grid.tokens, site.dim), (site.grid,)


def model_of(host: str, config: Any, pixels: int, batch: int) -> tuple[torch.nn.Module, tuple[int, ...], tuple[()]]:
    """A whole model with this mechanism in all layers, and the shape of its images."""
    return create_model(host, config, img_size=pixels), (batch, 3, pixels, pixels), ()


def count(module: torch.nn.Module, shape: Sequence[int], more: Sequence[Any] = ()) -> tuple[Budget, Budget]:
    """Of the forward pass without gradients, and of forward and backward pass, for an input of this shape.

    The module's parameters and buffers are replaced. Raises: RegardError, and what asks for numbers.
    """
    with FakeTensorMode(), Fused():
        x = _placed(module, shape)
        with torch.no_grad(), Counting() as forward:
            module(x, *more)
        with NOTING(), Counting() as both:
            out = module(x, *more)
            pull(out, torch.empty_like(out), [x, *module.parameters()])
    return forward.budget(), both.budget()


def _placed(module: torch.nn.Module, shape: Sequence[int]) -> Tensor:
    """An input on the device, where the module is put too."""
    place(module)
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)


NOTING = partial(mock.patch.object, torch.autograd.function.FunctionCtx, "set_materialize_grads", _note_zeros)


def count_compiled(module: torch.nn.Module, shape: Sequence[int], more: Sequence[Any] = ()) -> tuple[Budget, Budget]:
    """`count` of a module as `torch.compile` would join its operators for an H100: inductor's lowering and fusion, to
    the point where it would write kernels. Bytes are inductor's own; Regard's operators count as in `count`. For a
    process of its own: see `_as_if_present`.
    """
    forward, both = Counting(), Counting()

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        parts = min_cut_rematerialization_partition(joint, inputs, **options)
        for part in parts:
            _lower(part, both)
        return parts

    def lower_forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        _lower(graph, forward)
        return graph.forward

    def compile_with(function: Any, compiler: Any) -> Any:
        return aot_function(function, compiler, partition_fn=partition, decompositions=select_decomp_table())

    def gradients(outs: Any, inputs: Any, grad_outputs: Any, **options: Any) -> Any:
        (out,), (gradient,) = outs, grad_outputs
        return pull(out, gradient, inputs)

    with FakeTensorMode(), Fused(), _as_if_present():
        x = _placed(module, shape)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}

        def function(x: Tensor, *values: Tensor) -> Tensor:
            out: Tensor = functional_call(module, dict(zip(tensors, values, strict=True)), (x, *more))
            return out

        with torch.no_grad():
            compile_with(function, lower_forward)(x, *tensors.values())
        with NOTING(), mock.patch.object(torch.autograd, "grad", gradients):
            compile_with(function, lambda graph, inputs: graph.forward)(x, *tensors.values())
    return forward.budget(), both.budget()


def _lower(graph: torch.fx.GraphModule, counting: Counting) -> None:
    """Count the kernels of a graph after inductor's fusion."""
    with unset_fake_temporarily():
        graph = copy.deepcopy(graph)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = torch._guards.detect_fake_mode(inputs)
    assert mode is not None
    with V.set_fake_mode(mode):
        post_grad_passes(graph, False)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=mode.shape_env)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            for kernel in lowering.scheduler.nodes:
                _count_kernel(kernel, counting)


def _count_kernel(kernel: Any, counting: Counting) -> None:
    made = kernel.node if isinstance(kernel, ExternKernelSchedulerNode) else None
    if isinstance(kernel, NopKernelSchedulerNode) or isinstance(made, MultiOutput):
        return
    operator = getattr(made, "op_overload", None)
    if isinstance(operator, torch._ops.OpOverload) and operator.namespace == "regard":
        origin = next(node for node in made.origins if node.target is operator)
        args, kwargs = tree_map_only(torch.fx.Node, lambda node: node.meta["val"], (origin.args, origin.kwargs))
        with counting, counting.triton():
            OPDEFS[operator._schema.name]._init_fn(*args, **kwargs)
        return
    counting.launches["joined" if made is None else str(operator or made.python_kernel_name)] += 1
    counting.bytes += kernel.get_read_write_buffers_sizes()


_H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=80 * 2**30,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip


@contextmanager
def _as_if_present() -> Iterator[None]:
    """What PyTorch asks of a device before it computes anything has the answers of an H100.

    It remembers some of them, so that this process must not use a real device, nor have asked for one before.
    """
    answers = {
        "get_device_properties": _H100, "get_device_capability": (9, 0), "is_available": True, "current_device": 0,
        "device_count": 1, "is_bf16_supported": True, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None, "get_compute_capability": 90,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            said = staticmethod(partial(_say, answer))
            for asked in (torch.cuda, CudaInterface, CudaInterface.Worker):
                if hasattr(asked, name):
                    stack.enter_context(mock.patch.object(asked, name, said))
        yield


def _say(answer: Any, *_: Any, **__: Any) -> Any:
    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and print one table; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=32, help="side of the grid of tokens")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--heads", type=int, default=6, help="of 64 channels")
    parser.add_argument("--host", help="count a whole model with the mechanism in all layers")
    parser.add_argument("--pixels", type=int, default=224, help="side of the images of --host")
    parser.add_argument("--mixers", nargs="+", default=[f"{cls.__name__}()" for cls in MIXERS], help="spellings")
    parser.add_argument("--execution", default="auto", help="of the operators that have several, such as triton")
    parser.add_argument("--compiled", action="store_true", help="as torch.compile joins the operators")
    parser.add_argument("--page", type=Path, help="write the table as Markdown")
    parser.add_argument("--operators", action="store_true", help="also print what each launches, by name")
    options = parser.parse_args(arguments)
    torch._C._ensureCUDADeviceGuardSet()
    lines = ["| layer | launches | training | MB | training | million products an image |", "|---|---|---|---|---|---|"]
    print(*lines, sep="\n")
    for text in options.mixers:
        cells, passes = _row(text, options)
        lines.append(f"| {' | '.join([text, *cells])} |")
        print(lines[-1], flush=True)
        for name, budget in passes.items() if options.operators else ():
            print(f"  {name}:", ", ".join(f"{operator} {times}" for operator, times in budget.by_name.most_common()))
    if options.page:
        options.page.write_text("\n".join(lines) + "\n")
    return 0


def _row(text: str, options: argparse.Namespace) -> tuple[list[str], dict[str, Budget]]:
    """The cells of a mechanism, and its two passes; none where it refuses or asks for a number."""
    site = Site(64 * options.heads, options.heads, Grid(options.side, options.side))
    try:
        config = parse(text)
        if options.host:
            subject: Any = model_of(options.host, config, options.pixels, options.batch)
            images = torch.empty(1, *subject[1][1:], device="meta")
            products = f"{count_macs(copy.deepcopy(subject[0]).to('meta'), images) / 1e6:,.0f}"
        else:
            subject, products = layer_of(config, site, options.batch), f"{config.cost(site).macs / 1e6:,.0f}"
        set_execution(subject[0], options.execution)
        forward, both = (count_compiled if options.compiled else count)(*subject)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        return [f"waits for a number of the GPU: {error}", "", "", "", ""], {}
    except (RegardError, UnsupportedOperatorException) as error:
        return [str(error), "", "", "", ""], {}
    megabytes = [f"{budget.bytes / 1e6:,.0f}" for budget in (forward, both)]
    return [str(forward.launches), str(both.launches), *megabytes, products], {"forward": forward, "both": both}


def set_execution(module: torch.nn.Module, execution: str) -> None:
    """Of all operators that have several."""
    for part in module.modules() if execution != "auto" else ():
        if hasattr(part, "execution"):
            part.execution = execution


if __name__ == "__main__":
    sys.exit(main())
