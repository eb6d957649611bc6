"""What works after a swap, in five families of models: each cell of the table in docs/hosts.md is a test here.

Further mechanisms and hosts: test_onnx, test_threads, test_distributed, test_adapters, test_hugging_face.
"""

import copy
import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import small_hosts
from in_onnx import agrees
from library_hosts import HuggingFaceLogits, hugging_face_logits
from regard.core import GridError, RegardError, SwapError, UnsupportedError
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.mixers.topk.topk import TopK
from regard.mixers.xca import XCA
from regard.swapping.layer import Port
from regard.swapping.swap import restore, swap
from small_hosts import HostAndInput, draw_large_weights, swin, torchvision, vit, xcit
from timm_hosts import TIMM_HOSTS
from two_processes import check_state, free_port, started, train, write_state

DOCS = Path(__file__).parents[2] / "docs" / "hosts.md"


FAMILIES: dict[str, Callable[[], HostAndInput]] = {
    "timm ViT": lambda: vit(dynamic_img_size=True),
    "timm Swin": swin,
    "timm XCiT": xcit,
    "torchvision ViT": torchvision,
    "Hugging Face ViT": hugging_face_logits,
}


def drawn(family: str, mixer: Any = None) -> HostAndInput:
    """A model of a family with weights that matter, swapped to static keys by default, in evaluation mode."""
    torch.manual_seed(0)
    model, x = FAMILIES[family]()
    draw_large_weights(swap(model, SKA() if mixer is None else mixer))
    return model.eval(), x


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


class Lossy(nn.Module):
    """A model with its loss, as trainers want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def check_trained(model: nn.Module, train: Callable[[nn.Module], object]) -> None:
    """The mechanism's own weights and the host's are trained."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    train(model)
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert any(name.endswith("operator.keys") for name in changed)
    assert any(".regard." not in name for name in changed)


# cells: each gets a swapped model and its input


def compiled(model: nn.Module, x: Tensor, folder: Path) -> None:
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def exported(model: nn.Module, x: Tensor, folder: Path) -> None:
    program = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def onnx(model: nn.Module, x: Tensor, folder: Path) -> None:
    agrees(model, x, folder / "model.onnx")


def checkpointed(model: nn.Module, x: Tensor, folder: Path) -> None:
    expected = gradients(model, x)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    elif isinstance(model, HuggingFaceLogits):
        model.train().model.gradient_checkpointing_enable()  # type: ignore[operator]
    else:
        for layer in model.encoder.layers:  # type: ignore[union-attr]
            layer.forward = partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    torch.testing.assert_close(list(gradients(model, x).values()), list(expected.values()))


def autocast(model: nn.Module, x: Tensor, folder: Path) -> None:
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        out.float().square().mean().backward()
    assert out.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(out.float(), expected, dim=-1).min() > 0.9
    assert all(value.grad.dtype == torch.float32 for value in model.parameters() if value.grad is not None)


def moving_average(model: nn.Module, x: Tensor, folder: Path) -> None:
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.0))
    average.update_parameters(model)
    draw_large_weights(model)
    average.update_parameters(model)
    torch.testing.assert_close(average.eval()(x), model(x))


def deep_copied(model: nn.Module, x: Tensor, folder: Path) -> None:
    expected, twin = model(x), copy.deepcopy(model)
    draw_large_weights(model)
    assert torch.equal(twin(x), expected)
    assert not torch.equal(model(x), expected)


def pickled(model: nn.Module, x: Tensor, folder: Path) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    whole = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for again in (pickle.loads(pickle.dumps(model)), whole):
        assert torch.equal(again(x), model(x))


def state_dicts(model: nn.Module, x: Tensor, folder: Path) -> None:
    """A plain checkpoint lacks what is new, a swapped one has it in excess; the rest is taken."""
    plain = restore(copy.deepcopy(model))
    draw_large_weights(plain)
    into_swapped = model.load_state_dict(plain.state_dict(), strict=False)
    assert into_swapped.missing_keys
    assert all(".regard." in key for key in into_swapped.missing_keys)
    assert all("qkv" in key or "_proj" in key or "bias_table" in key for key in into_swapped.unexpected_keys)
    assert list(swap(plain, SKA(), example=x[:1]).state_dict()) == list(model.state_dict())
    back = restore(copy.deepcopy(model)).load_state_dict(model.state_dict(), strict=False)
    assert back.unexpected_keys
    assert all(".regard." in key for key in back.unexpected_keys)


