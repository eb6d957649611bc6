"""Items of the contract about a layer by itself: input checks, cost, forms, gradients, state and spelling."""

import copy
import dataclasses
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from regard.core import GridError, Mixer, ShapeError, UnsupportedError
from regard.mixers.shared.heads import HeadMixer, HeadMixerConfig
from regard.mixers.spelling import parse, parts, spell

from .subject import ContractError, Subject, gap, perturb


def shape(s: Subject) -> str:
    """The output has the shape and dtype of the input and is finite, in float32 and bfloat16; also for zero images."""
    for dtype in (torch.float32, torch.bfloat16):
        out = copy.deepcopy(s.layer).to(dtype)(s.x.to(dtype), s.grid)
        if out.shape != s.x.shape or out.dtype != dtype:
            raise ContractError(f"input {tuple(s.x.shape)} {dtype} gives output {tuple(out.shape)} {out.dtype}")
        if not out.isfinite().all():
            raise ContractError(f"{int((~out.isfinite()).sum())} values are not finite in {dtype}")
    for run in (s.layer, s.layer.reference):
        if (out := run(s.x[:0], s.grid)).shape != s.x[:0].shape:
            raise ContractError(f"input {tuple(s.x[:0].shape)} gives output {tuple(out.shape)}")
    return ""


def input_checks(s: Subject) -> str:
    """Inputs that do not fit raise the errors of the package."""
    wrong = {
        "one token too many": (torch.cat([s.x, s.x[:, :1]], 1), GridError),
        "one token too few": (s.x[:, 1:], GridError),
        "one channel too many": (torch.cat([s.x, s.x[..., :1]], -1), ShapeError),
    }
    for case, (x, expected) in wrong.items():
        try:
            s.layer(x, s.grid)
        except expected:
            continue
        except Exception as error:
            raise ContractError(f"{case}: {type(error).__name__} instead of {expected.__name__}") from error
        raise ContractError(f"{case}: no error instead of {expected.__name__}")
    return ""


def parameters(s: Subject) -> str:
    """The formula counts the parameters of the layer."""
    layer = s.config.build(s.site(), s.config.shared())
    real, formula = sum(p.numel() for p in layer.parameters()), s.config.cost(s.site()).params
    if real != formula:
        raise ContractError(f"the formula says {formula} parameters, the layer has {real}")
    return ""


def macs(s: Subject) -> str:
    """The formula counts the multiply-accumulates that PyTorch counts."""
    if not s.contract.macs:
        return "PyTorch's counter cannot count its products"
    layer = copy.deepcopy(s.layer).float()
    run = layer if s.contract.macs == "forward" else layer.reference
    _count(s, layer, lambda: run(s.x[:1].float(), s.grid), s.config.cost(s.site()).macs)
    return ""


def _count(s: Subject, layer: Mixer, run: Callable[[], Tensor], formula: int) -> None:
    for name, value in s.contract.counted.items():
        setattr(layer.operator, name, value)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        run()
    if counter.get_total_flops() != 2 * formula:
        raise ContractError(f"the formula says {formula} MACs, PyTorch counts {counter.get_total_flops() / 2:.0f}")


def reference(s: Subject) -> str:
    """Both forms are equal in float64; in float32 the fast form's error is at most four times the plain form's."""
    with torch.no_grad():
        exact = s.layer.reference(s.x, s.grid)
        s.same("fast and plain form in float64", s.layer(s.x, s.grid), exact)
        single = copy.deepcopy(s.layer).float()
        plain = gap(single.reference(s.x.float(), s.grid).double(), exact)
        fast = gap(single(s.x.float(), s.grid).double(), exact)
    allowed = 4 * plain + 1e-7 * max(1.0, exact.abs().max().item())
    if not fast <= allowed:
        raise ContractError(f"float32 error of the fast form {fast:.3g}; the plain form's is {plain:.3g}")
    return ""


def weights(s: Subject) -> str:
    """The output of the operator is its attention matrix times the values."""
    if not isinstance(s.layer, HeadMixer) or not s.config.card.row_maps:
        return "no matrix of token weights"
    with torch.no_grad():
        roles = s.layer.project_heads(s.x, s.grid)
        if (v := roles["v"]) is None:
            return "no values"
        a = s.layer.operator.weights(roles["q"], roles["k"], v, grid=s.grid)
        s.same("weights @ v and the operator", a @ v, s.layer.operator(**roles, grid=s.grid), 1e-11)  # type: ignore[arg-type]
    return ""


def gradients(s: Subject) -> str:
    """Gradients of the fast form equal those of the plain form and finite differences."""
    names = [name for name, _ in s.layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in s.layer.parameters()]
    x = s.x.clone().requires_grad_()

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(s.layer, dict(zip(names, values, strict=True)), (x, s.grid))

    out = run(x, *values)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, *values), grad_out, allow_unused=True)
    plain = torch.autograd.grad(s.layer.reference(x, s.grid), (x, *s.layer.parameters()), grad_out, allow_unused=True)
    for name, fast, expected in zip(("x", *names), grads, plain, strict=True):
        if fast is None or expected is None:
            raise ContractError(f"{name} gets no gradient in the {'fast' if fast is None else 'plain'} form")
        s.same(f"gradients of {name} in fast and plain form", fast, expected, 1e-10)
    torch.autograd.gradcheck(run, (x, *values), fast_mode=True)
    return ""


