"""Reading a host: the site of its attention, what a swap cannot replace, and checkpoint files."""

import argparse
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load as load_tensors
from timm.models import clean_state_dict
from torch import Tensor, nn

from regard.core import ConfigError, Grid, Site, StoreError
from regard.files.atomic import read_bytes
from regard.files.records import is_sealed, unseal
from regard.files.tensor_files import decode


def fused_site(module: Any, grid: Grid, name: str, layer: int) -> Site:
    """The site of timm's attention, with children `proj` and `qkv`, or q_proj, k_proj and v_proj in its place."""
    separate, heads = module.qkv is None, module.heads if hasattr(module, "heads") else module.num_heads
    first = module.q_proj if separate else module.qkv
    return Site(
        dim=first.in_features,
        heads=heads,
        grid=grid,
        width=first.out_features // (heads if separate else 3 * heads),
        qkv_bias=first.bias is not None or getattr(module, "q_bias", None) is not None,
        out_bias=module.proj.bias is not None,
        qk_norm=normalisation(module, name),
        drop=output_dropout(module),
        layer=layer,
        name=name,
    )


def output_dropout(module: nn.Module) -> float:
    """The rate of dropout after the output projection; 0 for an attention without."""
    return float(getattr(getattr(module, "proj_drop", None), "p", 0.0))


def normalisation(module: nn.Module, name: str) -> Literal["", "layer", "rms"]:
    """The kind of q/k normalisation. Raises: ConfigError for a kind that Regard's layer does not have."""
    norm = getattr(module, "q_norm", None)
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

    names: entries of the file that may hold the state dict; the first that is present is read, else the file itself.
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
        raise StoreError(f"{path} cannot be read without executing what it contains: {message}") from error
    entries = content if isinstance(content, Mapping) else {}
    state = next((entries[name] for name in names if isinstance(entries.get(name), Mapping)), entries)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors or not all(isinstance(key, str) for key in state):
        raise StoreError(f"{path} is no checkpoint: it has no tensors by name, no state dict")
    return clean_state_dict(tensors)
