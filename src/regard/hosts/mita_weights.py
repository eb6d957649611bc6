"""The checkpoints that MiTA's authors published (repository QishuaiWen/MiTA), read into a timm model with MiTA.

Their files are training checkpoints: model, optimizer and the `argparse.Namespace` of the run. They are read with
`weights_only`, so that nothing in them is executed. Keys are timm's but for the convolution (`attn.dwc`) and the gate,
which is a fourth part of the projection (`attn.qkvg`).
"""

import argparse
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import ConfigError, StoreError, UnsupportedError
from regard.mixers.mita import MiTA

from .swap import create_model

HEAD_WIDTH = 64
"""Of every DeiT."""


def load_mita(path: str | os.PathLike[str], *, m: int = 25, k: int = 25, heads: int = 0) -> nn.Module:
    """A DeiT with MiTA from a checkpoint of its authors, in evaluation mode, on the CPU.

    Sizes, convolution and gate are read from the weights. m, k: landmarks and keys of an expert, which no weight tells;
    the published models have 25 and 25. heads: 0 = heads of 64 channels, as in every DeiT.
    Raises: StoreError for a file that cannot be read or is no such checkpoint; UnsupportedError for their ViT-5, which
    timm does not have; ConfigError for numbers that do not fit.
    """
    state = read_checkpoint(path)
    config, state = convert(state, m=m, k=k)
    width, channels, patch, _ = state["patch_embed.proj.weight"].shape
    if not heads and width % HEAD_WIDTH:
        raise ConfigError(f"width {width} is not a multiple of {HEAD_WIDTH}; pass heads= as the model was trained")
    side = round((state["pos_embed"].shape[1] - 1) ** 0.5)
    if side * side + 1 != state["pos_embed"].shape[1]:
        raise StoreError(f"{path}: {state['pos_embed'].shape[1]} positions are no square and one class token")
    model = create_model(
        "vit_tiny_patch16_224",
        config,
        embed_dim=width,
        depth=1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        num_heads=heads or width // HEAD_WIDTH,
        patch_size=patch,
        in_chans=channels,
        img_size=side * patch,
        num_classes=len(state["head.bias"]),
    )
    wrong = model.load_state_dict(state, strict=False)
    if wrong.missing_keys or wrong.unexpected_keys:
        raise StoreError(f"{path} is no MiTA-DeiT: missing {wrong.missing_keys}, unexpected {wrong.unexpected_keys}")
    return model.eval()


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights in a training checkpoint; nothing but tensors, plain values and a Namespace is unpickled.

    Raises: StoreError if it cannot be read or holds no weights.
    """
    if not Path(path).is_file():
        raise StoreError(f"there is no file {path}; download the checkpoint and pass its place")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise StoreError(f"cannot read {path} without executing what it contains: {error}") from error
    state = content.get("model", content) if isinstance(content, Mapping) else content
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise StoreError(f'{path} is no checkpoint with weights under "model"')
    return {key.removeprefix("module."): value for key, value in state.items()}


def convert(state: Mapping[str, Tensor], *, m: int = 25, k: int = 25) -> tuple[MiTA, dict[str, Tensor]]:
    """The authors' weights under Regard's names, and the mechanism that they are of.

    Raises: UnsupportedError for weights of ViT-5, StoreError for weights of something else.
    """
    foreign = [key for key in state if key.startswith("reg_token") or ".gamma_" in key or ".q_norm" in key]
    if foreign:
        raise UnsupportedError(f"these are weights of a ViT-5 ({foreign[0]}); only those of a DeiT can be read")
    if "patch_embed.proj.weight" not in state or "pos_embed" not in state or "head.bias" not in state:
        raise StoreError(
            "these are no weights of a DeiT: patch_embed.proj.weight, pos_embed and head.bias must be there"
        )
    made: dict[str, Tensor] = {}
    dwc, gate = 0, False
    for key, value in state.items():
        if found := re.fullmatch(r"(blocks\.\d+\.attn\.)qkvg\.(weight|bias)", key):
            width = len(value) // 4
            made[f"{found[1]}qkv.{found[2]}"] = value[: 3 * width].clone()
            made[f"{found[1]}regard.gate.{found[2]}"] = value[3 * width :].clone()
            gate = True
        elif found := re.fullmatch(r"(blocks\.\d+\.attn\.)(dwc\.(?:weight|bias))", key):
            made[f"{found[1]}regard.{found[2]}"] = value
            dwc = value.shape[-1] if value.ndim == 4 else dwc
        else:
            made[key] = value
    return MiTA(m=m, k=k, preset="official", dwc=dwc, gate=gate), made