def compilation(s: Subject) -> str:
    """`torch.compile` captures the layer as one graph and changes neither output nor gradient."""
    if hasattr(HeadMixer.forward, "__wrapped__"):
        return "not run: annotation checks are on"
    torch.compiler.reset()
    compiled = torch.compile(s.layer, fullgraph=True, backend="aot_eager")
    x = s.x.clone().requires_grad_()
    out, plain = compiled(x, s.grid), s.layer(x, s.grid)
    s.same("compiled and eager form", out, plain)
    grad_out = torch.randn_like(out)
    grad, expected = (torch.autograd.grad(y, x, grad_out)[0] for y in (out, plain))
    s.same("gradients of x, compiled and eager", grad, expected, 1e-11)
    return ""


def rotary(s: Subject) -> str:
    """Both forms agree with rotary positions, or the layer refuses them."""
    if not isinstance(s.layer, HeadMixer) or not set("qk") & set(s.layer.config.uses):
        return "no queries and keys to rotate"
    angles = torch.randn(s.grid.cells, s.layer.site.width // 2, dtype=torch.float64).repeat_interleave(2, -1)
    rope = torch.cat([angles.sin(), angles.cos()], -1)
    torch.manual_seed(s.seed)
    try:
        layer = perturb(s.config.build(dataclasses.replace(s.site(), rotary=True)))
        out = layer(s.x, s.grid, None, rope)
    except UnsupportedError as error:
        return f"refused: {error}"
    if not s.config.card.discrete:  # a rotation may bring two scores to a tie
        s.same("fast and plain form with rotary", out, layer.reference(s.x, s.grid, None, rope))
    return ""


def cross(s: Subject) -> str:
    """Cross-attention to the same input is self-attention; another memory works, at the cost of the formula."""
    if not isinstance(s.config, HeadMixerConfig) or not s.config.cross:
        return "no cross-attention"
    with torch.no_grad():
        cross = s.config.build_cross(s.site(memory=s.grid)).double().eval()
        cross.load_state_dict(s.layer.state_dict())
        out = cross(s.x, s.grid, memory=s.x, memory_grid=s.grid)
        s.same("cross-attention to itself and self-attention", out, s.layer(s.x, s.grid))
    config = dataclasses.replace(s.config, dwc=0)
    memory_grid = dataclasses.replace(s.grid, height=s.grid.height + 1, suffix=0)
    site = s.site(memory=memory_grid)
    cross = config.build_cross(site, config.shared()).eval()
    memory = s.draw(memory_grid, 5).float()
    with torch.no_grad():
        out = cross(s.x.float(), s.grid, memory=memory, memory_grid=memory_grid)
    if out.shape != s.x.shape or not out.isfinite().all():
        raise ContractError(f"memory on {memory_grid} gave {tuple(out.shape)}, expected finite {tuple(s.x.shape)}")
    formula, real = config.cost(site), sum(p.numel() for p in cross.parameters())
    if real != formula.params:
        raise ContractError(f"the formula says {formula.params} parameters, not {real}, with memory on {memory_grid}")
    if s.contract.macs == "forward":
        x, memory = s.x[:1].float(), memory[:1]
        _count(s, cross, lambda: cross(x, s.grid, memory=memory, memory_grid=memory_grid), formula.macs)
    return ""


def state(s: Subject) -> str:
    """Two passes, a deep copy and a layer with the same state give bit-identical outputs."""
    with torch.no_grad():
        out = s.layer(s.x, s.grid)
        s.same("two passes", s.layer(s.x, s.grid), out, 0.0)
        s.same("a deep copy", copy.deepcopy(s.layer)(s.x, s.grid), out, 0.0)
        loaded = s.make(s.config, seed=1)
        loaded.load_state_dict(s.layer.state_dict())
        s.same("a layer with the same state", loaded(s.x, s.grid), out, 0.0)
    return ""


def reset(s: Subject) -> str:
    """Every module with parameters has `reset_parameters`, which depends on torch's generator alone."""
    for name, module in s.layer.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        if not callable(getattr(module, "reset_parameters", None)):
            raise ContractError(f"{name or 'the layer'} ({type(module).__name__}) has no reset_parameters()")
        copied = copy.deepcopy(module)
        draws = []
        for noise in (0.0, 1.0):
            with torch.no_grad():
                for parameter in copied.parameters(recurse=False):
                    parameter.add_(noise)
            torch.manual_seed(3)
            cast(Callable[[], None], copied.reset_parameters)()
            draws.append([parameter.detach().clone() for parameter in copied.parameters(recurse=False)])
        for first, second in zip(*draws, strict=True):
            s.same(f"two draws of {name} from one seed", first, second, 0.0)
    return ""


def spelling(s: Subject) -> str:
    """Parsing the spelling gives the configuration, and the layer keeps it."""
    text = spell(s.config)
    if (again := parse(text, tuple(map(type, parts(s.config))))) != s.config:
        raise ContractError(f"{text} is parsed as {spell(again)}")
    if s.layer.config != s.config:
        raise ContractError("the layer does not keep its configuration as `config`")
    return ""
