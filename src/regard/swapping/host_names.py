"""The parameters of a swapped layer by the names that they have in the host."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.core import Mixer, SwapError
from regard.projections.linear import LinearQKV, role_rows

from .adapters import BASE, adapted_name, adapters, without_adapters
from .separate_qkv import fused_roles

MIXER_CHILD = "regard"
"""The name of the mixer among the children of a port; all new parameters are below it in the state dict."""


class HostNames(nn.Module):
    """The base class of `Port`: a mixer, a hidden host, and the parameters that both have.

    Keys of the host and of the mixer are names without adapters, which may be around linear layers of the mixer.
    """

    parameter_names: ClassVar[dict[str, str]] = {}
    kept_parameters: ClassVar[tuple[str, ...]] = ()
    host_shapes: dict[str, torch.Size]
    """The shapes of the host's tensors, by its names."""
    _host: tuple[nn.Module]

    @property
    def mixer(self) -> Mixer:
        """The mixer in place; the same as `.regard`."""
        return self._modules[MIXER_CHILD]  # type: ignore[return-value]

    @property
    def host(self) -> nn.Module:
        """The library's module, hidden from registration; parameters that the mixer has in full are on `meta`."""
        return self._host[0]

    def mixer_state(self) -> dict[str, Tensor]:
        """The state dict of the mixer, by the names without adapters."""
        return without_adapters(self.mixer, self.mixer.state_dict())

    def mixer_name(self, key: str) -> str:
        """The mixer's name for the host's key."""
        return _rename(key, self.parameter_names.items())

    def host_name(self, key: str) -> str:
        """The host's name for the mixer's key."""
        return _rename(key, ((mixer_name, host_name) for host_name, mixer_name in self.parameter_names.items()))

    def _same_meaning(self, mixer_key: str) -> bool:
        """Whether a key of the mixer means what the host's key of that name means."""
        projection = getattr(self.mixer.config, "projection", None)
        return not mixer_key.startswith("qkv.") or isinstance(projection, LinearQKV)

    def matched_roles(self) -> dict[str, str]:
        """The host's keys that the mixer has parameters for -> the roles that it has.

        "qkv" means the whole tensor; "qv", for example, that the mixer has only the rows of queries and values of a
        fused matrix. A mechanism with another number of heads has no row of the host.
        """
        mixer_state, present = self.mixer_state(), getattr(self.mixer, "qkv_roles", "")
        matched = {}
        for key, shape in self.host_shapes.items():
            name = self.mixer_name(key)
            if name not in mixer_state or not self._same_meaning(name):
                continue
            own, host_roles = mixer_state[name].shape, fused_roles(name)
            roles = "".join(role for role in present if role in host_roles)
            if roles == host_roles:
                if own == shape:
                    matched[key] = "qkv"
            elif roles and own[1:] == shape[1:] and own[0] * len(host_roles) == shape[0] * len(roles):
                matched[key] = roles  # as many rows for each role
        return matched

    def to_mixer(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The host's tensors under the mixer's names, as far as it has them; of fused tensors the rows that it uses.

        A tensor of another shape than the host's is passed on, so that loading reports it.
        """
        mixer_state, matched, converted = self.mixer_state(), self.matched_roles(), {}
        for key, value in state.items():
            name, roles = self.mixer_name(key), matched.get(key, "")
            if value.shape != self.host_shapes[key]:
                if name in mixer_state and self._same_meaning(name):
                    converted[name] = value
            elif roles == "qkv":
                converted[name] = value
            elif roles:
                converted[name] = role_rows(value, fused_roles(name), roles)
        return converted

    def fully_kept(self) -> set[str]:
        """Keys of the host that the swapped layer has in full."""
        return {key for key, roles in self.matched_roles().items() if roles == "qkv"} | (
            self.host_shapes.keys() & self._parameters.keys()
        )

    def parameter_changes(self) -> tuple[list[str], list[str], list[str]]:
        """The names of kept, new and dropped parameters; `qkv.weight[qv]` are the rows of these roles."""
        new, kept, dropped = set(self.mixer_state()), [], []
        full, matched = self.fully_kept(), self.matched_roles()
        for key in self.host_shapes:
            if key in full:
                kept.append(key)
            elif roles := matched.get(key):
                kept.append(f"{key}[{roles}]")
                unused = (role for role in fused_roles(self.mixer_name(key)) if role not in roles)
                dropped.append(f"{key}[{''.join(unused)}]")
            else:
                dropped.append(key)
                continue
            new.discard(self.mixer_name(key))
        return kept, sorted(f"{MIXER_CHILD}.{key}" for key in new), dropped

    def host_state(self) -> dict[str, Tensor]:
        """The host's whole state: the mixer's current tensors where they fit, what was dropped as it was."""
        mixer_state, state = self.mixer_state(), dict(self.host.state_dict())
        matched = self.matched_roles()
        for key, old in state.items():
            name, roles = self.mixer_name(key), matched.get(key, "")
            if key in self._parameters:
                state[key] = getattr(self, key).detach()
            elif roles == "qkv":
                state[key] = mixer_state[name]
            elif roles:
                if old.is_meta and not mixer_state[name].is_meta:
                    raise SwapError(f"{key} was made without values: load the model's checkpoint, then restore it")
                host_roles = fused_roles(name)
                blocks = old.to(mixer_state[name], copy=True).unflatten(0, (len(host_roles), -1))
                for role, value in zip(roles, mixer_state[name].unflatten(0, (len(roles), -1)), strict=True):
                    blocks[host_roles.index(role)] = value
                state[key] = blocks.flatten(0, 1)
        return state

    # the state dict

    def host_names(self) -> dict[str, str]:
        """The keys of the state dict that are the host's -> this layer's own keys, in the host's order.

        Inside an adapter, a linear layer has the name that it would have inside an adapter of the host. The adapter's
        own tensors are not among them: PEFT looks for them by the paths of modules.
        """
        paths, kept, names = adapters(self.mixer), self.fully_kept(), {}
        for key in self.host_shapes:
            if key in self._parameters:
                names[key] = key
            elif key in kept:
                own = adapted_name(paths, self.mixer_name(key))
                start, leaf = key.rpartition(".")[::2]
                inside = own != self.mixer_name(key) and own.endswith(f".{leaf}")
                names[f"{start}.{BASE}.{leaf}" if inside else key] = f"{MIXER_CHILD}.{own}"
        return names

    def host_adapters(self) -> dict[str, str]:
        """The host's paths of linear layers that it has in full, and those of the adapters around them in the mixer."""
        paths = {f"{path}.weight": path for path in adapters(self.mixer)}
        found = {key: paths.get(self.mixer_name(key)) for key in self.fully_kept() if key.endswith(".weight")}
        return {key.removesuffix(".weight"): path for key, path in found.items() if path}

    # parameters that stay the same objects

    def layer_name(self, key: str) -> str:
        """This layer's own name for the host's key: that of `named_parameters`, without adapters."""
        return key if key in self._parameters else f"{MIXER_CHILD}.{self.mixer_name(key)}"

    def host_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the host has in full, by its names."""
        own = without_adapters(self, dict(self.named_parameters(remove_duplicate=False)))
        return {key: own[name] for key in self.fully_kept() if (name := self.layer_name(key)) in own}

    def frozen_parameters(self) -> set[str]:
        """The host's frozen parameters: as their replacements are now, and dropped ones as they were."""
        trained = {name: value.requires_grad for name, value in self.host.named_parameters(remove_duplicate=False)}
        mixer_parameters = without_adapters(self.mixer, dict(self.mixer.named_parameters(remove_duplicate=False)))
        present = {key: mixer_parameters.get(self.mixer_name(key)) for key in self.matched_roles()}
        present |= {key: self._parameters.get(key) for key in self.kept_parameters}
        trained |= {key: value.requires_grad for key, value in present.items() if key in trained and value is not None}
        return {name for name, requires_grad in trained.items() if not requires_grad}

    def freeze(self, names: set[str], further: set[str]) -> None:
        """Freeze these of the host's parameters, here and in the hidden host, and no other of the host's.

        further: other parameters to freeze, by their names in this layer.
        """
        for name, value in self.host.named_parameters(remove_duplicate=False):
            value.requires_grad_(name not in names)
        host_names = {self.layer_name(key): key for key in (*self.matched_roles(), *self.kept_parameters)}
        for name, value in self.named_parameters(remove_duplicate=False):
            if name in host_names:
                value.requires_grad_(host_names[name] not in names)
            elif name in further:
                value.requires_grad_(False)


def _rename(key: str, names: Iterable[tuple[str, str]]) -> str:
    """The key with the first old name that it begins with as its new one, or as it is. names: (old, new)."""
    for old, new in names:
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return key
