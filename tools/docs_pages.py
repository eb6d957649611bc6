"""Write the tables of this folder from the code: `python docs/make.py`. tests/test_docs.py says when that is due."""

import inspect
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from regard.lab.analysis import carry_out, markdown
from regard.measure.taxonomy import draw, places
from regard.mixers import MIXERS
from regard.models.catalog import HOSTS
from regard.projections import PROJECTIONS
from regard.store.results import Results
from regard.studies import ANALYSES, STUDIES, load_analysis
from regard.swapping.ports.timm.vit import PORTS

HERE = Path(__file__).parent
NOTE = "<!-- written by docs/make.py -->"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """Text in a typewriter face; nothing stays nothing."""
    return f"`{text}`" if text else ""


def sentence(thing: object) -> str:
    """The first sentences of a docstring, as one line."""
    return inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def mechanisms() -> str:
    """What `regard list`, `regard taxonomy` and `regard list projections` say."""
    configs = [cls() for cls in MIXERS]
    known = [
        (
            code(type(config).__name__),
            code(config.card.formula),
            code(config.card.complexity),
            ", ".join(sorted(config.masks)) or "none",
            "yes" if config.cross else "",
            config.card.source,
        )
        for config in configs
    ]
    sorted_out = [
        (code(row["mechanism"]), row["strategy"], row["experts"], row["number"], row["construction"], row["topology"])
        + (row["conditions"],)
        for row in places()
    ]
    return f"""{NOTE}
# Mechanisms

All of them with default arguments; `regard card NAME` prints the options of one. Masks: which ones it applies exactly;
others are refused. Cross: also defined for keys and values of another sequence (`config.build_cross(site)`).

{table(("name", "formula", "cost", "masks", "cross", "source"), known)}

N tokens, C channels, d channels a head. m landmarks (or rows, regions, clusters), k chosen keys or blocks, n tokens a
block, w side of a window, r random features or stride, s experts a query, N_k taps, N_s samples, S^2 regions.

## How they save work

The table is MiTA's Table 1, taken on to every mechanism: attention seen as a layer that a query passes through, whose
weights are made from keys and values (an expert). Conditions: what the making and finding of experts depends on.
`regard taxonomy` prints it and filters it, such as `regard taxonomy --strategy route --conditions position`.

![Mechanisms by strategy and number of experts](taxonomy.svg)

{table(("name", "strategy", "experts", "number", "construction", "topology", "conditions"), sorted_out)}

## Static keys

`SKA` and `CSKA` put learned keys in the place of projected ones. In a trained model they start from the host's own:

```python
import copy
from regard import SKA, Softmax, calibrate, create_model, freeze_keys, swap

host = create_model("deit_tiny_patch16_224", None, pretrained=True).eval()
teacher = swap(copy.deepcopy(host), Softmax())
student = swap(host, SKA(init="calibrate"))
calibrate(student, teacher, [images])  # the teacher's mean keys; on one image the student then equals it
freeze_keys(student, images)  # constants for the grid of these images, for export
```

On another grid keys are resampled (`resize="interpolate"`), or the trained grid is laid over it as windows
(`resize="window"`).

## Projections

How queries, keys and values are made. Every mechanism on heads takes each: `SKA(projection=FSNE(code=8))`.

{table(("name", "what"), [(code(cls.__name__), code(_first_line(cls))) for cls in PROJECTIONS])}
"""


def _first_line(thing: object) -> str:
    return inspect.cleandoc(thing.__doc__ or "").split("\n")[0]


