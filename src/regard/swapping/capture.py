"""Capturing the attention maps of a forward pass."""

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from regard.core import ConfigError, Grid, Mask, UnsupportedError
from regard.core.validation import check_arguments, short_repr
from regard.mixers.shared.heads import HeadMixer
from regard.mixers.softmax import Softmax

from .inspect import explain_inputs, layer_calls, matching_layers
from .layer import Port
from .shared_state import swapped_layers
from .swap import plan_layers


def with_regard_softmax(
    model: nn.Module,
    inputs: Float[Tensor, "B ..."],
    layers: str = "*",
    check: Callable[[str, Grid], object] = lambda name, grid: None,
) -> nn.Module:
    """A copy of the model whose matching layers have Regard's `Softmax` instead of the host's attention.

    `capture` can read it. layers: a glob on layer names; where all matching layers are swapped already, the model
    itself is returned. inputs: as the model expects them; replaced layers and originals are compared on them.
    check: called with the name and the grid of each layer that is replaced, before anything is compared; it may raise.
    Raises: SwapError if no layer matches; UnsupportedError if a replaced layer computes something else, because the
    host's attention is not plain softmax; ConfigError for inputs that the model does not take.
    """
    unswapped = [name for name in matching_layers(model, layers) if not isinstance(model.get_submodule(name), Port)]
    if not unswapped:
        return model
    plan = plan_layers(copy.deepcopy(model), Softmax(), unswapped, inputs[:1])
    for site in plan.sites:
        check(site.name, site.layer.mixer.site.grid)
    softmax_model = plan.apply()
    hosts = {name: model.get_submodule(name) for name in unswapped}
    with explain_inputs(model, inputs):
        calls = layer_calls(model, hosts, inputs)
    for name, (args, kwargs) in calls.items():
        if not _same_output(hosts[name], softmax_model.get_submodule(name), args, kwargs):
            raise UnsupportedError(
                f"{name} of {type(model).__name__} has an attention of its own, or none, and not plain softmax; the "
                "weights of a mechanism that is swapped into it can be seen"
            )
    return softmax_model


@torch.no_grad()
def _same_output(host: nn.Module, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether both compute the same with the host's weights; zero weights become noise, as zeros hide differences."""
    noise, outputs = torch.Generator().manual_seed(0), []
    host, layer = copy.deepcopy(host).eval(), copy.deepcopy(layer).eval()
    for module in (host, layer):
        for value in module.parameters():
            if not value.any():
                value.copy_(0.1 * torch.randn(value.shape, generator=noise))
    layer.load_state_dict(host.state_dict(), strict=False)
    for module in (host, layer):
        output = module(*args, **kwargs)
        outputs.append(output[0] if isinstance(output, tuple) else output)
    expected, out = outputs
    if not expected.isfinite().all():
        raise UnsupportedError(
            "a layer's output is not finite: look at the weights, and at mean and deviation of images"
        )
    return torch.allclose(out, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@check_arguments
@contextmanager
def capture(
    model: nn.Module,
    layers: str = "*",
    reduce: Callable[[str, Tensor], Any] | None = None,
    queries: Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Collect attention maps during a forward pass: `with capture(model) as maps: model(x)`.

    Maps are (B, H, N, M), float32 on the CPU, keyed by layer name; a second pass overwrites them. Rows sum to 1
    only for softmax kinds. reduce: called with each layer's name and map; what it returns is kept instead of the map,
    so that one map at a time takes memory. Costs one extra operator call per layer with N-wide values: O(N^2 H) memory.
    queries: numbers of tokens, whose rows alone are made, (B, H, Q, M): a backward pass for each, O(N) memory.
    Only passes of the thread that opened the block are collected. Compiled models run uncompiled inside the block: a
    compiled pass would not call what collects.
    To capture a host's own attention, use the copy that `with_regard_softmax` returns.
    Raises: SwapError if no swapped layer matches, UnsupportedError if a matching one has no weights between tokens,
    ConfigError, in the pass, for a query that is no token.
    """
    maps: dict[str, Any] = {}
    mixers = readable_mixers(model, layers)
    owner = threading.local()
    owner.captures = True
    with ExitStack() as hooks, _force_eager():
        for name, mixer in mixers.items():
            begin, record = _recorder(maps, name, owner, reduce, queries)
            hooks.enter_context(mixer.register_forward_pre_hook(begin))
            hooks.enter_context(mixer.register_forward_hook(record, with_kwargs=True))
        yield maps


def readable_mixers(model: nn.Module, layers: str = "*") -> dict[str, HeadMixer]:
    """The mixers of matching swapped layers. Raises: SwapError without any, UnsupportedError for one without weights
    between tokens."""
    mixers = {}
    for name in swapped_layers(model, layers):
        mixer: Any = model.get_submodule(name).mixer
        if not isinstance(mixer, HeadMixer) or not mixer.config.card.row_maps:
            raise UnsupportedError(f"{name}: {type(mixer.config).__name__} has no weights between tokens")
        mixers[name] = mixer
    return mixers


@contextmanager
def _force_eager() -> Iterator[None]:
    """A block in which nothing that `torch.compile` made runs compiled."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _recorder(
    maps: dict[str, Any], name: str, owner: threading.local, reduce: Callable[[str, Tensor], Any] | None,
    queries: Sequence[int] | None,
) -> tuple[Callable[..., None], Callable[..., None]]:  # fmt: skip
    """The hooks before and after a mixer's pass; the weights draw the same random numbers as the pass."""

    def begin(mixer: HeadMixer, args: tuple) -> None:
        if getattr(owner, "captures", False):
            owner.random = torch.get_rng_state(), *get_device_states(*args)

    @torch.no_grad()
    def record(mixer: HeadMixer, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
        if getattr(owner, "captures", False):
            state, devices, states = owner.random
            with torch.random.fork_rng(devices):
                torch.set_rng_state(state)
                set_device_states(devices, states)
                weights = _weights(mixer, queries, *args, **kwargs).float().cpu()
            maps[name] = weights if reduce is None else reduce(name, weights)

    return begin, record


def _weights(
    mixer: HeadMixer,
    queries: Sequence[int] | None,
    x: Tensor,
    grid: Grid,
    mask: Mask | None = None,
    rope: Tensor | None = None,
) -> Tensor:
    made = mixer.operator_inputs(x, grid, mask, rope)
    if made.v is None:
        raise UnsupportedError(f"{type(mixer.config).__name__} has no values, so no weights between tokens")
    if queries is None:
        return made.into(mixer.operator.weights)
    if not queries or not all(0 <= query < made.grid.tokens for query in queries):
        raise ConfigError(f"queries are numbers of tokens below {made.grid.tokens}, not {short_repr(tuple(queries))}")
    return made.into(partial(mixer.operator.weight_rows, queries=queries))
