"""Parameters and multiply-accumulates of a whole model: mechanisms by formula, the rest by PyTorch's counter.

Models are built on the meta device: no memory for weights, no computation.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.core import Cost, Extra, Grid, Mixer, MixerConfig, check_accounting
from regard.core.eval_mode import eval_mode, no_fast_path
from regard.core.validation import check_arguments
from regard.mixers.shared.heads import HeadMixer
from regard.mixers.shared.memory import MemoryMixer
from regard.models.catalog import user_ports
from regard.models.named import is_users, named_network
from regard.models.sizes import default_size_of, set_size
from regard.swapping.inspect import example_input, explain_inputs, input_channels
from regard.swapping.layer import Port
from regard.swapping.swap import swap


@check_arguments
def model_cost(
    host: str, mixer: MixerConfig | None, size: tuple[int, int] | None = None, accounting: str = "executed",
    extra: Extra = (),
) -> Cost:  # fmt: skip
    """Cost of a host with a mechanism (None: its own attention), for one image of size (height, width).

    size: None = the host's own. accounting: as in `MixerConfig.cost`. extra: the user's own models and ports.
    Raises: ConfigError for an unknown host or a size that it does not take, SwapError if it has no attention that can
    be replaced.
    """
    with torch.device("meta"):
        model, image = host_and_image(host, size, extra)
        if mixer is not None:
            swap(model, mixer, example=image, ports=user_ports(extra))
        with explain_inputs(model, image):
            return count_cost(model, image, accounting)


def host_and_image(host: str, size: tuple[int, int] | None, extra: Extra = ()) -> tuple[nn.Module, Tensor]:
    """A host with its own attention, in evaluation mode, and an image; on the meta device if that is the default one.

    host: as in `named_network`. size: (height, width), None = the host's own. Raises: as `named_network`.
    """
    model = named_network(host, size=size, extra=extra).network.to(torch.get_default_device()).eval()
    if size is None:
        return model, example_input(model, default=default_size_of(model, host, extra))
    image = torch.zeros(1, input_channels(model), *size)
    if is_users(host):
        with explain_inputs(model, image):
            set_size(model, size)
    return model, image


@check_arguments
def count_cost(model: nn.Module, image: Tensor, accounting: str = "executed") -> Cost:
    """Parameters and multiply-accumulates of one forward pass; a swapped layer's original does not count."""
    return Cost(sum(p.numel() for p in model.parameters()), count_macs(model, image, accounting))


