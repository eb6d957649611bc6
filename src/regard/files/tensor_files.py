"""States with tensors as bytes: JSON for plain values, safetensors for tensors. The only file here that needs torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from regard.core import StoreError

from .atomic import read_if_present, write_atomically
from .records import seal, unseal

NO_STATE = (ValueError, LookupError, TypeError, RecursionError, MemoryError, SafetensorError)
"""Errors of bytes that hold no state."""
_LENGTH = 8
"""Bytes of the length of the JSON part, little-endian, which come first."""
_KINDS = {"list": list, "tuple": tuple}
_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def encode(state: Mapping[str, Any]) -> bytes:
    """A state of mappings, lists, tuples, plain values and tensors as bytes; tensors keep their dtype and bits.

    Raises: TypeError for another value.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_plain(state, tensors)).encode()
    return len(text).to_bytes(_LENGTH, "little") + text + save_tensors(tensors)


def decode(data: bytes) -> dict[str, Any]:
    """The state of `encode`, with tensors on the CPU.

    Raises: one of `NO_STATE` if the bytes are not a state.
    """
    length = int.from_bytes(data[:_LENGTH], "little")
    tensors = load_tensors(data[_LENGTH + length :])
    state = _fill(json.loads(data[_LENGTH : _LENGTH + length]), tensors)
    if not isinstance(state, dict):
        raise TypeError(f"a state is a mapping, not {type(state).__name__}")
    return state


def check_weights(model: nn.Module, weights: Mapping[str, Tensor], finite: bool = True) -> None:
    """Check tensors before they are loaded into a model.

    Raises: ValueError if one is of another kind (integer, real, complex), which PyTorch would convert in silence, or,
    with `finite`, a parameter has values that are not finite.
    """
    for name, own in model.state_dict(keep_vars=True).items():  # a swapped layer has other names in named_parameters
        if (value := weights.get(name)) is None:
            continue
        if (value.is_floating_point(), value.is_complex()) != (own.is_floating_point(), own.is_complex()):
            raise ValueError(f"{name} is of {value.dtype}, expected {own.dtype}")
        if finite and isinstance(own, nn.Parameter) and not value.isfinite().all():
            raise ValueError(f"{name} has values that are not finite")


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state with its checksum, atomically. Raises: StoreError; TypeError, as `encode`."""
    write_atomically(path, seal(encode(state)))


def read_state(path: Path) -> dict[str, Any] | None:
    """The state of a file of `write_state`, None if there is no file. Raises: StoreError if it is damaged."""
    data = read_if_present(path)
    if data is None:
        return None
    try:
        return decode(unseal(path, data))
    except StoreError as error:
        raise StoreError(f"{error}; delete it to start again") from error
    except NO_STATE as error:
        raise StoreError(f"{path} holds no state ({error}); delete it to start again") from error


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"mapping": [[_plain(key, tensors), _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(item, tensors) for item in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__}")


def _fill(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return torch.clone(tensors[content])
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "mapping":
        return {_fill(key, tensors): _fill(item, tensors) for key, item in content}
    return _KINDS[kind](_fill(item, tensors) for item in content)