def other_image_size(model: nn.Module, x: Tensor, folder: Path) -> None:
    """The host's own logits at another size, with the same mechanism in its place."""
    restore(model)
    wide = torch.randn(2, 3, 64, 96) if x.shape[-2:] != (64, 96) else torch.randn(2, 3, 96, 64)
    if hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(64, 96))
    expected = model(wide)
    same = XCA() if hasattr(model, "cls_attn_blocks") else Softmax()
    swap(model, same, example=wide[:1] if hasattr(model, "set_input_size") and hasattr(model, "layers") else x[:1])
    torch.testing.assert_close(model(wide), expected, rtol=1e-3, atol=1e-4)


def features(model: nn.Module, x: Tensor, folder: Path) -> None:
    """Intermediate outputs by the family's own way."""
    expected = model(x)
    if isinstance(model, HuggingFaceLogits):
        hidden = model.model(x, output_hidden_states=True).hidden_states  # type: ignore[operator]
        assert [tuple(y.shape) for y in hidden] == [(3, 17, 32)] * 3
    elif hasattr(model, "forward_intermediates"):
        maps = model.forward_intermediates(x, intermediates_only=True)  # type: ignore[operator]
        assert all(y.ndim == 4 and y.isfinite().all() for y in maps)
    else:
        tokens = {"encoder.layers.encoder_layer_0": "first", "heads": "out"}
        extractor = create_feature_extractor(model, tokens, tracer_kwargs={"leaf_modules": [Port]})
        found = extractor(x)
        torch.testing.assert_close(found["out"], expected)
        assert found["first"].shape == (3, 17, 32)


