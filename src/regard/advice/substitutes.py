"""Substitutes: for each attention layer of a model, layers with other mechanisms that can take its place for a pass."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import MixerConfig, RegardError, SwapError
from regard.core.eval_mode import eval_mode
from regard.files.tensor_files import check_weights
from regard.measure.bench_model import output_tensor
from regard.swapping.grid_source import watched_module
from regard.swapping.inspect import layer_calls, matching_layers
from regard.swapping.layer import Port, Ports
from regard.swapping.layer_plan import LayerPlan, spell_or_none
from regard.swapping.shared_state import present_source
from regard.swapping.swap import plan_layers, swap


class Substitutes:
    """Layers beside a model, which itself does not change: `layers[name][mechanism]` has weights of its own.

    The model may be swapped already: its present mechanisms are then what they replace. They start as a swap starts
    them: with the weights of the layer as far as the mechanism has them. `install` puts a plan of layers into the model
    for the length of a `with` block. refused: why a mechanism cannot stand at a layer. Close it at the end (or use it
    in a `with` statement): it takes its hooks from the model. reinitialise: as for `swap`.
    Raises: SwapError if the model has no attention that can be replaced, or no mechanism fits any layer.
    """

    def __init__(
        self, model: nn.Module, mixers: Sequence[MixerConfig], example: Tensor, where: str = "*",
        ports: Ports = (), *, reinitialise: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.example, self.mixers = model, example, tuple(dict.fromkeys(mixers))
        self.names = matching_layers(model, where, ports, reinitialise=reinitialise)
        self.layers: dict[str, dict[MixerConfig, Port]] = {name: {} for name in self.names}
        self.refused: dict[tuple[str, MixerConfig], str] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._places = _places(model, self.names)
        self._example_calls = self.calls(example)
        for mixer in self.mixers:
            self._add(mixer, ports)
        self._example_calls = {}
        if not any(self.layers.values()):
            raise SwapError(f"no mechanism fits a layer: {next(iter(self.refused.values()), 'none was given')}")
        self._watch()

    def _add(self, mixer: MixerConfig, ports: Ports) -> None:
        if mixer.shared() is not None:
            reason = "its layers share parameters, so it cannot be chosen for one layer alone"
            self.refused |= {(name, mixer): reason for name in self.names}
            return
        groups = [self.names]
        while groups:
            names = groups.pop()
            try:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    layers = plan_layers(self.model, mixer, names, self.example, ports=ports).layers()
            except RegardError as error:
                if len(names) == 1:
                    self.refused[names[0], mixer] = str(error)
                else:  # which of them it is
                    groups += [[name] for name in names]
                continue
            for name, layer in layers.items():
                if reason := self._runs(name, layer.eval()):
                    self.refused[name, mixer] = reason
                else:
                    self.layers[name][mixer] = layer

    def _runs(self, name: str, layer: Port) -> str:
        """ "" if a layer takes what the layer in its place gets, such as a bias of each query; else the reason."""
        args, kwargs = self._example_calls[name]
        try:
            with torch.no_grad():
                layer(*args, **kwargs)
        except RegardError as error:
            return str(error)
        return ""

    def _watch(self) -> None:
        """Let all substitutes read the grid from the model's own passes."""
        for name, substitutes in self.layers.items():
            for layer in substitutes.values():
                watched = watched_module(self.model, name, layer.watch) if layer.watch else None
                if watched is None:
                    continue
                present = present_source(watched)
                if present is None:
                    self._handles.append(watched.register_forward_hook(layer.source.record))
                else:
                    layer.source = present
                layer.source.users.add(layer)

    def keep_only(self, plan: LayerPlan) -> None:
        """Drop all substitutes but those of a plan. Raises: SwapError for a mechanism that a layer does not have."""
        with self.install(plan):
            pass
        self.layers = {name: {mixer: self.layers[name][mixer]} for name, mixer in plan.items()}
        self.names = list(plan)

    def drop(self, name: str, mixer: MixerConfig) -> None:
        """Forget the substitute of a layer."""
        del self.layers[name][mixer]

    def close(self) -> None:
        """Take the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> "Substitutes":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def install(self, plan: LayerPlan) -> Iterator[nn.Module]:
        """The model with substitutes at the layers of a plan, and its own attention at the others.

        plan: exact names of layers. Raises: SwapError for a mechanism that a layer does not have.
        """
        replaced: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for name, mixer in plan.items():
                layer = self.layers.get(name, {}).get(mixer)
                if layer is None:
                    reason = self.refused.get((name, mixer), "it is not among the substitutes")
                    raise SwapError(f"{name} cannot have {spell_or_none(mixer)}: {reason}")
                for parent, leaf in self._places[name]:
                    replaced.append((parent, leaf, parent.get_submodule(leaf)))
                    parent._modules[leaf] = layer
            yield self.model
        finally:
            for parent, leaf, module in replaced:
                parent._modules[leaf] = module

    def choices(self, name: str) -> list[MixerConfig]:
        """The mechanisms that can stand at a layer, in the order in which they were given."""
        return [mixer for mixer in self.mixers if mixer in self.layers[name]]

    def calls(self, images: Tensor) -> dict[str, Any]:
        """(args, kwargs) of each layer in a pass of prepared images, in the order of the network."""
        return layer_calls(self.model, {name: self.model.get_submodule(name) for name in self.names}, images)

    @contextmanager
    def observe(self, see: Callable[[str, tuple[Any, ...], dict[str, Any], Tensor], None]) -> Iterator[None]:
        """Within it, each pass of the model calls `see` with each layer's name, arguments and output (a tensor)."""

        def hook(name: str) -> Callable[..., None]:
            def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                see(name, args, kwargs, output_tensor(output).detach())

            return after

        modules = {name: self.model.get_submodule(name) for name in self.names}
        handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
        try:
            with eval_mode(self.model):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def weights(self) -> dict[str, Tensor]:
        """The tensors of all substitutes by "layer|mechanism|name"."""
        return {
            f"{name}|{spell_or_none(mixer)}|{key}": value
            for name, substitutes in self.layers.items()
            for mixer, layer in substitutes.items()
            for key, value in layer.state_dict().items()
        }

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `weights` returned. Raises: RuntimeError or ValueError if they do not fit."""
        for name, substitutes in self.layers.items():
            for mixer, layer in substitutes.items():
                start = f"{name}|{spell_or_none(mixer)}|"
                own = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
                check_weights(layer, own)
                layer.load_state_dict(own)

    def apply(self, plan: LayerPlan, ports: Ports = ()) -> nn.Module:
        """A copy of the model swapped by a plan, with the weights of the substitutes; hooks are those of a swap."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        try:
            model = copy.deepcopy(self.model)
        finally:
            self._watch()
        if plan:
            swap(model, dict(plan), example=self.example, ports=ports, reinitialise=True)
        for name, mixer in plan.items():
            model.get_submodule(name).load_state_dict(self.layers[name][mixer].state_dict())
        return model


def _places(model: nn.Module, names: Sequence[str]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Each layer's parents and its name in them: several where a model uses one attention at several places."""
    layers = {model.get_submodule(name): name for name in names}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names}
    for parent in model.modules():
        for leaf, module in parent._modules.items():
            if module in layers:
                places[layers[module]].append((parent, leaf))
    return places
