"""The memory of a model's tensors while it is built: one that does not fit is refused before memory is asked for."""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard.core.memory import check_bytes

_CREATED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.full.default,
    torch.ops.aten.rand.default,
    torch.ops.aten.randn.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.linspace.default,
}
"""The operations of constructors that make a tensor from numbers alone."""


class SizeGuard(TorchDispatchMode):
    """`with SizeGuard(name): ...` refuses a tensor with which the bytes created so far exceed this machine's memory.

    Tensors of the meta device count nothing. Bytes that are freed again count too, which matters only near the limit.
    Raises: ConfigError with the number of bytes.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.bytes = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CREATED and torch.device(kwargs.get("device") or "cpu").type != "meta":
            size = args[0] if isinstance(args[0], list | tuple) else args[-1:]
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            self.bytes += math.prod(int(n) for n in size) * dtype.itemsize
            check_bytes(self.name, self.bytes)
        return func(*args, **kwargs)
