"""Reading a host: the site of its attention, what a swap cannot replace, and checkpoint files."""

import argparse
import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load as load_tensors
from timm.models import clean_state_dict
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Site, StoreError
from regard.core.validation import is_whole, plain_number
from regard.files.atomic import read_bytes
from regard.files.records import is_sealed, unseal
from regard.files.tensor_files import decode

HEADS = ("num_attention_heads", "num_heads", "heads", "n_heads")
"""The names of an attention's number of heads; without one it is the width of all heads over `head_dim`."""


def host_site(module: Any, names: Mapping[str, str], grid: Grid, name: str, layer: int) -> Site:
    """The site of an attention with linear queries, keys and values, fused or separate, and a linear output.

    names: `Port.parameter_names`, by which its parts are found; others have Regard's names, such as qkv, q_proj, proj.
    Raises: ConfigError if it lacks such parts or a number of heads, or normalises q and k as Regard's layer does not.
    """
    fused = host_part(module, names, "qkv")
    first = fused or host_part(module, names, "qkv.q_proj", "qkv.q", "qkv.v")
    out = host_part(module, names, "proj")
    if first is None or out is None:
        raise ConfigError(f"{name} has no matrix of queries or no output: let the port define site or parameter_names")
    rows, channels = first.weight.shape[:2]
    inner = rows if fused is None else rows // 3
    width = _whole_number(module, "head_dim")
    heads = _whole_number(module, *HEADS) or (inner // width if width else 0)
    if not heads:
        given = f"{', '.join(HEADS)} or head_dim"
        raise ConfigError(f"{name} has no number of heads, a whole number named {given}: let the port define site")
    return Site(
        dim=channels, heads=heads, grid=grid, width=inner // heads,
        qkv_bias=first.bias is not None or getattr(module, "q_bias", None) is not None, out_bias=out.bias is not None,
        qk_norm=_normalisation(host_part(module, names, "q_norm"), name), drop=output_dropout(module), layer=layer,
        name=name,
    )  # fmt: skip


def host_part(module: nn.Module, names: Mapping[str, str], *own: str) -> Any:
    """The first of the host's modules with one of these names in the mixer; None if it has none of them."""
    paths = [path for each in own for path in (*(key for key in names if names[key] == each), each.split(".")[-1])]
    parts = (module.get_submodule(path) for path in paths if path in dict(module.named_modules()))
    return next(parts, None)


def inner_attention(module: nn.Module) -> nn.Module:
    """The part of an attention that has its queries, keys and values: a child `attention` or `self`, or itself."""
    return next((child for name, child in module.named_children() if name in ("attention", "self")), module)


def _whole_number(module: nn.Module, *names: str) -> int:
    """The first attribute with one of these names that is a positive whole number; 0 if none is."""
    parts = (module, inner_attention(module))
    values = (plain_number(getattr(part, name, None)) for part in parts for name in names)
    return next((value for value in values if is_whole(value) and value > 0), 0)


def output_dropout(module: nn.Module) -> float:
    """The rate of dropout after the output projection; 0 for an attention without."""
    inside = getattr(getattr(module, "output", None), "dropout", None)
    dropout = inside or getattr(module, "proj_drop", None) or getattr(module, "projection_dropout", None)
    return dropout.p if isinstance(dropout, nn.Dropout) else 0.0


def _normalisation(norm: nn.Module | None, name: str) -> Literal["", "layer", "rms"]:
    """The kind of q/k normalisation. Raises: ConfigError for a kind that Regard's layer does not have."""
    if norm is None or isinstance(norm, nn.Identity):
        return ""
    kind = type(norm).__name__.lower()
    if "rms" in kind:
        return "rms"
    if "layernorm" in kind:
        return "layer"
    raise ConfigError(f"{name} normalises q and k by {type(norm).__name__}; Regard's layer has LayerNorm and RMSNorm")


def fused_refusal(module: Any) -> str:
    """Why a timm attention cannot be replaced: a part that Regard's layer does not have; "" if it can."""
    if getattr(module, "gate", None) is not None:
        return "it gates its output by a sigmoid"
    if not isinstance(getattr(module, "norm", nn.Identity()), nn.Identity):
        return "it normalises its output before the projection"
    if getattr(module, "num_kv_groups", 1) > 1:
        return "its keys and values have fewer heads than its queries"
    if module.proj.out_features != (module.q_proj if module.qkv is None else module.qkv).in_features:
        return "it changes the number of channels"
    return ""


def read_tensors(path: str | os.PathLike[str], *names: str) -> dict[str, Tensor]:
    """The tensors by name in a checkpoint, on the CPU: a safetensors file, or one of torch.

    names: entries of the file that may hold the state dict; the first that is present is read, with a warning if there
    are others, else the file itself.
    Prefixes of wrapped models (`module.`, `_orig_mod.`) are removed. Only tensors, plain values and a Namespace are
    unpickled. Raises: StoreError if the file does not exist, cannot be read or holds no named tensors.
    """
    file = Path(path)
    if not file.is_file():
        raise StoreError(f"there is no such file: {path}; pass the path of a checkpoint")
    content: Any
    data = read_bytes(file)
    try:
        if is_sealed(data):  # of a run, with a checksum
            content = decode(unseal(file, data))
        elif file.suffix == ".safetensors":
            content = load_tensors(data)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no error of its own: a damaged file may raise anything
        message = str(error).partition("\n")[0] or type(error).__name__
        if "weights only" in message.lower().replace("_", " "):  # PyTorch goes on to say how its code would be run
            message = "it is a pickle with other things than tensors"
            raise StoreError(f"{path} cannot be read without executing what it contains: {message}") from error
        raise StoreError(f"{path} is damaged, or no checkpoint: {message}") from error
    entries = content if isinstance(content, Mapping) else {}
    there = [name for name in names if isinstance(entries.get(name), Mapping)]
    if len(there) > 1 and not is_sealed(data):
        warnings.warn(f"{path} has {' and '.join(there)}: {there[0]} is read", stacklevel=2)
    state = entries[there[0]] if there else entries
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors or not all(isinstance(key, str) for key in state):
        raise StoreError(f"{path} is no checkpoint: it has no tensors by name, no state dict")
    return clean_state_dict(tensors)
