"""Port: a mixer in the place of a library's attention, under the library's parameter names."""

import copy
from contextlib import suppress
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from regard.core import Grid, Mask, Mixer, MixerConfig, Projection, Site, SwapError
from regard.projections.linear import LinearProjection, rows

from .host_parameters import fused_site
from .separate_qkv import PairProjection, SeparateProjection, fused_roles, put_apart, together

CHILD = "regard"


class GridSource:
    """The grid of the present forward pass, written by a forward hook on the module that makes the tokens.

    The hook is the bound method `record`: a deep copy of a model gets its own source. One resolution a step: activation
    checkpointing replays a layer with the grid that was seen last.
    """

    def __init__(self) -> None:
        self.height, self.width = 0, 0

    def record(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        """The forward hook: output (B, C, h, w)."""
        self.height, self.width = output.shape[-2], output.shape[-1]

    def grid(self, prefix: int) -> Grid:
        """The grid that was seen last, with `prefix` extra tokens before it."""
        return Grid(self.height, self.width, prefix)


class Port(nn.Module):
    """A port: a subclass has the library module's exact forward signature and says how to read it.

    The mixer is the child `regard`. `state_dict` shows what the host had (same name, same shape) under the host's names
    and all else below `regard.`; loading does the reverse, so a plain checkpoint fits. Unknown attributes are looked up
    in the mixer, so that a key of the state dict is also a path through the modules.

    library: exact types that it replaces. watch: path of the module whose (B, C, h, w) output gives the grid, looked
    for from the layer upwards, "a|b" is either; "" if the port knows the grid. sends: kinds of mask that the host
    always passes. names: the host's name -> the mixer's, where they differ. stays: parameters that the port itself
    keeps and uses.
    """

    library: ClassVar[tuple[type, ...]] = ()
    watch: ClassVar[str] = ""
    sends: ClassVar[frozenset[str]] = frozenset()
    names: ClassVar[dict[str, str]] = {}
    stays: ClassVar[tuple[str, ...]] = ()

    like: Tensor
    """Follows the model's device and dtype, for a mixer that has no parameters."""

    def __init__(self, host: nn.Module, config: MixerConfig, site: Site, shared: nn.Module | None) -> None:
        super().__init__()
        self.source = GridSource()
        self.prefix = site.grid.prefix
        self._host = (host,)  # a tuple hides it from registration
        self.register_buffer("like", like(host).new_zeros(()), persistent=False)
        self.host_shapes = {key: value.shape for key, value in host.state_dict().items()}
        for name in self.stays if config.uses else ():
            self.register_parameter(name, copy.deepcopy(getattr(host, name)))
        self.register_module(CHILD, self.make(config, site, shared))
        self.train(host.training)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Exact type: a subclass may compute something else."""
        return type(module) in cls.library

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        """Whether the layer `name` of a model is one that this port is for; a type alone may say too little."""
        return True

    @classmethod
    def refuses(cls, module: nn.Module) -> str:
        """Why this module cannot be replaced; "" if it can."""
        return ""

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        """The place that the library's module leaves, read as timm's attention."""
        return fused_site(module, grid, name, layer)

    @classmethod
    def grid_of(cls, module: Any) -> Grid | None:
        """The grid of a port without `watch`."""
        return None

    @property
    def mixer(self) -> Mixer:
        """The mixer in place; the same as `.regard`."""
        return self._modules[CHILD]  # type: ignore[return-value]

    @property
    def host(self) -> nn.Module:
        """The library's module. Parameters that the mixer has in full lie on the meta device."""
        return self._host[0]

    def grid(self) -> Grid:
        """The grid of the present forward pass."""
        return self.source.grid(self.prefix)

    def built(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        """The mixer on the CPU; a port that needs another layer than the ordinary one overrides this."""
        return config.build(site, shared)

    def make(self, config: MixerConfig, site: Site, shared: nn.Module | None) -> Mixer:
        """A mixer with the host's device, dtype, q/k normalisation and matrices as far apart as the host's."""
        mixer = self.built(config, site, shared)
        put_apart(mixer, self.host)
        present = self._modules.get(CHILD) or self.host
        for name in ("q_norm", "k_norm"):
            norm = getattr(present, name, None) or getattr(self.host, name, None)
            if isinstance(norm, nn.Module) and isinstance(getattr(mixer, name, None), nn.Module) and site.qk_norm:
                setattr(mixer, name, copy.deepcopy(norm))
        example = next(present.parameters(), self.like)
        return mixer.to(example.device, example.dtype)

    # names and rows

    def own_name(self, key: str) -> str:
        """The host's key as the mixer calls it."""
        for theirs, ours in self.names.items():
            if key == theirs or key.startswith(theirs + "."):
                return ours + key[len(theirs) :]
        return key

    def _same(self, ours: str) -> bool:
        """Whether a key of the mixer means what the host's key of that name means."""
        linear = (LinearProjection, SeparateProjection, PairProjection)
        return not ours.startswith("qkv.") or isinstance(getattr(self.mixer, "qkv", None), linear)

    def places(self) -> dict[str, str]:
        """The host's keys that the mixer has a place for, and of which roles: "qkv" for all that the host has there.

        "qv" where the mixer has the rows of these roles of a fused matrix, head by head as the host's; a mechanism with
        another number of heads has no row of the host.
        """
        own, projection, found = self.mixer.state_dict(), getattr(self.mixer, "qkv", None), {}
        for key, shape in self.host_shapes.items():
            ours = self.own_name(key)
            if ours not in own or not self._same(ours):
                continue
            theirs = fused_roles(ours)
            roles = "".join(role for role in getattr(projection, "roles", "") if role in theirs)
            if roles == theirs:
                fits, roles = own[ours].shape == shape, "qkv"
            else:
                fits = own[ours].shape[0] * len(theirs) == shape[0] * len(roles) and own[ours].shape[1:] == shape[1:]
            if fits and roles:
                found[key] = roles
        return found

    def inward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The host's tensors by the mixer's names, as far as they have a place; of fused ones the rows that are used.

        A tensor of another shape than the host's is passed on, so that loading reports it.
        """
        own, places, found = self.mixer.state_dict(), self.places(), {}
        for key, value in state.items():
            ours, roles = self.own_name(key), places.get(key, "")
            if value.shape != self.host_shapes[key]:
                if ours in own and self._same(ours):
                    found[ours] = value
            elif roles == "qkv":
                found[ours] = value
            elif roles:
                found[ours] = rows(value, fused_roles(ours), roles)
        return found

    def kept(self) -> set[str]:
        """Keys of the host that the swapped layer has in full."""
        return {key for key, roles in self.places().items() if roles == "qkv"} | (
            self.host_shapes.keys() & self._parameters.keys()
        )

    def account(self) -> tuple[list[str], list[str], list[str]]:
        """What is kept, new and dropped; `qkv.weight[qv]` are the rows of these roles."""
        own, kept, dropped = set(self.mixer.state_dict()), [], []
        full, places = self.kept(), self.places()
        for key in self.host_shapes:
            if key in full:
                kept.append(key)
            elif roles := places.get(key):
                kept.append(f"{key}[{roles}]")
                others = (role for role in fused_roles(self.own_name(key)) if role not in roles)
                dropped.append(f"{key}[{''.join(others)}]")
            else:
                dropped.append(key)
                continue
            own.discard(self.own_name(key))
        return kept, sorted(f"{CHILD}.{key}" for key in own), dropped

    def host_state(self) -> dict[str, Tensor]:
        """The host's whole state: the mixer's present tensors where they fit, what was dropped as it was."""
        own, state = self.mixer.state_dict(), dict(self.host.state_dict())
        places = self.places()
        for key, old in state.items():
            ours, roles = self.own_name(key), places.get(key, "")
            if key in self._parameters:
                state[key] = getattr(self, key).detach()
            elif roles == "qkv":
                state[key] = own[ours]
            elif roles:
                theirs = fused_roles(ours)
                blocks = old.to(own[ours], copy=True).unflatten(0, (len(theirs), -1))
                for role, value in zip(roles, own[ours].unflatten(0, (len(roles), -1)), strict=True):
                    blocks[theirs.index(role)] = value
                state[key] = blocks.flatten(0, 1)
        return state

    def frozen(self) -> set[str]:
        """The host's parameters that get no gradient: like those now in their place, or, if dropped, as they were."""
        wants = {name: value.requires_grad for name, value in self.host.named_parameters()}
        own = dict(self.mixer.named_parameters())
        present = {key: own.get(self.own_name(key)) for key in self.places()}
        present |= {key: self._parameters.get(key) for key in self.stays}
        wants |= {key: value.requires_grad for key, value in present.items() if key in wants and value is not None}
        return {name for name, wanted in wants.items() if not wanted}

    def freeze(self, names: set[str], own: set[str]) -> None:
        """Freeze these of the host's parameters, here and in the hidden host, and no other of the host's.

        own: further parameters to freeze, by their names in this layer.
        """
        for name, value in self.host.named_parameters():
            value.requires_grad_(name not in names)
        stands = {f"{CHILD}.{self.own_name(key)}": key for key in self.places()} | {key: key for key in self.stays}
        for name, value in self.named_parameters():
            if name in stands:
                value.requires_grad_(stands[name] not in names)
            elif name in own:
                value.requires_grad_(False)

    @torch.no_grad()
    def adopt(self, state: dict[str, Tensor]) -> set[str]:
        """Take the host's tensors into the mixer; returns the mixer's keys that were filled."""
        found = self.inward(state)
        own = self.mixer.state_dict()
        for ours, value in found.items():
            own[ours].copy_(value)
        for key in self.stays:
            if key in self._parameters:
                getattr(self, key).copy_(state[key])
        self._start(state)
        return set(found)

    def _start(self, state: dict[str, Tensor]) -> None:
        """Offer the host's q, k, v to a projection of another kind: SNE(init="svd") starts from them."""
        projection, config = getattr(self.mixer, "qkv", None), cast(Any, self.mixer.config)
        if not isinstance(projection, Projection) or self._same("qkv.weight"):
            return
        fused = together({self.own_name(key): value for key, value in state.items()})
        if fused is None or len(fused[0]) != 3 * self.mixer.site.inner:
            return  # with another number of heads no row is the host's
        weight, bias = (None if part is None else rows(part, "qkv", config.roles) for part in fused)
        projection.adopt_linear(cast(Tensor, weight), bias)

    def slim(self, state: dict[str, Tensor]) -> None:
        """Give the hidden host the tensors of `state`, those that the mixer has in full without memory."""
        kept = self.kept()
        held = {
            key: torch.empty_like(value, device="meta") if key in kept else value.detach().clone()
            for key, value in state.items()
        }
        self.host.load_state_dict(held, assign=True)

    def release(self) -> nn.Module:
        """The library's module, with this layer's present weights where they fit, frozen where they are."""
        example = next(self.parameters(), self.like)

        def follow(value: Tensor) -> Tensor:
            return value.to(example.device, example.dtype if value.is_floating_point() else value.dtype)

        state = {key: follow(value.detach()).clone() for key, value in self.host_state().items()}
        host = copy.deepcopy(self.host)
        host.load_state_dict(state, assign=True)
        frozen = self.frozen()
        for name, parameter in host.named_parameters():
            parameter.requires_grad_(name not in frozen)
        for module in host.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = follow(buffer)
        return host.train(self.training)

    # what nn.Module asks

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As `nn.Module.state_dict`, with the host's names for what the host had, in the host's order."""
        made = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        kept = self.kept()
        start = f"{prefix}{CHILD}."
        own = {key[len(start) :]: made.pop(key) for key in list(made) if key.startswith(start)}
        for key in self.host_shapes:
            if key in self._parameters:
                made[prefix + key] = made.pop(prefix + key)
            elif key in kept:
                made[prefix + key] = own.pop(self.own_name(key))
        made.update({start + key: value for key, value in own.items()})
        return made

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Tensor],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        held = {key for key in self.host_shapes if key not in self._parameters and prefix + key in state_dict}
        present = {key: state_dict.pop(prefix + key) for key in self.host_shapes if key in held}
        for ours, value in self.inward(present).items():
            state_dict.setdefault(f"{prefix}{CHILD}.{ours}", value)
        for key in self.stays:
            if key not in self._parameters:
                state_dict.pop(prefix + key, None)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            children = self.__dict__.get("_modules", {})
            if name.startswith("__") or CHILD not in children:
                raise
        value: Any = children[CHILD]
        try:
            for part in self.names.get(name, name).split("."):
                value = getattr(value, part)
        except AttributeError:
            value = getattr(self.__dict__["_host"][0], name)  # num_heads, scale, ...: what tools ask of the host
            if isinstance(value, Tensor | nn.Module):
                raise
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.names and isinstance(value, Tensor):  # functional_call by the host's name
            *path, leaf = self.names[name].split(".")
            owner: nn.Module = self.mixer
            for part in path:
                owner = getattr(owner, part)
            owner._parameters[leaf] = value  # type: ignore[assignment]
            return
        super().__setattr__(name, value)


def like(module: nn.Module) -> Tensor:
    """A tensor with the device and dtype of a module: its first parameter or floating-point buffer, if it has one."""
    floating = (value for value in (*module.parameters(), *module.buffers()) if value.is_floating_point())
    return next(floating, torch.zeros(()))


def additive(mask: Tensor | None, causal: bool, like: Tensor) -> Mask | None:
    """A library's attn_mask (boolean: True = attend, or additive) and is_causal as a Mask; None if neither is there."""
    if mask is None and not causal:
        return None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -torch.inf)
    return Mask(causal=causal, bias=mask)


def watched_module(model: nn.Module, layer: str, watch: str) -> nn.Module | None:
    """The module at path `watch` below the nearest ancestor of `layer` that has it; None if there is none."""
    parts = layer.split(".")
    for end in range(len(parts) - 1, -1, -1):
        for path in watch.split("|"):
            with suppress(AttributeError):
                return model.get_submodule(".".join([*parts[:end], path]))
    return None


def find_watched(model: nn.Module, layer: str, watch: str) -> nn.Module:
    """`watched_module`. Raises: SwapError if there is none."""
    found = watched_module(model, layer, watch)
    if found is None:
        raise SwapError(
            f"{layer} has no {watch!r} above it that would tell the grid of its tokens; this host has no port yet"
        )
    return found
