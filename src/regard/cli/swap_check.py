"""`regard swap-check MODEL MECHANISM`: what a swap does to each attention layer of a model, and whether the model runs.

With images: how far each layer's output and the model's change.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .given import Context, expand_groups, refuse_given
from .imports import read_mixer
from .run_options import RootOption, use_data
from .sizes import short_grid
from .tables import AsJson, show, wrap_notes
from .user_model import (
    JudgeOption,
    ModelArgument,
    ModelOptions,
    OptionalData,
    Reinitialise,
    progress,
    read_images,
    read_model,
)

if TYPE_CHECKING:
    from regard.advice.fidelity import AnswerChange
    from regard.core import MixerConfig


ROUNDING = 1e-3
"""Relative change of an output in 32 bits that rounding alone does not reach."""


@expand_groups
def swap_check(
    context: Context,
    model: ModelArgument,
    mixer: Annotated[str, typer.Argument(metavar="MECHANISM", help="A mechanism, such as 'MiTA(m=25, k=25)'.")],
    where: Annotated[str, typer.Option(help="Only layers whose name matches, such as 'blocks.[0-3].*'.")] = "*",
    reinitialise: Reinitialise = False,
    data: OptionalData = None,
    images: Annotated[int, typer.Option(min=16, help="Images to use, with --data.")] = 64,
    judge: JudgeOption = "",
    *,
    options: ModelOptions,
    data_root: RootOption = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Swap a mechanism into a model; show which weights are kept, new or dropped, and how much the output changes."""
    import torch

    from regard.mixers.softmax import Softmax
    from regard.swapping.swap import plan_swap

    if data is None:
        refuse_given(context, ("images", "judge"), "needs --data, a folder of images")
    use_data(data_root)
    extra = options.extra
    config = read_mixer(mixer, extra)
    torch.manual_seed(0)
    user = read_model(model, options, extra, judge)
    if data is not None:
        _fidelity(user, config, where, reinitialise, data, images, as_json)
        return
    host = user.network
    plan = plan_swap(host, config, where, user.example, user.ports, reinitialise=reinitialise)
    image = torch.randn(user.example.shape)
    rows = [_row(site) for site in plan.sites]
    with torch.no_grad():
        before = host(image)
        parameters = sum(p.numel() for p in host.parameters())
        after = plan.apply()(image)
    change, finite = _change(before, after)
    total = sum(p.numel() for p in host.parameters())
    if as_json:
        show([row | {"change": change, "parameters before": parameters, "parameters": total} for row in rows], True)
        return
    table = [
        {"layer": site.name, "port": row["port"], "grid": short_grid(site.layer.mixer.site.grid)}
        for site, row in zip(plan.sites, rows, strict=True)
    ]
    notes = [
        f"{len(rows)} layers, and the model runs; parameters {parameters:,} -> {total:,}",
        "relative change of the output: "
        + ("not known, as it has other shapes now (boxes)" if change is None else f"{change:.3g}")
        + ("" if finite else "; the output is not finite"),
    ]
    same = config == Softmax() and not reinitialise and not any(row["new"] or row["dropped"] for row in rows)
    if same and change is not None and not change < ROUNDING:
        notes.append(
            "all weights are kept, so Softmax() should change nothing but rounding: the port does not compute what "
            "these layers do, or their attention is not softmax"
        )
    show(table, notes=wrap_notes([*_weights(rows), *notes]))


def _change(before: Any, after: Any) -> tuple[float | None, bool]:
    """The relative change of all tensors of an output together, None where shapes differ; whether all is finite."""
    from torch.utils._pytree import tree_leaves

    old, new = ([part for part in tree_leaves(output) if hasattr(part, "shape")] for output in (before, after))
    finite = all(bool(part.isfinite().all()) for part in new)
    if [part.shape for part in old] != [part.shape for part in new]:
        return None, finite
    pairs = list(zip(old, new, strict=True))
    difference = sum((b - a).double().square().sum().item() for a, b in pairs)
    size = sum(a.double().square().sum().item() for a, _ in pairs)
    return (difference / max(size, 1e-24)) ** 0.5, finite


def _fidelity(
    user: Any, config: "MixerConfig", where: str, reinitialise: bool, data: str, number: int, as_json: bool
) -> None:
    """The table of changes for each layer alone, and for all of them."""
    from regard.advice.fidelity import Fidelity
    from regard.advice.substitutes import Substitutes
    from regard.advice.user_model import tensors

    judges = user.judges()
    pictures = read_images(user, data, number)
    with Substitutes(user.network, [config], user.example, where, user.ports, reinitialise=reinitialise) as substitutes:
        fidelity = Fidelity(substitutes, user.prepare(tensors(pictures)), judges)
        outputs = fidelity.outputs()
        alone = fidelity.alone(lambda name, _: progress(f"{name} alone"))
        layers = [name for name in substitutes.names if substitutes.choices(name)]
        together = fidelity.of_plan(dict.fromkeys(layers, config))
        refused = {name: reason for (name, _), reason in substitutes.refused.items()}
    rows = [
        {
            "layer": name,
            "output error": float(outputs[name, config].error.mean()),
            "cosine": float(outputs[name, config].cosine.mean()),
            **_scores(alone[name, config]),
        }
        for name in layers
    ]
    rows.append({"layer": "all", "output error": None, "cosine": None, **_scores(together)})
    notes = [
        f"{len(pictures)} images, no label is read. output error and cosine: of the layer's output on the inputs that "
        f"it has in the original. The output is judged as {judges[0]}; divergence: {judges[0].distance}; agreement: "
        f"{judges[0].kept}; both with 95 % intervals over images, for one layer alone, and for all",
        "right after the swap, nothing has learned: `regard distill` teaches the new layers without labels",
        *(f"{name} is left out: {reason}" for name, reason in refused.items()),
    ]
    if not user.trained:
        notes.insert(0, f"the weights of {user.label} are random: give --pretrained, a saved folder or a run")
    show(rows, as_json, notes=wrap_notes(notes))


def _scores(change: "AnswerChange") -> dict[str, float | None]:
    divergence, agreement = change.divergence, change.agreement
    return {
        "divergence": divergence.mean,
        "from": divergence.low,
        "to": divergence.high,
        "agreement %": agreement.mean,
        "from %": agreement.low,
        "to %": agreement.high,
    }


def _row(site: Any) -> dict[str, Any]:
    return {
        "layer": site.name,
        "port": type(site.layer).__name__,
        "grid": str(site.layer.mixer.site.grid),
        "kept": ", ".join(site.kept),
        "new": ", ".join(site.new),
        "dropped": ", ".join(site.dropped),
        "notes": "; ".join(site.notes),
    }


def _weights(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What happens to the weights: `kept: qkv.weight` for all layers, or `kept in a, b: ...` where layers differ."""
    lines = []
    for part in ("kept", "new", "dropped", "notes"):
        layers: dict[str, list[str]] = {}
        for row in rows:
            layers.setdefault(row[part], []).append(row["layer"])
        for text, names in layers.items():
            where = "" if len(names) == len(rows) else f" in {', '.join(names)}"
            if text:
                lines.append(f"{part.removesuffix('s')}{where}: {text}")
    return lines
