"""Write the pages of docs/ that follow from the code: `make generated`.

tests/test_docs.py fails when they are stale.
"""

import inspect
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from regard.lab.engine.analysis import markdown, run_analysis
from regard.lab.results.results import Results
from regard.lab.studies import ANALYSES, STUDIES, load_analysis
from regard.measure.taxonomy import taxonomy_rows, write_picture
from regard.mixers import MIXERS
from regard.mixers.shared.executions import RULES
from regard.models.catalog import HOSTS, OTHER_HOSTS
from regard.projections import PROJECTIONS
from regard.swapping.ports import PORTS
from tools.generate import between, write

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- written by tools/docs_pages.py: run `make generated`, do not edit -->"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """Text as code; empty text stays empty."""
    return f"`{text}`" if text else ""


def summary(documented: object) -> str:
    """The first paragraph of a docstring, as one line."""
    return inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def first_line(documented: object) -> str:
    """The first line of a docstring."""
    return inspect.cleandoc(documented.__doc__ or "").split("\n")[0]


def mechanisms() -> str:
    """The tables of `regard list`, `regard taxonomy` and `regard list projections`."""
    configs = [cls() for cls in MIXERS]
    names = {cls.__name__ for cls in MIXERS}
    mechanism_rows = [
        (code(type(config).__name__), code(config.card.formula), code(config.card.complexity),
         ", ".join(sorted(config.masks)) or "none", "yes" if config.cross else "", "yes" if config.depth else "",
         config.card.source)
        for config in configs
    ]  # fmt: skip
    strategy_rows = [
        (code(row["mechanism"]), row["strategy"], row["experts"], row["number"], row["construction"], row["topology"])
        + (row["conditions"],)
        for row in taxonomy_rows()
    ]
    execution_rows = [
        (code(mechanism) if mechanism in names else mechanism, code(rule.execution), rule.when)
        for mechanism, rules in RULES.items()
        for rule in rules
    ]
    return f"""{NOTE}
# Mechanisms

All mechanisms with their default options; `regard card NAME` prints the options of one. Masks: the masks that it
applies exactly; it refuses others. Key bias: only a bias with one row, the same for all queries, so no position biases.
Cross: whether keys and values may come from another sequence (`config.build_cross(site)`). Frames: whether it takes
clips and volumes, `Grid(14, 14, depth=8)`: 8 frames or slices of 14x14 tokens, one after the other. Its landmarks and
windows are then boxes, as in `MiTA(m=(2, 7, 7))`: a number m gives those whose sides, in tokens, are most alike, and
blocks and windows without a third side are of one frame. `dwc` and `local` are then convolutions in three dimensions.

{table(("name", "formula", "cost", "masks", "cross", "frames", "source"), mechanism_rows)}

N: tokens. C: channels. d: channels of a head. m: landmarks (or rows, regions, clusters). k: chosen keys or blocks.
n: tokens of a block. w: side of a window. r: random features, or a stride. s: experts of a query. N_k: positions of a
convolution kernel. N_s: sampling points. S^2: regions.

## How they save work

This is MiTA's Table 1, extended to every mechanism. It describes attention as a layer that a query passes through and
whose weights (an expert) are computed from keys and values. Conditions: what the construction and the choice of experts
depend on. `regard taxonomy` prints and filters this table, as in
`regard taxonomy --strategy route --conditions position`.

![Mechanisms by strategy and number of experts](taxonomy.svg)

{table(("name", "strategy", "experts", "number", "construction", "topology", "conditions"), strategy_rows)}

## Which execution runs when

Some mechanisms have several executions, with the same result and different speed and memory; `execution=` of their
operator functions names one. "auto", the default, takes the first of its rows that holds:

{table(("mechanism", "execution", "runs"), execution_rows)}

## Static keys

`SKA` and `CSKA` replace projected keys by learned ones. In a trained model the learned keys start from the host's own:

<!-- run here after: import torch; images = torch.randn(2, 3, 224, 224) -->
<!-- run here with: `pretrained=True` as `pretrained=False` -->
```python
import copy
from regard import SKA, Softmax, calibrate, create_model, freeze_keys, swap

host = create_model("deit_tiny_patch16_224", pretrained=True).eval()
teacher = swap(copy.deepcopy(host), Softmax())
student = swap(host, SKA(init="calibrate"))
calibrate(student, teacher, [images])  # keys become the teacher's mean keys over these images
freeze_keys(student, images)  # keys become constants for the grid of these images, for export
```

