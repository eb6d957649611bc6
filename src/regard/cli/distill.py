"""`regard distill MODEL --plan PLAN --data DIR`: teach a swapped model to do what the model did, without labels."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.core import ConfigError, DataError
from regard.files.paths import printable

from .given import expand_groups
from .run_options import RootOption, find_device, path_option, use_data
from .tables import AsJson, show, wrap_notes
from .user_model import DataOption, JudgeOption, ModelArgument, ModelOptions, progress, read_images, read_model

if TYPE_CHECKING:
    from regard.advice.distill import Distilled
    from regard.advice.user_model import UserModel


@expand_groups
def distill(
    model: ModelArgument,
    plan: Annotated[
        str,
        typer.Option(
            help="A mechanism for all layers, 'blocks.0.attn=SKA(); blocks.1.attn=MiTA(m=25, k=25)', or plan.json."
        ),
    ],
    data: DataOption,
    steps: Annotated[int, typer.Option(min=0, help="Steps in which each layer learns its predecessor's output.")] = 200,
    output_steps: Annotated[
        int, typer.Option(min=0, help="Steps after that in which the whole model learns the original's output.")
    ] = 400,
    lora: Annotated[
        int, typer.Option(min=0, help="Rank of LoRA with which the whole model learns; 0: all weights learn.")
    ] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of the layers; at most a tenth for the whole model.")] = 1e-3,
    batch: Annotated[int, typer.Option(min=1, help="Images of a step.")] = 16,
    augment: Annotated[
        str, typer.Option(help="Of the images, as in a recipe: flip, crop, shift, resized; none, where sides matter.")
    ] = "flip",
    images: Annotated[int, typer.Option(min=16, help="Images to use; a quarter of them judges.")] = 400,
    out: Annotated[Path, path_option("The folder of the new model, and of the state while it learns.")]
    = Path("distilled"),
    judge: JudgeOption = "",
    *,
    options: ModelOptions,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    data_root: RootOption = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Swap by a plan and let the new layers learn what the old ones did; the same command continues after a stop."""
    use_data(data_root)
    from regard.advice.distill import distill_model, how_to_load
    from regard.advice.learning import Distillation

    if lora and not output_steps:
        raise ConfigError("--lora is how the whole model learns, which --output-steps 0 leaves out: give one of them")
    extra = options.extra
    if out.exists() and out.resolve() == Path(model).expanduser().resolve():
        raise ConfigError(f"--out {out} is the folder of the model itself, which would be replaced; choose another")
    user = read_model(model, options, extra, judge)
    if not user.trained:
        raise ConfigError(
            f"the weights of {model} are random, so there is nothing to learn from: give --pretrained, a saved folder "
            "or a run"
        )
    user = _with_classes(user, data)
    user.network.to(find_device(device))
    pictures = read_images(user, data, images)
    layers = Distillation(steps=steps, lr=lr, batch=batch, augment=augment)
    outputs = Distillation(steps=output_steps, lr=lr / 10, batch=batch, augment=augment)
    outcome = distill_model(user, plan, pictures, layers, outputs, out, rank=lora, extra=extra, report=progress)
    if as_json:
        show(_rows(outcome), as_json)
        return
    notes = [
        outcome.note,
        f"saved: {out}; {how_to_load(out, user)}",
        *([f"to see where it looks: regard explore {shlex.quote(str(out))} PICTURE"] if user.saveable else []),
    ]
    show(_rows(outcome), notes=wrap_notes(notes))


def _with_classes(user: "UserModel", data: str) -> "UserModel":
    """The model with the classes of the data as names of its outputs, where it names none and has as many."""
    from regard.images import own
    from regard.lab.data import catalog

    if user.data.get("class_names") or user.frames or data in catalog.NAMED:
        return user
    try:
        classes = own.read_scored(catalog.path_of(data))[0]
    except DataError:  # images without labels
        return user
    if len(classes) != getattr(user.network, "num_classes", None):
        return user
    progress(f"its outputs are named by the classes of {data} in this order: {', '.join(map(printable, classes))}")
    return replace(user, data={**user.data, "class_names": list(classes)})


def _rows(outcome: "Distilled") -> list[dict[str, object]]:
    return [
        {
            "model": label,
            "divergence": change.divergence.mean,
            "low": change.divergence.low,
            "high": change.divergence.high,
            "agreement %": change.agreement.mean,
            "from": change.agreement.low,
            "to": change.agreement.high,
        }
        for label, change in outcome.changes.items()
    ]