def _of_lstm(x: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of a layer of `nn.LSTM`; x: the shape of its input, (tokens, B, C); first, second: of its weights."""
    return int(2 * x[0] * x[1] * (math.prod(first) + math.prod(second)))


_MORE: dict[Any, Any] = {
    torch.ops.aten.mv: lambda a, *_, **__: 2 * math.prod(a),
    torch.ops.aten.dot: lambda a, *_, **__: 2 * math.prod(a),
    torch.ops.aten.mkldnn_rnn_layer: _of_lstm,
    torch.ops.aten._trilinear: lambda a, w, b, *_, **__: 2 * a[0] * (math.prod(w) + w[0] * b[1]),  # of nn.Bilinear
}
"""FLOPs, by the shapes of the inputs, of products that PyTorch's counter leaves out."""


@check_arguments
def count_macs(model: nn.Module, images: Tensor | tuple[Any, ...], accounting: str = "executed") -> int:
    """Multiply-accumulates of one forward pass (matrix products, convolutions) in evaluation mode.

    images: the model's input, or a tuple of its inputs. Afterwards every module has its own mode again.
    Operators of swapped layers are not run: their formulas are counted, once for each window and image, so it does not
    matter which implementation runs at a size (dense on small grids). Parameters and images may be on the meta device.
    Meanwhile the model may predict, but not be trained, in other threads.
    accounting: of the formulas, as in `MixerConfig.cost`. Raises: ConfigError for an unknown accounting, or images that
    the model does not take.
    """
    check_accounting(accounting)
    counter = FlopCounterMode(display=False, custom_mapping=_MORE)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:  # the counter's hooks fail on views of parameters with a gradient
            parameter.requires_grad_(False)
        with (
            eval_mode(model), no_fast_path(), sdpa_kernel(SDPBackend.MATH), _by_formula(model, accounting) as formulas,
            counter, explain_inputs(model, _named(images) if isinstance(images, tuple) else images),
        ):  # fmt: skip
            model(*images) if isinstance(images, tuple) else model(images)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    return counter.get_total_flops() // 2 + sum(formulas)


def _named(inputs: tuple[Any, ...]) -> dict[str, Any]:
    return {f"no. {number}:": x for number, x in enumerate(inputs, 1)}


@contextmanager
def _by_formula(model: nn.Module, accounting: str) -> Iterator[list[int]]:
    """Replace operators by ones that return zeros and append the MACs of their formula to the list.

    What makes the tokens of a memory is part of the formula, so it is replaced, too.
    """
    macs: list[int] = []
    replaced: list[tuple[Any, str]] = []
    try:
        for mixer in [module.mixer for module in model.modules() if isinstance(module, Port)]:
            if not isinstance(mixer, HeadMixer):
                replaced.append((mixer, "forward"))
                replaced[-1][0].forward = _here(_counted_layer(mixer, accounting, macs), mixer.forward)
                continue
            if not _has_own_operator(mixer):
                continue
            operator: Any = mixer.operator
            replaced.append((operator, "forward"))
            operator.forward = _here(_counted_operator(mixer, accounting, macs), operator.forward)
            if isinstance(mixer, MemoryMixer):
                replaced.append((operator, "memory"))
                operator.memory = _here(_zero_memory(mixer), operator.memory)
        yield macs
    finally:
        for module, name in replaced:
            vars(module).pop(name, None)


def _here(counted: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """counted in this thread, and its own in others, in which the model may run meanwhile."""
    thread = get_ident()
    return lambda *args, **kwargs: (counted if get_ident() == thread else own)(*args, **kwargs)


def _has_own_operator(mixer: HeadMixer) -> bool:
    """Whether the formula holds: the operator is the mechanism's own, and its values are as wide as its keys."""
    if getattr(mixer, "value_width", mixer.site.width) != mixer.site.width:
        return False
    with torch.device("meta"):
        return type(mixer.operator) is type(mixer.config.operator(mixer.site))


def _counted_operator(mixer: HeadMixer, accounting: str, macs: list[int]):  # type: ignore[no-untyped-def]
    def forward(
        q: Tensor | None, k: Tensor | None, v: Tensor | None, *, grid: Grid, memory: Grid | None = None,
        mask: Any = None,
    ) -> Tensor:  # fmt: skip
        example = next(role for role in (v, q, k) if role is not None)
        times, site = mixer.operator.formulas(mixer.site, replace(mixer.site, grid=grid, memory=memory))
        macs.append(example.shape[0] * times * mixer.config.operator_cost(site, accounting).macs)
        return example.new_zeros(*example.shape[:2], grid.tokens, example.shape[-1])

    return forward


def _zero_memory(mixer: MemoryMixer):  # type: ignore[no-untyped-def]
    config: Any = mixer.config

    def memory(x: Tensor, q: Tensor, grid: Grid, plain: bool) -> tuple[Tensor, None]:
        rows, columns = config.sides(grid)
        return x.new_zeros(x.shape[0], rows * columns + grid.extra, x.shape[-1]), None

    return memory


def _counted_layer(mixer: Mixer, accounting: str, macs: list[int]):  # type: ignore[no-untyped-def]
    def forward(x: Tensor, grid: Grid, *args: Any, **kwargs: Any) -> Tensor:
        macs.append(x.shape[0] * mixer.config.cost(replace(mixer.site, grid=grid), accounting).macs)
        return torch.zeros_like(x)

    return forward
