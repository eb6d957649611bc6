"""Port: the layer that stands in the place of a library's attention, under the library's parameter names."""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn
from torch.fx import Proxy, Tracer

from regard.core import ConfigError, Grid, Mask, Mixer, MixerConfig, Projection, Site, SwapError, UnsupportedError
from regard.core.errors import INSTEAD_OF_TORCHSCRIPT
from regard.core.mask import POSITION_BIASES
from regard.core.validation import short_repr
from regard.mixers.shared.heads import drops_bias
from regard.projections.linear import role_rows

from .adapters import adapted_name, adapters, class_path
from .grid_source import GridSource, watched_module
from .host_names import MIXER_CHILD, HostNames
from .host_parameters import host_part, host_site
from .kept_parameters import like
from .separate_qkv import joined_qkv, match_host_projection

_HARMLESS = ("fused_attn", "training", "layer_idx")
"""Attributes of attention, set by tools, that do not change what it computes."""
_KINDS: Mapping[str, tuple[type, ...]] = {
    "replaces": (tuple,), "class_paths": (frozenset, set, tuple), "watch": (str,), "parameter_names": (Mapping,),
    "mask_kinds": (frozenset, set),
}  # fmt: skip
"""Of members that a subclass may define."""


class Port(HostNames):
    """The layer that takes the place of one kind of attention; write a subclass for an attention class of your own.

    A port has the forward signature of the attention that it replaces and calls the mixer, its child `regard`, with
    the tokens and their grid. Most ports need two parts:

        class MyPort(Port):
            watch = "patch_embed"          # the module whose output (B, C, h, w) gives the grid of the tokens

            def forward(self, x):          # as MyAttention.forward
                return self.mixer(x, self.grid())

    Name the port in the attention class (`port = MyPort`), or pass it: `regard.swap(model, mixer, ports=[MyPort])`.

    Class attributes, all optional:
    replaces: the exact classes of attention that it replaces; not needed where the class names its port. class_paths:
    in its place, their paths, "package.module.Class", so that the package need not be imported.
    watch: path of the module whose output (B, C, h, w) gives the grid, looked up from the layer upwards; "a|b" means
    either path, {-3} is the third last part of the layer's name. "" where `call_grid` knows the grid.
    windows: path of the module's attribute (height, width), or one side of both, for attention in windows, which are
    its grids. map_axes: slice of the axes of height and width, for attention whose first argument is a map.
    rotary: whether the host passes rotary positions. only_watched: whether the port is only for layers for which the
    watched module is found. dropouts: the module's attributes that say how attention weights are dropped.
    parameter_names: the host's name of a parameter or child -> the mixer's, where they differ, such as
    {"out_proj": "proj"}. The mixer has `qkv` (or `qkv.q_proj`, `qkv.k_proj` and `qkv.v_proj`, if three matrices of the
    host are named so), `proj`, `q_norm`, `k_norm` and `operator`.
    kept_parameters: parameters that the port itself keeps and uses, such as a table of relative position biases.
    mask_kinds: the kinds of mask that the host always passes ("causal", "padding", "bias", "product"); mechanisms that
    cannot apply them are refused.
    loses: what the attention computes and no mechanism does, such as "attention between channels"; "" for most. The
    mechanism starts from the weights that the layer keeps and from new ones, so that the layer has to be trained, and
    only a swap with reinitialise=True replaces it.

    Hooks, to override where the default does not fit:
    matches, belongs, refusal: which modules are replaced, and why one cannot be.
    site: dim, heads and biases of the module; the default reads them from its matrices, by `parameter_names`.
    call_grid: the grid of a call, where the module or its arguments give it, or the tokens are not all that is watched.
    host_masks: the kinds of mask, where they differ between modules of one class.
    batch_dim: where the batch is not the first dimension of the tokens.
    weights_dropout: the rate of dropout of attention weights, where no attribute says it.
    build_mixer: the mixer, where the ordinary one needs a change.
    forward: where it is not called with tokens (B, N, C) alone.

    Parameters: `state_dict` shows what the host had (same name, same shape) under the host's names, and everything new
    below `regard.`. Loading does the reverse, so a checkpoint of the original model fits. Unknown attributes are looked
    up in the mixer, so that every key of the state dict is also a path through the modules.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name, kinds in _KINDS.items():
            value = vars(cls).get(name)
            if value is not None and not isinstance(value, (*kinds, property)):
                named = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"{cls.__qualname__}.{name} is a {named}, not {short_repr(value)}")

    replaces: ClassVar[tuple[type, ...]] = ()
    class_paths: ClassVar[frozenset[str]] = frozenset()
    watch: ClassVar[str] = ""
    windows: ClassVar[str] = ""
    map_axes: ClassVar[slice | None] = None
    rotary: ClassVar[bool] = False
    only_watched: ClassVar[bool] = False
    dropouts: ClassVar[tuple[str, ...]] = ("attn_drop", "attention_dropout", "dropout")
    mask_kinds: ClassVar[frozenset[str]] = frozenset()
    loses: ClassVar[str] = ""

    calls: int = 1
    """How often the plan's forward pass ran the layer."""
    unsaved: Sequence[str] = ()
    """The host's parameters that the mixer does not use, named as by `parameter_changes`, that a file did not have."""
    placeholder: Tensor
    """An empty buffer with the model's device and dtype, for a mixer that has no parameters."""

    def __init__(self, host: nn.Module, config: MixerConfig, site: Site, shared: nn.Module | None) -> None:
        super().__init__()
        self.source = GridSource()  # those of the plan and of the model replace it
        self.prefix, self.suffix = site.grid.prefix, site.grid.suffix
        self.planned_grid = site.grid  # a plan sets the one that `site` was given, which some ports make coarser
        self._host = (host,)  # a tuple hides it from registration
        self.register_buffer("placeholder", first_tensor(host).new_zeros(()), persistent=False)
        self.host_shapes = {key: value.shape for key, value in host.state_dict().items()}
        dropped = drops_bias(config) and bool(POSITION_BIASES & self.host_masks(host))
        for name in self.kept_parameters if config.uses and not dropped else ():
            kept = getattr(host, name, ...)
            if not isinstance(kept, nn.Parameter | None):
                raise ConfigError(
                    f"{type(self).__name__}.kept_parameters names {name!r}, which is no parameter of "
                    f"{type(host).__name__}; parts that the port calls are in self.host"
                )
            self.register_parameter(name, copy.deepcopy(kept))
        self.register_module(MIXER_CHILD, self.new_mixer(config, site, shared))
        self.mixer.drops_bias = dropped
        self.train(host.training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As that of nn.Module; symbolic tracing (torch.fx, feature extractors) takes the layer as one step."""
        traced = next((value for value in (*args, *kwargs.values()) if isinstance(value, Proxy)), None)
        if traced is None:
            if self.watch:
                self.source.count(self, self.calls)
            return super().__call__(*args, **kwargs)
        self.source.expect(self.planned_grid)
        tracer = cast(Tracer, traced.tracer)
        return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

    def on_tokens(self, x: Tensor) -> Any:
        """The output for tokens (B, N, C) alone."""
        return self.mixer(x, self.grid(x))

    forward: Callable[..., Any] = on_tokens

    # hooks for a subclass

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether the port replaces this module: its exact class is one of those, since a subclass may differ."""
        return class_path(module) in cls.class_paths if cls.class_paths else type(module) in cls.replaces

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        """Whether the matching layer `name` of a model is one that the port is for; a class alone may say too little.

        For example, `nn.MultiheadAttention` is also used in decoders, whose tokens have no grid.
        """
        return not cls.only_watched or watched_module(model, name, cls.watch) is not None

    @classmethod
    def refusal(cls, module: nn.Module) -> str:
        """Why this module cannot be replaced, such as "it gates its output"; "" if it can."""
        return ""

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        """The properties of a module to be replaced: channels, heads, biases; by default read as `host_site` says.

        grid: of its tokens in a forward pass. name: its path in the model. layer: its number among the attentions.
        """
        return replace(host_site(module, cls.parameter_names, grid, name, layer), rotary=cls.rotary)

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        """The grid of a call's tokens, to override where the module or the arguments of `forward` give it.

        module: the attention that is replaced. inputs: the arguments. watched: the patch tokens that `watch` gives. By
        default the window, the map, or these after a prefix of all further tokens. Raises: SwapError for too few tokens
        or nothing watched.
        """
        if cls.windows:
            return Grid(*to_2tuple(attrgetter(cls.windows)(module)))
        if cls.map_axes is not None:
            return Grid(*inputs[0].shape[cls.map_axes])
        return grid_of_tokens(watched, inputs[0].shape[1])

    @classmethod
    def host_masks(cls, module: Any) -> frozenset[str]:
        """The kinds of mask that a module always gets; by default `mask_kinds`."""
        return cls.mask_kinds

    @classmethod
    def weights_dropout(cls, module: Any) -> float:
        """The rate of dropout of attention weights in a module, which a swap leaves out."""
        values = [getattr(module, name, 0.0) for name in cls.dropouts]
        rates = (value.p if isinstance(value, nn.Dropout) else value for value in values)
        return max((rate for rate in rates if isinstance(rate, float)), default=0.0)

    @property
    def batch_dim(self) -> int:
        """The dimension of the layer's input and output that counts images, or windows of them."""
        return 0

    def grid(self, *inputs: Any) -> Grid:
        """The grid of this forward pass. inputs: the arguments, where `call_grid` reads them.

        Watched patch tokens have the prefix and the suffix that they had in the plan's forward pass.
        """
        if self.watch:
            return self.source.grid(self.prefix, self.suffix)
        return self.call_grid(self.host, inputs, None)

    def build_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        """The mixer on the CPU; a port that needs a change of the ordinary one calls this and changes its result.

        shared: the module that all layers of the swap have in common, None for most mechanisms.
        """
        return config.build(site, shared)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """What `set_input_size` of timm's models calls in each attention in windows.

        Raises: SwapError for other windows than the mechanism was built for.
        """
        self.check_windows(cast(Any, self.host).window_size, window_size)

    def check_windows(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Raises: SwapError if `set_input_size` changes the windows that the mechanism was built for."""
        if tuple(new) != tuple(old):
            kind, (now, then) = type(self.mixer.config).__name__, (f"{h}x{w}" for h, w in (old, new))
            raise SwapError(
                f"set_input_size changes windows of {now} tokens to {then}, but {kind} was built for {now}: "
                "restore(model), set_input_size, then swap"
            )

    # the mixer and the host

    def new_mixer(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        """A mixer with the host's device, dtype and q/k normalisation, and q, k, v fused or separate as there."""
        mixer = self.build_mixer(config, site, shared)
        match_host_projection(mixer, self.host, self.parameter_names)
        present = self._modules.get(MIXER_CHILD) or self.host
        for name in ("q_norm", "k_norm"):
            norm = getattr(present, name, None) or host_part(self.host, self.parameter_names, name)
            if isinstance(norm, nn.Module) and isinstance(getattr(mixer, name, None), nn.Module) and site.qk_norm:
                setattr(mixer, name, copy.deepcopy(norm))
        example = next(present.parameters(), self.placeholder)

        def convert(value: Tensor) -> Tensor:  # parts of a hidden host have no weights until `retune` sets them
            device = value.device if value.is_meta else example.device
            return value.to(device, example.dtype if value.is_floating_point() else None)

        return mixer._apply(convert)

    # swapping in and out

    @torch.no_grad()
    def load_host_state(self, state: dict[str, Tensor], same: Container[str] = ()) -> set[str]:
        """Copy the host's tensors into the mixer; returns the mixer's keys that were filled.

        same: this layer's names of parameters that are the host's own objects, which are not written to.
        """
        converted = self.to_mixer(state)
        mixer_state = self.mixer.state_dict()
        for name, value in converted.items():
            if f"{MIXER_CHILD}.{name}" not in same:
                mixer_state[name].copy_(value)
        for key in self.kept_parameters:
            if key in self._parameters and key not in same:
                getattr(self, key).copy_(state[key])
        self._initialise_projection(state)
        return set(converted)

    def _initialise_projection(self, state: dict[str, Tensor]) -> None:
        """Offer the host's q, k, v to a projection of another kind: SNE(init="svd") starts from them."""
        projection, config = getattr(self.mixer, "qkv", None), cast(Any, self.mixer.config)
        by_head = getattr(self.mixer, "qkv_by_head", False)
        if not isinstance(projection, Projection) or self._same_meaning("qkv.weight") or by_head:
            return
        fused = joined_qkv({self.mixer_name(key): value for key, value in state.items()})
        if fused is None or len(fused[0]) != 3 * self.mixer.site.inner:
            return  # with another number of heads no row is the host's
        weight, bias = (None if part is None else role_rows(part, "qkv", config.roles) for part in fused)
        projection.adopt_linear(cast(Tensor, weight), bias)

    def drop_host_weights(self, state: dict[str, Tensor]) -> None:
        """Give the hidden host the tensors of `state`; those that the mixer has in full take no memory."""
        kept = self.fully_kept()
        tensors = {
            key: torch.empty_like(value, device="meta") if key in kept else value.detach().clone()
            for key, value in state.items()
        }
        self.host.load_state_dict(tensors, assign=True)

    def restored_attention(self) -> nn.Module:
        """A copy of the library's module, with this layer's current weights where they fit, frozen where they are."""
        example = next(self.parameters(), self.placeholder)
        state = {key: like(value.detach(), example).clone() for key, value in self.host_state().items()}
        host = copy.deepcopy(self.host)
        host.load_state_dict(state, assign=True)
        frozen = self.frozen_parameters()
        for name, parameter in host.named_parameters():
            parameter.requires_grad_(name not in frozen)
        parts = dict(self.mixer.named_modules())
        for path, module in host.named_modules():
            if isinstance(module, nn.Dropout) and isinstance(part := parts.get(self.mixer_name(path)), nn.Dropout):
                module.p = part.p
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = like(buffer, example)
        host.train(self.training)  # LeViT's returns nothing
        return host

    # methods of nn.Module

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As `nn.Module.state_dict`, with the host's names for what the host had, in the host's order.

        Hooks, which may be those of the host, get these names.
        """
        quiet = self._without("_state_dict_hooks")
        state = nn.Module.state_dict(quiet, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        start = f"{prefix}{MIXER_CHILD}."
        rest = {key: state.pop(key) for key in list(state) if key.startswith(start)}
        for name, own in self.host_names().items():
            state[prefix + name] = (rest if own.startswith(f"{MIXER_CHILD}.") else state).pop(prefix + own)
        state.update(rest)
        for hook in self._state_dict_hooks.values():
            changed = hook(self, state, prefix, getattr(state, "_metadata", {}).get(prefix[:-1], {}))
            state = state if changed is None else changed
        return state

    def _without(self, hooks: str) -> "Port":
        """This layer, with the same tensors, without one kind of hooks."""
        quiet = object.__new__(type(self))  # FSDP2 gives the class another __new__
        quiet.__dict__.update(self.__dict__)
        quiet.__dict__[hooks] = OrderedDict()
        return quiet

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *args)
        for path, own in self.host_adapters().items():
            for key in [key for key in state_dict if key.startswith(f"{prefix}{path}.")]:
                if key.removeprefix(prefix) not in self.host_shapes:
                    name = f"{prefix}{MIXER_CHILD}.{own}{key.removeprefix(prefix + path)}"
                    state_dict.setdefault(name, state_dict.pop(key))
        keys = [key for key in self.host_shapes if key not in self._parameters and prefix + key in state_dict]
        host_tensors, paths = {key: state_dict.pop(prefix + key) for key in keys}, adapters(self.mixer)
        self._load_hidden(host_tensors)
        for name, value in self.to_mixer(host_tensors).items():
            state_dict.setdefault(f"{prefix}{MIXER_CHILD}.{adapted_name(paths, name)}", value)
        for key in self.kept_parameters:
            if key not in self._parameters:
                state_dict.pop(prefix + key, None)
        nn.Module._load_from_state_dict(self._without("_load_state_dict_pre_hooks"), state_dict, prefix, *args)

    @torch.no_grad()
    def _load_hidden(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the hidden host what the mixer does not have in full, which `restore` brings back."""
        hidden, kept = self.host.state_dict(), self.fully_kept()
        for key, value in tensors.items():
            if value.is_meta or hidden[key].shape != value.shape:
                continue
            if not hidden[key].is_meta:
                hidden[key].copy_(value)
            elif key not in kept:  # of a model that was made without weights
                self.host.load_state_dict({key: value.clone()}, strict=False, assign=True)

    def __prepare_scriptable__(self) -> "Port":
        """What `torch.jit.script` calls in each layer. Raises: UnsupportedError."""
        raise UnsupportedError(f"torch.jit.script cannot read a swapped layer; {INSTEAD_OF_TORCHSCRIPT}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.source.users.add(self)

    def __getattr__(self, name: str) -> Any:
        """What the layer itself lacks, by the name that it has in the host: a parameter or part of the mixer, else a
        plain value of the host such as num_heads. The host's own tensors and parts are not given out."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            children = self.__dict__.get("_modules", {})
            if name.startswith("__") or MIXER_CHILD not in children:
                raise
        value: Any = children[MIXER_CHILD]
        try:
            for part in self.parameter_names.get(name, name).split("."):
                value = getattr(value, part)
        except AttributeError:
            value = getattr(self.__dict__["_host"][0], name)
            if isinstance(value, Tensor | nn.Module):
                raise
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Put a parameter or part that has the host's name where the mixer has it."""
        path, _, leaf = self.parameter_names.get(name, name).rpartition(".")
        if name in self.parameter_names and isinstance(value, Tensor):  # functional_call by the host's name
            path, _, leaf = adapted_name(adapters(self.mixer), f"{path}.{leaf}").rpartition(".")
            self.mixer.get_submodule(path)._parameters[leaf] = value  # type: ignore[assignment]
        elif isinstance(value, nn.Module) and self._has_in_mixer(name):  # an adapter around a projection, a dropout
            setattr(self.mixer.get_submodule(path), leaf, value)
        else:
            if self._is_of_host(name):
                warnings.warn(
                    f"{name} is set on a swapped layer, which does not read it: restore(model), change it there, then "
                    "swap", stacklevel=2,
                )  # fmt: skip
            super().__setattr__(name, value)

    def _has_in_mixer(self, name: str) -> bool:
        """Whether a child of the host, by its name, is a child of the mixer now, or a normalisation that may be."""
        if "_host" not in self.__dict__ or name not in self.host._modules:
            return False
        path, _, leaf = self.mixer_name(name).rpartition(".")
        parts = dict(self.mixer.named_modules())
        return path in parts and leaf in parts[path]._modules

    def _is_of_host(self, name: str) -> bool:
        """Whether a name means a part or a plain value of the host that the layer, once in its place, does not use."""
        if "_host" not in self.__dict__ or self not in self.source.users:
            return False
        if name.startswith("_") or name in (*_HARMLESS, *vars(self), *self._modules):
            return False
        return not hasattr(type(self), name) and (name in self.host._modules or name in vars(self.host))


Ports = Sequence[type[Port]]
"""Classes of ports, of which the first that matches a module replaces it."""


def grid_of_tokens(patches: Grid | None, tokens: int) -> Grid:
    """The grid of so many tokens, of which the first are a prefix, and the last lie on the grid `patches`.

    Raises: SwapError for too few tokens, or where the patches are unknown.
    """
    if patches is None:
        raise SwapError("nothing gives the grid of its tokens: let the port define watch or call_grid")
    if tokens < patches.cells:
        raise SwapError(
            f"it gets {tokens} tokens, fewer than the {patches.cells} cells of its grid; if it is "
            "cross-attention, leave it out with where="
        )
    return replace(patches, prefix=tokens - patches.cells, suffix=0)


def first_tensor(module: nn.Module) -> Tensor:
    """The first parameter or floating-point buffer of a module, which shows its device and dtype; else a new zero."""
    floating = (value for value in (*module.parameters(), *module.buffers()) if value.is_floating_point())
    return next(floating, torch.zeros(()))


def library_mask(attn_mask: Tensor | None, is_causal: bool, x: Tensor, padding: Tensor | None = None) -> Mask | None:
    """PyTorch's attn_mask (boolean, True = attend, or additive) and is_causal as a `Mask`; None if nothing is given.

    A mask with one row for all queries and heads hides tokens: it becomes `Mask.keep`, which convolutions, indexers
    and landmarks read, too. Finite numbers beside it stay a bias. x: a tensor with the dtype that an additive mask
    should have. padding: a further mask of one row, (B, N).
    """
    keep = None
    if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] == 1 and _has_one_row(attn_mask):
        keep, attn_mask = _split_row(attn_mask[:, 0, 0], len(x))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=x.dtype).masked_fill(~attn_mask, -torch.inf)
    if padding is not None:
        kept, bias = _split_row(padding, len(x))
        keep = kept if keep is None else keep & kept
        if bias is not None:
            attn_mask = bias if attn_mask is None else attn_mask + bias
    if attn_mask is None and keep is None and not is_causal:
        return None
    return Mask(causal=is_causal, keep=keep, bias=attn_mask)


def _has_one_row(mask: Tensor) -> bool:
    """Whether all queries have the same row, in memory."""
    return mask.shape[-2] == 1 or mask.stride(-2) == 0


def _split_row(row: Tensor, batch: int) -> tuple[Tensor, Tensor | None]:
    """The tokens that a row (B or 1, M) leaves (B, M), and what it adds to the logits of these, (B, 1, 1, M).

    Hidden is what `weigh` of static keys takes for hidden. The second is None where nothing is added; under
    `torch.compile`, where that cannot be seen, only for a boolean row.
    """
    if row.dtype == torch.bool:
        return row.expand(batch, -1), None
    keep = row > max(-5e8, torch.finfo(row.dtype).min / 2)
    rest = row.masked_fill(~keep, 0.0)
    added = torch.compiler.is_compiling() or bool(rest.any())
    return keep.expand(batch, -1), rest[:, None, None] if added else None
