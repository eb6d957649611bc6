"""`regard advise MODEL`: which attention for a model: costs and times, and with images a measured recommendation."""

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError, Extra
from regard.files.atomic import write_atomically

from .given import Context, expand_groups, refuse_given
from .imports import read_mixer
from .new_model import NewModelOptions, show_new_model
from .run_options import RootOption, find_device, path_option, use_data
from .sizes import read_size, short_grid
from .tables import AsJson, show, wrap_notes
from .user_model import (
    JudgeOption,
    ModelArgument,
    ModelOptions,
    OptionalData,
    Reinitialise,
    host_of,
    progress,
    read_images,
    read_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from regard.advice.answer import Recommendation, VerifiedPlan
    from regard.core import MixerConfig

WITH_IMAGES = (
    "budget",
    "minutes",
    "images",
    "pretrained",
    "out",
    "where",
    "reinitialise",
    "judge",
    "weights",
    "mean",
    "std",
)
"""Options that only a measured plan has."""
OF_A_MODEL = ("data", *WITH_IMAGES, "size", "batch", "dtype", "device", "seconds", "data_root", "results")
WITHOUT_IMAGES = (
    "accuracy is not measured: with --data DIR (a folder of your images, no label is read) this command finds a "
    "plan of layers within a budget and measures what it would lose"
)


@expand_groups
def advise(
    context: Context,
    model: ModelArgument = "",
    data: OptionalData = None,
    budget: Annotated[str, typer.Option(help="latency=0.7x, memory=0.5x or macs=0.6x of what the model needs.")] = "",
    minutes: Annotated[
        float,
        typer.Option(
            help="About so many for the recommendation, with --data: learning and judging are cut to fit. Costs, each "
            "change on a few images and the verification of eight plans are measured even if that takes longer."
        ),
    ] = 15.0,
    images: Annotated[int, typer.Option(min=16, help="Images to use, with --data: most to learn from.")] = 400,
    out: Annotated[Path, path_option("The folder of page, plan and state, with --data.")] = Path("advice"),
    mixers: Annotated[
        str, typer.Option(help="Mechanisms, separated by semicolons: 'SKA; MiTA(m=9, k=9); None'. Default: a choice.")
    ] = "",
    where: Annotated[str, typer.Option(help="Only layers whose name matches, with --data.")] = "*",
    reinitialise: Reinitialise = False,
    judge: JudgeOption = "",
    *,
    options: ModelOptions,
    batch: Annotated[int, typer.Option(help="Images in a batch whose time is measured.")] = 4,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp64; without --data.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[
        float, typer.Option(help="Seconds for each mechanism and each kind of layer; without --data.")
    ] = 0.3,
    new: NewModelOptions,
    data_root: RootOption = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Find the attention that suits a model: with --data a measured plan of layers, without it costs and times only.

    For a model that does not exist yet, --tokens and --dim answer from the studies and measurements of Regard.
    """
    extra = options.extra
    texts = [text for text in mixers.split(";") if text.strip()]
    if not model:
        refuse_given(context, OF_A_MODEL, "is for a MODEL that exists; leave it out")
        show_new_model(new, [read_mixer(text, extra) for text in texts], as_json)
        return
    of_new = [field.name for field in fields(NewModelOptions)]
    refuse_given(context, of_new, "describes a model that does not exist yet: leave MODEL out")
    if data is None:
        refuse_given(context, WITH_IMAGES, "needs --data, images on which a plan is measured")
        if "None" in map(str.strip, texts):
            raise ConfigError(
                "None removes attention, so that without --data there is nothing to time: with --data DIR this command "
                f"measures what that would lose; `regard cost host None --host {model}` counts what it saves"
            )
        configs = [read_mixer(text, extra) for text in texts]
        host = host_of(model, options.results)
        _costs_only(host, configs, options.size, batch, dtype, device, seconds, as_json, extra)
        return
    refuse_given(context, ("dtype", "seconds"), "is for costs and times without --data; leave it out")
    use_data(data_root)
    from regard.advice.answer import Question, answer, short_plan
    from regard.advice.distill import PLAN
    from regard.advice.page import render_advice
    from regard.advice.recommend import PAGE, recommend
    from regard.advice.search import Budget, read_budget

    question = Question(
        budget=read_budget(budget) if budget else Budget(),
        mixers=tuple(_mixer_or_none(text, extra) for text in texts),
        minutes=minutes,
        batch=batch,
        where=where,
        reinitialise=reinitialise,
    )
    user = read_model(model, options, extra, judge)
    if (place := find_device(device)).type not in ("cpu", "cuda"):
        raise ConfigError(f"times are measured on cpu or cuda, not on {place.type}: give --device cpu")
    user.network.to(place)
    result = recommend(user, read_images(user, data, images), question, folder=out, report=progress)
    write_atomically(out / PAGE, render_advice(result))
    if as_json:
        show(_rows(result, lambda plan: plan.spelling or "as it was"), as_json)
        return
    hints = [f"page: {out / PAGE}"]
    if (plan := out / PLAN).exists():
        hints.append(f"plan: {plan}; regard.swap(model, {str(plan)!r}) applies it")
        if user.trained:
            judged = ["--judge", judge] if judge else []
            judged += ["--data-root", str(data_root)] if data_root is not None else []
            command = ["regard", "distill", model, "--plan", str(plan), "--data", data, *options.command, *judged]
            hints += ["to teach it, without labels:", f"  {shlex.join(command)}"]
        command = ["regard", "explore", model, "PICTURE", "--plan", str(plan), *options.command]
        hints += ["to see where both look on a picture:", f"  {shlex.join(command)}"]
    lines = wrap_notes([*answer(result), *(f"not sure: {line}" for line in result.doubts)])
    show(_rows(result, lambda plan: short_plan(plan, result.costs)), notes=[*lines, *hints])


def _mixer_or_none(text: str, extra: Extra) -> "MixerConfig":
    """The mechanism of a text; "None" is no attention."""
    from regard.mixers.spelling import parse_mixer
    from regard.swapping.removed import Removed

    return parse_mixer(text.strip(), extra) or Removed()


def _rows(result: "Recommendation", named: "Callable[[VerifiedPlan], str]") -> list[dict[str, Any]]:
    return [
        {
            "": "*" if plan is result.best else "",
            "plan": named(plan),
            "time": round(plan.latency, 3),
            "peak memory": None if plan.memory is None else round(plan.memory, 3),
            "MACs": round(plan.macs, 3),
            "divergence": plan.divergence.mean,
            "low": plan.divergence.low,
            "high": plan.divergence.high,
            "agreement %": plan.agreement.mean,
        }
        for plan in result.plans
    ]


def _costs_only(
    model: str, configs: "list[MixerConfig]", size: str, batch: int, dtype: str, device: str, seconds: float,
    as_json: bool, extra: Extra,
) -> None:  # fmt: skip
    """Rank mechanisms for a model's attention layers by their time on this machine."""
    from regard.advice.advise import AttentionKind
    from regard.advice.advise import advise as run
    from regard.measure.bench import conditions
    from regard.mixers import MIXERS

    clock_device = str(find_device(device))
    layers: list[str] = []

    def report(kind: AttentionKind, number: int) -> None:
        windows = f"{kind.windows} windows of " if kind.windows > 1 else ""
        grid = short_grid(kind.site.grid)
        layers.append(f"{number} with {kind.site.dim} channels, {kind.site.heads} heads on {windows}{grid} tokens")
        progress(f"timing {layers[-1]}")

    results = run(model, configs or [cls() for cls in MIXERS], size=read_size(size) if size else None, batch=batch,
                  dtype=dtype, device=clock_device, seconds=seconds, report=report, extra=extra)  # fmt: skip
    if as_json:
        show([asdict(result) for result in results], as_json)
        return
    notes = [
        f"attention layers of {model}: {', '.join(layers)}",
        f"times are of layers with their projections, {dtype}, batch {batch}, {clock_device}; ratio: time of forward "
        "and backward, divided by that of softmax attention; *: no other mechanism is better in parameters, MACs and "
        "this time together",
        *(f"{result.mixer} is left out: {result.refused}" for result in results if result.refused),
        WITHOUT_IMAGES,
        *conditions(),
    ]
    show([_row(result) for result in results if not result.refused], notes=notes)


def _row(result: Any) -> dict[str, Any]:
    return {
        "": "*" if result.pareto else "",
        "mechanism": result.mixer,
        "parameters": result.params,
        "MACs": result.macs,
        "forward ms": round(result.forward * 1000, 2),
        "with backward ms": round(result.both * 1000, 2),
        "ratio": round(result.ratio, 3),
        "masks": ", ".join(result.masks) or "none",
        "other image sizes": result.other_grid,
    }
