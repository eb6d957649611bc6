"""Port of PyTorch's nn.MultiheadAttention, in torchvision's ViT, open_clip and models around nn.TransformerEncoder."""

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.core import Grid, Site, UnsupportedError
from regard.swapping.grid_source import watched_module
from regard.swapping.layer import Port, grid_of_tokens, library_mask

ACROSS = ("ln_1_kv", "query")
"""Parts of open_clip's modules that attend to another input: blocks of its decoder, and its attention pool."""


class TorchAttention(Port):
    """nn.MultiheadAttention on an image's tokens: torchvision's ViT, open_clip's image towers, nn.TransformerEncoder.

    The grid is the output of a convolution `conv_proj`, `conv1`, `patch_embed.proj` or `patch_embed` of the model; for
    another name, pass a subclass with its own `watch` as ports=.
    """

    replaces: ClassVar[tuple[type, ...]] = (nn.MultiheadAttention,)
    watch = "conv_proj|conv1|patch_embed.proj|patch_embed"
    parameter_names = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj": "proj"}
    _qkv_same_embed_dim = False  # else nn.TransformerEncoderLayer computes softmax from the weights, without a call

    @classmethod
    def belongs(cls, model: nn.Module, name: str) -> bool:
        """nn.MultiheadAttention is also used across: in decoders and pooling heads, whose tokens have no grid.

        A module with two of them is a decoder's: its object queries or words attend to one another, then to the image.
        """
        parent: Any = model.get_submodule(name.rpartition(".")[0])
        several = sum(isinstance(child, nn.MultiheadAttention) for child in parent._modules.values()) > 1
        across = (several and not _is_container(parent)) or any(hasattr(parent, name) for name in ACROSS)
        return not across and isinstance(watched_module(model, name, cls.watch), nn.Conv2d)

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
            return "it has keys of another width or extra keys"
        return ""

    @classmethod
    def site(cls, module: Any, grid: Grid, name: str, layer: int) -> Site:
        bias = module.in_proj_bias is not None
        dim, heads = module.embed_dim, module.num_heads
        return Site(dim=dim, heads=heads, grid=grid, qkv_bias=bias, out_bias=bias, layer=layer, name=name)

    @property
    def batch_dim(self) -> int:
        return 0 if self.batch_first else 1

    @classmethod
    def call_grid(cls, module: Any, inputs: tuple[Any, ...], watched: Grid | None) -> Grid:
        grid = grid_of_tokens(watched, inputs[0].shape[1 if module.batch_first else 0])
        if grid.prefix > 1:
            warnings.warn(
                f"nn.MultiheadAttention: the first {grid.prefix} of {grid.tokens} tokens are taken for class and "
                f"register tokens, the others for the patches; where they come last, or are no tokens of an image, "
                "leave the layer out with where=, or pass a subclass of TorchAttention with call_grid as ports=",
                stacklevel=2,
            )
        return grid

    def __getattr__(self, name: str) -> Any:
        """As `Port`, but None for weights that the mechanism does not have: nn.TransformerEncoderLayer asks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("in_proj_weight", "in_proj_bias"):
                return None
            raise

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Boolean masks are True where attention is forbidden, as in torch. The weights are always None.

        Raises: UnsupportedError for keys or values that are not the queries' tensor, and for nested tensors.
        """
        if query.is_nested:
            raise UnsupportedError(
                "nn.TransformerEncoder passes padded tokens as a nested tensor, which no mechanism takes: set "
                "encoder.use_nested_tensor = False"
            )
        if not (_is_one(key, query) and _is_one(value, query)):
            raise UnsupportedError(
                "this layer was called with separate keys or values: the port is for self-attention, which gets one "
                "tensor as query, key and value; leave the layer out with where="
            )
        x = query if self.batch_first else query.transpose(0, 1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        if attn_mask is not None and attn_mask.ndim == 3:  # (B * H, N, N)
            attn_mask = attn_mask.unflatten(0, (len(x), -1))
        if key_padding_mask is not None and key_padding_mask.dtype == torch.bool:
            key_padding_mask = ~key_padding_mask
        mask = library_mask(attn_mask, is_causal, x, key_padding_mask)
        out = self.mixer(x, self.grid(), mask)
        return (out if self.batch_first else out.transpose(0, 1)), None


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _is_one(x: Tensor, query: Tensor) -> bool:
    """Whether an argument is the queries' tensor; FSDP2 hands every argument on as an alias of its own."""
    if x is query:
        return True
    layouts = [(each.shape, each.stride(), each.storage_offset()) for each in (x, query)]
    return layouts[0] == layouts[1] and torch._C._is_alias_of(x, query)  # type: ignore[attr-defined, no-any-return]


PORTS: tuple[type[Port], ...] = (TorchAttention,)