def hosts() -> str:
    """Regard's own models and the ports, with how to use other libraries' models."""
    own = [(code(name), sentence(make)) for name, make in HOSTS.items()]
    ports = [(code(port.__name__), sentence(port)) for port in PORTS]
    return f"""{NOTE}
# Hosts

`regard.list_models()` has every name that `create_model` takes: Regard's own hosts, which no library has, and then all
of timm. `swap(model, mixer)` takes any model with attention that a port knows, also of torchvision and transformers.
`regard swap-check NAME 'SKA()'` shows what would be kept, what is new and which layers are refused.

## Own models

{table(("name", "what"), own)}

`regard.models.timm_registry()` adds them to timm's registry, so that `timm.create_model("regard_vit_desk")` makes them.
Nothing is registered before that call.

## Ports

What is known about the attention of each library. Layers that no port knows are left alone, and a swap that matches
none is an error.

{table(("port", "which attention"), ports)}

## torchvision and Hugging Face

`swap(torchvision.models.vit_b_16(), SKA())` works in place. Models of transformers (>= 5.9, the
extra `hf`) are swapped the same way; `regard.save_pretrained` and `regard.from_pretrained` write and read
them with the swap, since transformers itself saves neither the mechanism nor its code.

## Attention in a ResNet

A ResNet has no attention to swap. `attend` puts it into the residual blocks of one of timm or torchvision, also inside
a larger model such as a detector. Weights and their names stay, and training goes on from pretrained ones:

```python
import torch
from torchvision.models import resnet18
from regard import Factors, attend

model, images = resnet18().eval(), torch.randn(1, 3, 160, 224)
plain = model(images)
attend(model, Factors(terms="0110"), stages=(3, 4))
print(torch.equal(model(images), plain))  # True: attention begins behind a factor of zero
```

`deformable=True` makes the 3x3 convolution before it deformable, which computes the same up to rounding at first.
`swap`, `remove` and `restore` then take the attended model as any other.

## Training

A swapped model trains under DDP and FSDP2, alone or in Lightning, accelerate and the trainers of Hugging Face.
`torch.optim.AdamW(regard.param_groups(model, weight_decay=0.05, lr=1e-3))` spares what should not decay and gives the
offsets of deformable convolutions a tenth of the rate.

## What a swap leaves out

Dropout of attention weights, with a warning: no mechanism here has it. `output_attentions=True` of transformers is
refused; `regard.capture` collects maps.

## Adapters, pruning and export

A swap takes the host's weights from where its library has them. Where something is around them (LoRA, pruning, weight
norm, quantisation) it refuses, so that nothing is lost: merge it first, or add it after the swap. LoRA of PEFT reaches
the fused queries, keys and values of a swapped model by `target_parameters=["qkv.weight"]`, those of Hugging Face's
models by `target_modules=["qkv.q", "qkv.v"]`. Tools that look for `nn.Linear`, such as dynamic quantisation, leave
fused queries, keys and values as they are.

`torch.export.export` and `torch.onnx.export(..., dynamo=True)` take swapped models with one image size, and any batch
where its dimension is said to be dynamic (ViT3: one batch alone; DynamicConv: up to a bound that you give, such as
`Dim("batch", max=64)`); every mechanism was compared with ONNX Runtime. Compiled kernels (`REGARD_NATIVE=1`) stay out
of an exported graph. `torch.fx`, as in torchvision's feature extraction, takes a swapped layer as one node:
`tracer_kwargs={{"leaf_modules": [Port]}}`, with `from regard.swapping.layer import Port`.
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
in Deep Networks*. `regard study show NAME --scale desk` prints rows, seeds, what is done and the hours here.

{table(("name", "title", "source", "trains"), rows)}

Scales: `smoke` proves the road in minutes and judges nothing; `desk` is sized for two CPU cores and some hours; `paper`
is the paper's recipe, for a cluster. `--dry-run` builds every row of any scale and trains none.

Figure 7 of MiTA is not built: no source that these studies were made from says what it shows.
"""


def errata() -> str:
    """What `regard study export errata --format md` prints."""
    with tempfile.TemporaryDirectory() as folder:
        return markdown(carry_out(load_analysis("errata"), Results(Path(folder)), "smoke"))


PAGES = {"mechanisms.md": mechanisms, "hosts.md": hosts, "studies.md": studies, "errata.md": errata}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
    draw(places(), HERE / "taxonomy.svg")