With one image the calibrated student gives the teacher's output. On another grid the keys are resampled
(`resize="interpolate"`), or the grid is cut into windows of the trained size (`resize="window"`).

## Projections

A projection computes queries, keys and values. Every mechanism with heads accepts any: `SKA(projection=FSNE(code=8))`.

{table(("name", "what"), [(code(cls.__name__), code(first_line(cls))) for cls in PROJECTIONS])}
"""


def counted_ports() -> str:
    """The table of docs/ports.json, which tools/count_ports.py writes, with a line of totals."""
    stored = json.loads((DOCS / "ports.json").read_text())
    states = ("served", "re-initialised", "partly", "not compared", "refused")
    rows = [
        [code(family), *(str(row[state]) for state in states), row["reason"]]
        for family, row in stored["families"].items()
    ]
    totals = [str(sum(row[state] for row in stored["families"].values())) for state in states]
    return table(("family of timm " + stored["timm"], *states, "why not"), [*rows, ["all", *totals, ""]])


def counted_mechanisms() -> str:
    """How many names of timm take each mechanism, as tools/count_ports.py wrote into docs/ports.json."""
    stored = json.loads((DOCS / "ports.json").read_text())["mechanisms"]
    rows = [(code(name), *map(str, row.values()), str(sum(row.values()))) for name, row in stored.items()]
    return table(("mechanism", "exactly", "biases dropped", "together"), rows)


def compared_libraries() -> str:
    """The table of docs/libraries.json, which tools/compare_libraries.py writes: one line for each attention class."""
    stored = json.loads((DOCS / "libraries.json").read_text())
    lines: dict[tuple[str, str, str], list[dict]] = {}
    for row in stored["compared"]:
        classes, ports = (", ".join(map(code, row[part])) for part in ("classes", "ports"))
        lines.setdefault((f"{row['library']} {stored['versions'][row['library']]}", classes, ports), []).append(row)
    rows = [
        [*key, "; ".join(row["model"] for row in rows), f"{max(row['softmax'] for row in rows):.0e}",
         f"{min(row['uniform'] for row in rows):.0e}"]
        for key, rows in lines.items()
    ]  # fmt: skip
    return table(("library", "attention", "port", "small models compared", "softmax", "uniform"), rows)


def counted_classes() -> str:
    """How many attention classes of each library are served, as a sentence."""
    stored = json.loads((DOCS / "libraries.json").read_text())
    compared, counts = stored["compared"], []
    for library in stored["versions"]:
        kinds = {kind for row in compared if row["library"] == library for kind in row["classes"]}
        counts.append(f"{len(kinds)} of {library}")
    return f"Served are these attention classes: {', '.join(counts[:-1])} and {counts[-1]}."


def mechanisms_of_classes() -> str:
    """How many attention classes of other libraries take each mechanism, as tools/compare_libraries.py wrote."""
    stored = json.loads((DOCS / "libraries.json").read_text())["mechanisms"]
    rows = []
    for name, libraries in stored.items():
        own = libraries["transformers"]
        others = [row for library, row in libraries.items() if library != "transformers"]
        rest = (sum(row[state] for row in others) for state in own)
        rows.append((code(name), *map(str, own.values()), *map(str, rest)))
    heads = ("transformers: exactly", "biases dropped", "the others: exactly", "biases dropped")
    return table(("mechanism", *heads), rows)


def left_attention() -> str:
    """The attention of other libraries that a swap leaves as it is, with the reason."""
    stored = json.loads((DOCS / "libraries.json").read_text())
    return table(("attention", "why"), [(code(row["class"]), row["reason"]) for row in stored["left"]])


def hosts() -> str:
    """Regard's own models, the ports, and how to use models of other libraries."""
    own = [(code(name), summary(make)) for name, make in (HOSTS | OTHER_HOSTS).items()]
    ports = [(code(port.__name__), summary(port)) for port in PORTS]
    return f"""{NOTE}
# Hosts

A host is a model that gets a mechanism. `regard.list_models()` lists every name that `create_model` takes: Regard's
own models first, then all of timm. `create_model(name)` is the host with its own attention, `create_model(name, SKA())`
the same with static keys; `remove(model)` takes attention out. `swap(model, mixer)` takes any model with attention that
a port supports, also models of torchvision, transformers, open_clip, diffusers and MONAI. `regard swap-check NAME
'SKA()'` shows which weights a swap keeps, which are new, and which layers it refuses.
[Your own model](your-own-model.md) gets a port of about ten lines.

## Own models

{table(("name", "what"), own)}

`regard.register_timm()` adds them to timm's registry; then `timm.create_model("regard_vit_desk")` works too. Nothing is
registered before this call.

## Ports

A port tells Regard how an attention class works. A swap leaves layers without a port as they are; a swap that finds no
layer at all is an error.

{table(("port", "which attention"), ports)}

Some layers of timm do more than attention: they pool queries or keys, convolve, or have values wider than keys. There
the mechanism gets the host's own queries, keys and values, and the host's modules before and after it stay. `plan_swap`
refuses what does not fit: `projection=`, `dwc=`, `gate=` and `heads=`, mechanisms with a layer of their own, and, where
there are fewer queries than keys or the reverse, mechanisms without cross-attention; `where=` leaves such layers out.

No mechanism computes VOLO's outlook attention, DaViT's channel attention, or the attention of CoaT and SwiftFormer. A
swap leaves these layers as they are. With `swap(model, mixer, reinitialise=True)` it replaces them too: weights that
the mechanism can use stay, the others are new, and what the model has learned there is lost, so that it has to be
trained. The plan marks each such layer as re-initialised, with the weights that are kept, new and dropped; `restore`
brings all of them back. `create_model(name, mixer, reinitialise=True)` does the same, and `--reinitialise` of `regard
swap-check` and `regard advise`. A plan of layers that has the full name of such a layer replaces it, too, and warns: so
`swap`, `distill` and `finetune --plan` take what `advise` wrote.

Counted in names of timm's models that have attention (`python tools/count_ports.py`). Served: a swap takes every
attention, class attention apart, and a small model with the same class and parameters gives the same logits after a
swap to softmax (to `XCA` where the host attends between channels, to `PVT` where it reduces keys). Re-initialised: the
same with `swap(..., reinitialise=True)`, but no mechanism computes some of its attention. Partly: other attention in
the model stays. Not compared: a swap takes every attention, but no small model has this one. Refused: no layer can be
swapped.

{counted_ports()}

Hosts such as Swin, BEiT, MaxViT and LeViT add biases of relative positions to their logits. Mechanisms that score each
pair of tokens add them too; others are refused there, since the output would change. With `host_bias="drop"`, as in
`swap(model, MiTA(m=25, k=25, host_bias="drop"))`, the biases, and the masks of shifted windows with them, are left out,
and the model has to be trained again; the plan and a warning say so. Names of timm whose every attention takes a
mechanism as it is, and with the biases dropped (tried in small models with the same attention):

{counted_mechanisms()}

## torchvision, Hugging Face, open_clip, diffusers and MONAI

`swap(torchvision.models.vit_b_16(), SKA())` works in place, and so does a swap in a model of transformers (>= 5.9, the
extra `hf`), open_clip, diffusers or MONAI: [swap in five minutes](swap.md). Save and load models of transformers with
`regard.save` and `regard.load`: transformers itself does not save the mechanism. Of models of
open_clip, diffusers and MONAI, save the state dict, and repeat the swap before you load it.

Compared in float64 with all parameters drawn at random (`python tools/compare_libraries.py`): the largest difference of
the outputs after a swap to softmax, relative to the largest output, and, so that this means something, the least change
by uniform attention. `SamVisionAttention` computes its softmax in float32.
{counted_classes()}

{compared_libraries()}

Attention classes that take a mechanism as it is, and with position biases dropped (counted in these small models, with
numbers that fit any number of tokens):

{mechanisms_of_classes()}

A swap leaves other attention of these libraries as it is, also cross-attention of diffusers. ViT-MAE, whose tokens are
shuffled, is refused with the reason.

{left_attention()}

## Video and volumes

VideoMAE, ViViT, V-JEPA 2 and torchvision's video Swin take the mechanisms that take frames, see
[mechanisms](mechanisms.md). In TimeSformer each layer attends in time or in space, and takes any.

```python
from regard import MiTA, swap
from transformers import VideoMAEConfig, VideoMAEModel

model = VideoMAEModel(VideoMAEConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3)).eval()
swap(model, MiTA(m=(4, 7, 7), k=64))  # landmarks: 4 over the 8 frames of tokens, 7 x 7 over the 14 x 14 of each
```

The slices of a volume are such frames: MONAI's ViT, UNETR and SwinUNETR take the same mechanisms. Pass a volume as
`example=`, since these models do not name the size of their inputs.

## Attention in a ResNet

A ResNet has no attention to swap. `attend` adds attention to the residual blocks of a ResNet of timm or torchvision,
also inside a larger model such as a detector. Weights and their names stay, so pretrained weights can be used:

```python
import torch
from torchvision.models import resnet18
from regard import Factors, attend

model, images = resnet18().eval(), torch.randn(1, 3, 160, 224)
plain = model(images)
attend(model, Factors(terms="0110"), stages=(3, 4))
print(torch.equal(model(images), plain))  # True: attention starts with a factor of zero
```

`deformable=True` also makes the 3x3 convolution before the attention deformable; at first its output stays the same, up
to rounding. `swap`, `remove` and `restore` work on this model as on any other.

## What works after a swap

Each cell is a test with small models (`tests/swapping/test_matrix.py`).

| after a swap | timm ViT | timm Swin | timm XCiT | torchvision ViT | Hugging Face ViT |
| --- | --- | --- | --- | --- | --- |
| `torch.compile(fullgraph=True)` | yes | yes | yes | yes | yes |
| `torch.export` | yes | yes | yes | yes | yes |
| ONNX | yes | yes | yes | yes | yes |
| gradient checkpointing | yes | yes | yes | yes | yes |
| autocast | yes | yes | yes | yes | yes |
| moving average of the weights | yes | yes | yes | yes | yes |
| `copy.deepcopy` | yes | yes | yes | yes | yes |
| pickle, `torch.save(model)` | yes | yes | yes | yes | yes |
| state dicts, both ways | yes | yes | yes | yes | yes |
| another image size | yes | yes | yes | refused: Wrong image height | yes |
| features of inner layers | yes | yes | yes | yes | yes |
| accelerate | yes | yes | yes | yes | yes |
| `transformers.Trainer` | yes | yes | yes | yes | yes |
| `lightning.Trainer` | yes | yes | yes | yes | yes |
| int8 by `quantize_dynamic` | yes | yes | yes | yes | yes |
| int8 by torchao | yes | yes | yes | yes | yes |
| DDP and FSDP2 on two processes | yes | yes | yes | yes | yes |

The message about the image height is torchvision's own. After a swap, a quantised layer runs but cannot be swapped or
restored any more; a `SwapError` says so. `regard.save` saves mechanisms too.

## Training

A swapped model trains under DDP and FSDP2, alone or in Lightning, accelerate and the trainers of Hugging Face. On a
CPU give each process at least two images of an XCiT, swapped or not: with one, `BatchNorm2d` of PyTorch 2.15 gives its
patch embedding wrong gradients.
`torch.optim.AdamW(regard.lab.param_groups(model, weight_decay=0.05, lr=1e-3))` leaves out weight decay where it should
not be, and gives the offsets of deformable convolutions a tenth of the learning rate.

## Threads, optimizers and hooks

A swapped model may run in several threads at once, with inputs of other sizes: no thread reads the grid of another.
With activation checkpointing, a layer that runs again in the backward pass gets the grid of its own forward pass.
Where that cannot be known, a `GridError` says so: a layer that runs alone in another thread than its model, and
passes of two sizes that wait for their backward pass at once while the patch embedding is frozen. A block that is
compiled by itself inside of checkpoints needs each pass to run backward before one of another size begins; a model
compiled as a whole does not.

`swap`, `restore` and `retune` happen completely or not at all: after any exception, Ctrl-C too, the model is as it
was. No other thread may use the model meanwhile. Parameters that are kept in full stay the same objects, so an
optimizer made before goes on with them; `site.new_objects` of a plan's sites names those to add. Hooks move to the
new layer, and their handles still remove them; `site.lost_hooks` and a warning name hooks of parts that the new layer
does not have. A model in DDP or FSDP is refused (swap it before you wrap it), and so are tied parameters that a
mechanism keeps only in part.

## What a swap does not support

Dropout of attention weights: no mechanism here has it, and a swap warns. `output_attentions=True` of transformers, as
an argument or in the configuration: the first swapped layer refuses it; use `regard.capture` to collect attention maps.
Layers that `torch.compile` compiles may not see it, and the output then lacks their weights. `set_input_size` of timm,
where it gives Swin or BEiT other windows or a ViT other patches, and any other exchange of the patch embedding:
`restore`, change the model, then swap. Elsewhere a mechanism follows the size of each image, and one with learned
parameters for its grid resamples them.

## Adapters, pruning and export

The linear projections of a swapped layer are plain `nn.Linear` modules under the host's names, so LoRA of PEFT finds
them with the same one-word `target_modules` as before the swap (torchvision's fused matrix is `qkv`; in a path, such as
`blocks.0.attn.regard.qkv`, the word `regard` is new), and dynamic quantisation and torchao change them. For LoRA before
a swap: adapters around projections that the new layer has in full stay, as the same modules; a plan lists them as
`site.adapters`. Those around projections that are replaced, such as fused queries, keys and values where the mechanism
has no keys, are `site.lost_adapters`, and the swap is refused; nothing is merged in silence. A linear layer of your own
with another forward, inside an attention of your own, is refused too, except where the port keeps it as a module;
learned parameters that the new layer has no place for are named by a warning. Saved adapters have the names of modules:
load those from before a swap before you swap. A swap refuses weights that are pruned, parametrised (weight norm) or
quantised; undo this first, or do it after the swap.

`torch.export.export` and `torch.onnx.export(..., dynamo=True)` take swapped models with one image size, and with any
batch size if its dimension is dynamic (ViT3: one batch size only; DynamicConv: up to a maximum that you give, such as
`Dim("batch", max=64)`, which its map and kernel limit, and one batch size only where its map has fewer positions than
the kernel has taps). Every mechanism was compared with ONNX Runtime. Height and width may be free too, in a model
that takes images of any size: with softmax, MiTA and Agent (both with landmarks as `m=(7, 7)`, whose number alone would
be laid by the shape of the image; `regard.retune(model, m=(7, 7))` changes a trained model), SKA, which resamples its
keys, TopK and Linear: `export --free-size`. Most of timm's ViTs take one size; such a model starts from
`'vit_tiny_patch16_224(dynamic_img_size=True)'`, which takes the same `--weights`. Exported graphs contain PyTorch's
operators only, not the compiled kernels. TorchScript is refused: `torch.jit.script` always, `torch.jit.trace` where the
grid of the tokens follows from the image. For `torch.fx`, as in torchvision's feature extraction, a swapped layer is
one node: `tracer_kwargs={{"leaf_modules": [Port]}}`, with `from regard import Port`.
"""


