"""Count timm's models that the ports serve: `python tools/count_ports.py` writes docs/ports.json in a few minutes.

With patterns, such as `python tools/count_ports.py 'levit*' 'pit*'`, it prints the counts of these names only.
`make generated` writes the table of docs/hosts.md from that file. Counted are the names whose model builds on the meta
device and has an attention module; gates and attention pools are left out, and class attention may stay. A model is
served if a port takes every attention and one with the same class and parameters is in a small host of the tests,
whose output was compared before and after a swap. It is re-initialised if a swap needs reinitialise=True for that, as
no mechanism computes one of its kinds of attention.

For each of `MECHANISMS`, the names that it serves: exactly, if it goes into every attention as it is; with the
position biases dropped, if some take it only with host_bias="drop". A mechanism is tried in the small hosts, with
numbers that fit any number of tokens; re-initialised attention is not counted.
"""

import json
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import is_model
from torch import nn

from regard.core import RegardError
from regard.mixers.shared.heads import HeadMixerConfig
from regard.mixers.spelling import parse
from regard.swapping.grid_source import watched_module
from regard.swapping.inspect import port_of
from regard.swapping.swap import plan_layers

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "ports.json"
ATTENTION = re.compile(r"Attn|Attention|MHSA|^XCA$")
APART = re.compile(
    r"AttentionPool|Class|SplitAttn|SelectiveKernel|SpatialAttention$|BilinearAttn|^(?:Light)?(?:Channel|Spatial)Attn$"
)
APART_CLASSES = {"timm.models.crossvit.CrossAttention", "timm.models.nextvit.ConvAttention"}
"""Attention of a class token to another branch; a convolution without queries and keys."""
SERVED, REINITIALISED, PARTLY, UNCHECKED, REFUSED = "served", "re-initialised", "partly", "not compared", "refused"
STATES = (SERVED, REINITIALISED, PARTLY, UNCHECKED, REFUSED)
MECHANISMS = (
    "Softmax()", "MiTA(m=1, k=1)", "Agent(m=1)", "Linear()", "SKA()", "TopK(k=1)", "MoBA(block=1, k=1)",
    "NSA(block=1, k=1)", "BRA(regions=1, k=1)", "Window(size=1)", "Factors()", "XCA()",
)  # fmt: skip
EXACT, DROPPED = "exactly", "biases dropped"


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules by name, without modules that only contain another one."""
    found = {name: module for name, module in model.named_modules() if ATTENTION.search(type(module).__name__)}
    return {
        name: module
        for name, module in found.items()
        if not _apart(module) and not any(other.startswith(f"{name}.") for other in found)
    }


def _apart(module: nn.Module) -> bool:
    kind = type(module)
    return bool(APART.search(kind.__name__)) or f"{kind.__module__}.{kind.__name__}" in APART_CLASSES


def signature(module: nn.Module) -> str:
    """The class of an attention and the names of its parameters, which show the options that it was made with."""
    names = sorted(key for key, _ in module.named_parameters())
    return f"{type(module).__module__}.{type(module).__name__}({', '.join(names)}{_options(module)})"


def _options(module: nn.Module) -> str:
    names = ("head_first", "rotate_half", "qkv_bias_separate", "linear", "use_conv", "use_global")
    options = [name for name in names if getattr(module, name, False)]
    if getattr(module, "num_kv_groups", 1) > 1:
        options.append("num_kv_groups")
    return "".join(f", {name}" for name in options)


def refusal(model: nn.Module, name: str, module: nn.Module) -> str:
    """Why no port takes a module; "" if one does."""
    port = port_of(model, name)
    if port is None:
        return f"{type(module).__name__} has no port"
    try:
        reason = port.refusal(module)
    except RegardError as error:
        return str(error)
    if not reason and port.watch and watched_module(model, name, port.watch) is None:
        return "the grid of its tokens is unknown"
    return reason


def verdict(model: nn.Module, compared: set[str]) -> tuple[str, str] | None:
    """The state of a model and the reason; None for one without attention. compared: signatures of small hosts."""
    layers = attentions(model)
    if not layers:
        return None
    reasons = {name: refusal(model, name, module) for name, module in layers.items()}
    first = next(filter(None, reasons.values()), "")
    if all(reasons.values()):
        return REFUSED, first
    if first:
        return PARTLY, first
    missing = sorted({signature(module) for module in layers.values()} - compared)
    if missing:
        return UNCHECKED, f"no small host has {missing[0]}"
    lost = next(filter(None, (port.loses for name in layers if (port := port_of(model, name)))), "")
    return (REINITIALISED, f"{lost} is lost") if lost else (SERVED, "")


def small_hosts() -> dict[str, Any]:
    """Functions that make the small hosts of the tests, and an input of each."""
    sys.path.insert(0, str(ROOT / "tests"))
    from small_hosts import HOSTS  # the tests' own, not a part of the package
    from timm_hosts import REINITIALISED_HOSTS, TIMM_HOSTS

    return HOSTS | TIMM_HOSTS | REINITIALISED_HOSTS


def small_signatures() -> set[str]:
    """The signatures of all attentions in the small hosts of the tests."""
    return {signature(module) for make in small_hosts().values() for module in attentions(make()[0]).values()}


Models = dict[str, tuple[str, str, str, frozenset[str]]]
"""Name -> (family, state, reason, signatures of its attentions)."""


def count(names: list[str]) -> Models:
    """The names whose model has attention."""
    compared, results = small_signatures(), {}
    for name in names:
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except (RuntimeError, NotImplementedError):  # it does not build on the meta device
            continue
        if found := verdict(model, compared):
            kinds = frozenset(map(signature, attentions(model).values()))
            results[name] = (type(model).__module__.rpartition(".")[2], *found, kinds)
    return results


Hosts = Iterable[tuple[nn.Module, Any, Mapping[str, str]]]
"""Models, an input of each, and the kind of each attention by its name."""


def small_timm_hosts() -> Hosts:
    """The small hosts; a kind is a signature."""
    for make in small_hosts().values():
        model, x = make()
        yield model, x[:1], {name: signature(module) for name, module in attentions(model).items()}


def taken(spelling: str, hosts: Hosts) -> dict[str, str]:
    """Kind -> `EXACT` or `DROPPED`, for the attentions of hosts that take a mechanism."""
    mixer = parse(spelling)
    forms = {EXACT: mixer} | ({DROPPED: replace(mixer, host_bias="drop")} if isinstance(mixer, HeadMixerConfig) else {})
    found: dict[str, str] = {}
    for model, example, kinds in hosts:
        for name, kind in kinds.items():
            if (port := port_of(model, name)) is None or port.loses:
                continue
            for state, form in forms.items():
                if found.get(kind) == EXACT or (state == DROPPED and kind in found):
                    break
                try:
                    plan_layers(model, form, [name], example=example)
                except (RegardError, RuntimeError, ValueError):
                    continue
                found[kind] = state
    return found


def by_mechanism(results: Models) -> dict[str, dict[str, int]]:
    """Spelling of a mechanism -> the number of names that it serves exactly, and with biases dropped."""
    counts = {}
    for spelling in MECHANISMS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            states = taken(spelling, small_timm_hosts())
        found = Counter(_of_layers(states, kinds) for *_, kinds in results.values())
        counts[spelling] = {state: found[state] for state in (EXACT, DROPPED)}
    return counts


def _of_layers(states: Mapping[str, str], kinds: frozenset[str]) -> str:
    """What a mechanism does in a model with these kinds of attention; "" where some does not take it."""
    if not kinds <= states.keys():
        return ""
    return DROPPED if DROPPED in {states[kind] for kind in kinds} else EXACT


def summary(results: Models) -> dict[str, dict[str, object]]:
    """Family -> the number of names in each state, and the most frequent reason."""
    states: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for family, state, reason, _ in results.values():
        states[family][state] += 1
        if reason:
            reasons[family][reason] += 1
    return {
        family: {state: numbers[state] for state in STATES}
        | {"reason": reasons[family].most_common(1)[0][0] if reasons[family] else ""}
        for family, numbers in sorted(states.items())
    }


def main(patterns: list[str]) -> None:
    """Print the counts; without patterns, of all names of timm, which are also written to docs/ports.json."""
    chosen = [name for pattern in patterns for name in timm.list_models(pattern)] if patterns else timm.list_models()
    results = count([name for name in dict.fromkeys(chosen) if is_model(name)])
    if not patterns:
        found = {"timm": timm.__version__, "families": summary(results), "mechanisms": by_mechanism(results)}
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    states = Counter(state for _, state, _, _ in results.values())
    print(len(results), "names:", ", ".join(f"{number} {state}" for state, number in states.items()))
    for reason, number in Counter(reason for _, _, reason, _ in results.values() if reason).most_common():
        print(f"{number:4} {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
