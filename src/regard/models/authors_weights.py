"""Loading the checkpoints that MiTA's authors published (repository QishuaiWen/MiTA) into a model with MiTA.

Their files are training checkpoints: model, optimizer and the `argparse.Namespace` of the run. They are read with
`weights_only`, so that nothing in them is executed. Their keys are timm's, or for ViT-5 those of `vit5.py`, except for
the convolution (`attn.dwc`), the gate, which is a fourth part of the projection (`attn.qkvg`), and the rotary
frequencies (`attn.rope.freqs`), which the host computes itself.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import ConfigError, StoreError
from regard.mixers.mita.mita import MiTA
from regard.swapping.host_parameters import read_tensors

from .create import create_model
from .vit5 import PATCH_BASE, REGISTER_BASE

HEAD_WIDTH = 64
"""Channels per head of every DeiT."""
DAMAGED = "the file is damaged or of another model: download it again"


def load_mita(path: str | os.PathLike[str], *, m: int = 25, k: int = 0, heads: int = 0) -> nn.Module:
    """A DeiT or ViT-5 with MiTA from a checkpoint of its authors, in evaluation mode, on the CPU.

    Sizes, convolution and gate are read from the weights. m, k: landmarks and keys per expert, which weights do not
    show; the published models have 25 landmarks and, with k=0, 25 keys in DeiT and 30 in ViT-5. heads: 0 = heads of 64
    channels, as in every DeiT, or of the width that ViT-5's weights show.
    Raises: StoreError for a file that cannot be read, is damaged or is another kind of checkpoint; ConfigError or
    GridError for numbers that do not fit.
    """
    config, state = convert(read_tensors(path, "model"), m=m, k=k)
    model = create_model("vit5_small" if is_vit5(state) else "vit_tiny_patch16_224", config, **sizes(state, heads))
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # a tensor of another size
        raise StoreError(f"{path}: {error}; {DAMAGED}") from error
    if result.missing_keys or result.unexpected_keys:
        raise StoreError(
            f"{path} is not a MiTA-DeiT or MiTA-ViT-5: missing {result.missing_keys}, unexpected "
            f"{result.unexpected_keys}; {DAMAGED}"
        )
    return model.eval()


def is_vit5(state: Mapping[str, Tensor]) -> bool:
    """Whether weights are those of a ViT-5: registers, layer scale or normalised queries."""
    return any(key.startswith("reg_token") or ".gamma_" in key or ".q_norm" in key for key in state)


def convert(state: Mapping[str, Tensor], *, m: int = 25, k: int = 0) -> tuple[MiTA, dict[str, Tensor]]:
    """The mechanism of the authors' weights, and the weights under Regard's names. m, k: as in `load_mita`.

    Raises: StoreError for weights of another model, or rotary frequencies that are not those of ViT-5.
    """
    if not {"patch_embed.proj.weight", "pos_embed", "head.bias"} <= set(state):
        raise StoreError(
            "these are not the weights of a DeiT or ViT-5, which have patch_embed.proj.weight, pos_embed and head.bias"
        )
    converted: dict[str, Tensor] = {}
    dwc, gate, rotary = 0, False, is_vit5(state)
    for key, value in state.items():
        if match := re.fullmatch(r"(blocks\.\d+\.attn\.)qkvg\.(weight|bias)", key):
            *qkv, gate_weight = torch.atleast_1d(value).tensor_split(4)
            converted[f"{match[1]}qkv.{match[2]}"] = torch.cat(qkv)
            converted[f"{match[1]}regard.gate.{match[2]}"] = gate_weight.clone()
            gate = True
        elif match := re.fullmatch(r"(blocks\.\d+\.attn\.)(dwc\.(?:weight|bias))", key):
            converted[f"{match[1]}regard.{match[2]}"] = value
            dwc = value.shape[-1] if value.ndim == 4 else dwc
        elif match := re.fullmatch(r"blocks\.\d+\.attn\.(rope|rope_reg)\.freqs", key):
            _check_frequencies(key, value, PATCH_BASE if match[1] == "rope" else REGISTER_BASE)
        else:
            converted[key] = value
    preset, keys = ("official-patches", 30) if rotary else ("official", 25)
    return MiTA(m=m, k=k or keys, preset=preset, dwc=dwc, gate=gate), converted  # type: ignore[arg-type]


def sizes(state: Mapping[str, Tensor], heads: int = 0) -> dict[str, Any]:
    """The sizes of the model that converted weights belong to, as options of its host.

    Raises: StoreError for weights that do not fit together, ConfigError for a number of heads that does not fit.
    """
    width, channels, patch, patch_width = _shape(state, "patch_embed.proj.weight", 4)
    positions, classes = _shape(state, "pos_embed", 3)[1], _shape(state, "head.bias", 1)[0]
    blocks = {int(match[1]) for key in state if (match := re.match(r"blocks\.(\d+)\.", key))}
    rotary = is_vit5(state)
    patches = positions - (not rotary)
    side = round(max(patches, 0) ** 0.5)
    if not blocks or blocks != set(range(len(blocks))):
        raise StoreError(f"the weights have blocks {sorted(blocks)}, not 0 to the last one; {DAMAGED}")
    if side * side != patches or side == 0 or patch != patch_width:
        raise StoreError(
            f"{positions} positions and patches of {patch}x{patch_width} do not make a square image"
            f"{'' if rotary else ' and one class token'}; {DAMAGED}"
        )
    head_width = _shape(state, "blocks.0.attn.q_norm.weight", 1)[0] if rotary else HEAD_WIDTH
    if heads < 0 or width % (heads or head_width):
        raise ConfigError(
            f"width {width} is not a multiple of {heads or head_width}; pass heads= as the model was trained"
        )
    options = {"embed_dim": width, "depth": len(blocks), "num_heads": heads or width // head_width, "patch_size": patch}
    options |= {"in_chans": channels, "img_size": side * patch, "num_classes": classes}
    if rotary:
        options["num_registers"] = _shape(state, "reg_token", 3)[1] if "reg_token" in state else 0
    return options


def _shape(state: Mapping[str, Tensor], name: str, axes: int) -> tuple[int, ...]:
    """The shape of a weight. Raises: StoreError if it is missing, has another number of axes or an empty one."""
    if name not in state:
        raise StoreError(f"{name} is not among the weights; {DAMAGED}")
    shape = tuple(state[name].shape)
    if len(shape) != axes or 0 in shape:
        raise StoreError(f"{name} has shape {shape}, not {axes} axes; {DAMAGED}")
    return shape


def _check_frequencies(name: str, value: Tensor, base: float) -> None:
    """Raises: StoreError for frequencies other than base^(-2j / (d/2)), which the host computes."""
    number = value.numel()
    expected = base ** (-torch.arange(number, dtype=torch.float64) / max(number, 1))
    if value.ndim != 1 or not torch.allclose(value.double(), expected, rtol=1e-4):
        raise StoreError(f"{name} holds other frequencies than a ViT-5, whose base is {base:g}; {DAMAGED}")