def studies() -> str:
    """All studies and analyses."""
    rows = [
        (code(name), title, source, "yes" if name in STUDIES else "")
        for name, (_, title, source) in {**STUDIES, **ANALYSES}.items()
    ]
    return f"""{NOTE}
# Studies and analyses

MiTA: *Mixture-of-Top-k Attention*. SKA: *Static Key Attention in Vision*. SNE: *Rethinking Query, Key and Value
Embedding in Vision Transformer under Tiny Model Constraints*. ESA: *An Empirical Study of Spatial Attention Mechanisms
in Deep Networks*. `regard study show NAME --scale desk` prints the rows, the seeds, the finished runs and an estimate
of the hours on this machine.

{table(("name", "title", "source", "trains"), rows)}

Scales: `smoke` takes minutes, shows that everything runs and tests no claim; `desk` takes hours on two CPU cores;
`paper` is the paper's recipe, for a cluster. `--dry-run` builds every row of a scale, and trains it for
one step on random samples.

Figure 7 of MiTA, "Visual comparison of related attention methods", has no study.
"""


def errata() -> str:
    """The output of `regard study export errata --format md`."""
    with tempfile.TemporaryDirectory() as folder:
        return markdown(run_analysis(load_analysis("errata"), Results(Path(folder)), "smoke"))


def half_the_time() -> str:
    """The guide with the plans of a real network, from the records of the study `focus_vit`."""
    rows = []
    for record in sorted((DOCS / "results" / "focus_vit").glob("*.json")):
        for found in json.loads(record.read_text())["budgets"].values():
            for pixels, _, plan, share, step, correlation, low, high, iou, *_ in found["rows"]:
                kept = f"{correlation:.3f} [{low:.3f}, {high:.3f}]"
                rows.append((str(pixels), plan, f"{share:.2f}x", step, kept, f"{iou:.2f}"))
    heads = ("pixels", "attention", "time", "", "correlation", "IoU")
    page = (DOCS / "half-the-time.md").read_text(encoding="utf-8")
    return between(page, "<!-- generated: focus_vit -->", table(heads, rows))


PAGES = {
    "mechanisms.md": mechanisms, "hosts.md": hosts, "studies.md": studies, "errata.md": errata,
    "half-the-time.md": half_the_time,
}  # fmt: skip


def main() -> None:
    """Write every page that differs, and the picture."""
    for name, page in PAGES.items():
        write(DOCS / name, page())
    write_picture(taxonomy_rows(), DOCS / "taxonomy.svg")


if __name__ == "__main__":
    main()