def accelerated(model: nn.Module, x: Tensor, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def train(model: nn.Module) -> None:
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(prepared(x).square().mean())
        optimizer.step()

    check_trained(model, train)


def hugging_face_trainer(model: nn.Module, x: Tensor, folder: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    data = [{"x": image, "labels": torch.tensor(index)} for index, image in enumerate(x)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", learning_rate=0.1, disable_tqdm=True
    )
    check_trained(model, lambda model: transformers.Trainer(Lossy(model), arguments, train_dataset=data).train())


def lightning_trainer(model: nn.Module, x: Tensor, folder: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.model(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    check_trained(model, lambda model: trainer.fit(Module(model.train()), torch.utils.data.DataLoader(x, batch_size=2)))


def int8(model: nn.Module, x: Tensor, folder: Path) -> None:
    """PyTorch's dynamic quantisation, which changes fused queries and values too, and refuses what comes after."""
    expected = model(x)
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    left = [name for name, part in small.named_modules() if type(part) is nn.Linear and ".regard." in name]
    assert not left
    assert torch.nn.functional.cosine_similarity(small(x), expected, dim=-1).min() > 0.9
    with pytest.raises(SwapError, match=r"its .* is of torch\.ao.*merge or remove it first"):
        restore(small)


def torchao(model: nn.Module, x: Tensor, folder: Path) -> None:
    """Weights of 8 bits; the layer can be quantised, but not changed any more."""
    quantization = pytest.importorskip("torchao.quantization")
    expected = model(x)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    weights = [
        part.weight for name, part in model.named_modules() if isinstance(part, nn.Linear) and ".regard." in name
    ]
    assert weights
    assert all(type(weight).__module__.startswith("torchao.") for weight in weights)
    assert torch.nn.functional.cosine_similarity(model(x), expected, dim=-1).min() > 0.9
    for change in (restore, lambda model: swap(model, Softmax())):
        with pytest.raises(SwapError, match=r"its .* has weights of torchao.*merge or remove it first"):
            change(model)


CELLS: dict[str, Callable[[nn.Module, Tensor, Path], None]] = {
    "`torch.compile(fullgraph=True)`": compiled,
    "`torch.export`": exported,
    "ONNX": onnx,
    "gradient checkpointing": checkpointed,
    "autocast": autocast,
    "moving average of the weights": moving_average,
    "`copy.deepcopy`": deep_copied,
    "pickle, `torch.save(model)`": pickled,
    "state dicts, both ways": state_dicts,
    "another image size": other_image_size,
    "features of inner layers": features,
    "accelerate": accelerated,
    "`transformers.Trainer`": hugging_face_trainer,
    "`lightning.Trainer`": lightning_trainer,
    "int8 by `quantize_dynamic`": int8,
    "int8 by torchao": torchao,
}
UNTYPED = {compiled, exported, onnx}
SLOW = {onnx, hugging_face_trainer, lightning_trainer}
REFUSED = {(other_image_size, "torchvision ViT"): "Wrong image height"}
"""Cells that are refused, by the host itself here: the message."""


def cells() -> list[Any]:
    slow = {(cell, family) for cell in SLOW for family in FAMILIES} | {(compiled, "timm Swin"), (compiled, "timm XCiT")}
    return [
        pytest.param(
            cell,
            family,
            id=f"{cell.__name__}-{family}",
            marks=[pytest.mark.untyped] * (cell in UNTYPED) + [pytest.mark.slow] * ((cell, family) in slow),
        )
        for cell in CELLS.values()
        for family in FAMILIES
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("cell", "family"), cells())
def test_it_works_after_a_swap_or_says_why_not(cell: Callable[..., None], family: str, tmp_path: Path) -> None:
    model, x = drawn(family)
    if message := REFUSED.get((cell, family)):
        with pytest.raises(Exception, match=message):
            cell(model, x, tmp_path)
    else:
        cell(model, x, tmp_path)


# two processes


def four_images(family: str) -> tuple[nn.Module, Tensor]:
    """A model in float64 and a batch for two processes.

    Each gets two images: for a single one, BatchNorm on the CPU (PyTorch 2.15) takes the gradient that comes to the
    patch embedding of an XCiT, swapped or not, in another memory order than it has.
    """
    model, x = drawn(family)
    return model.double(), torch.randn(4, *x.shape[1:], dtype=torch.float64)


def work(rank: int, port: int, folder: str) -> None:
    """Train every family under DDP and under FSDP2, each process on its own images; rank 0 saves the states."""
    started(rank, port)
    for family in FAMILIES:
        for way in ("ddp", "fsdp"):
            model, x = four_images(family)
            if way == "fsdp":
                for part in model.modules():
                    if isinstance(part, Port):
                        fully_shard(part)
                fully_shard(model)
            train(DistributedDataParallel(model) if way == "ddp" else model, [x[2 * rank : 2 * rank + 2]])
            write_state(model, Path(folder) / f"{family} {way}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_every_family_as_one_does(tmp_path: Path) -> None:
    mp.spawn(work, (free_port(), str(tmp_path)), nprocs=2)
    for family in FAMILIES:
        model, x = four_images(family)
        train(model, [x])
        for way in ("ddp", "fsdp"):
            check_state(model, tmp_path / f"{family} {way}.pt")


# TorchScript


@pytest.mark.untyped
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript_is_refused_with_what_to_use_instead(family: str) -> None:
    model, x = drawn(family)
    advice = r"use torch\.export\.export, or for ONNX torch\.onnx\.export\(\.\.\., dynamo=True\)"
    with pytest.raises(UnsupportedError, match=advice):
        torch.jit.script(model)
    if family == "timm Swin":  # whose grids are those of its windows
        torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))
        return
    with pytest.raises(GridError, match=advice):
        torch.jit.trace(model, x)


# symbolic tracing takes a swapped layer as one step, as timm does with its own attention


@pytest.mark.parametrize(
    "name",
    ["vit", "vit with registers", "xcit", "swin", "rope", "dinov3", "eva", "beit", "pvt", "relpos", "swinv2",
     "twins with windows"],
)  # fmt: skip
def test_a_swapped_model_is_traced(name: str) -> None:
    """The same output as without tracing, also where the traced model is the first to run."""
    torch.manual_seed(0)
    model, x = {**small_hosts.HOSTS, **TIMM_HOSTS}[name]()
    swap(model.eval(), TopK(k=3), example=x[:1])
    last = get_graph_node_names(model)[1][-1]
    with torch.no_grad():
        traced = create_feature_extractor(model, [last])(x)[last]
        assert torch.equal(traced, model(x))


def test_another_size_of_a_traced_model_is_refused() -> None:
    """Its layers know one grid: the module that gave them others is no step of the trace."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, dynamic_img_size=False).eval()
    swap(model, TopK(k=2))
    traced = torch.fx.symbolic_trace(model.blocks)
    assert any(node.op == "call_module" and node.target == "0.attn" for node in traced.graph.nodes)
    with pytest.raises(RegardError):
        traced(torch.randn(1, 10, 192))


# the table in the docs


def test_the_docs_have_every_cell() -> None:
    text = DOCS.read_text().partition("## What works after a swap")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)[2:]]
    assert [row[0] for row in rows] == [*CELLS, "DDP and FSDP2 on two processes"]
    for row in rows:
        for family, found in zip(FAMILIES, row[1:], strict=True):
            message = REFUSED.get((CELLS.get(row[0]), family))  # type: ignore[arg-type]
            assert found == (f"refused: {message}" if message else "yes"), (row[0], family)
