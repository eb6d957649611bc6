"""`regard finetune`: continue training from a saved model, a finished run, or timm's published weights."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from regard.core import ConfigError, Extra
from regard.files.atomic import read_bytes
from regard.files.paths import named_folder, user_path

from .given import expand_groups
from .run_display import execute_run
from .run_options import (
    RunOptions,
    TrainingOptions,
    find_task,
    make_run,
    optional_run,
    saved_model,
    suggest_task,
    use_data,
)
from .sizes import read_size
from .user_model import MeanOption, ModelOptions, StdOption, WeightsOption, progress

if TYPE_CHECKING:
    from regard.images.normalise import Statistics
    from regard.lab.results.results import Results
    from regard.lab.tasks.image_task import ImageTask
    from regard.lab.train.initial_weights import Saved
    from regard.lab.train.run import Run

DEFAULTS: dict[str, Any] = {"epochs": 10, "lr": 2e-4}
"""Fields of the recipe: fewer epochs and a smaller learning rate than from scratch."""


@expand_groups
def finetune(
    start: Annotated[
        str,
        typer.Argument(
            help="A folder that `save` wrote, a finished run (folder or key), or a model of timm, with published "
            "weights or those of --weights."
        ),
    ],
    data: Annotated[
        str,
        typer.Option(help="A data set by name, a folder of class folders, or a parquet file."),
    ],
    mixer: Annotated[
        str,
        typer.Option(
            help='A new mechanism, such as "MiTA(m=9, k=9)"; "host" restores the host\'s own. Default: the present one.'
        ),
    ] = "",
    plan: Annotated[
        str, typer.Option(help="A mechanism for each layer: plan.json of `regard advise`, or 'LAYER=MECHANISM; ...'.")
    ] = "",
    task: Annotated[str, typer.Option("--task", help="The problem. Default: that of the run, or classification.")] = "",
    weights: WeightsOption = "",
    mean: MeanOption = "",
    std: StdOption = "",
    *,
    options: RunOptions,
    training: TrainingOptions,
) -> None:
    """Train a model further on your data, with the same or another mechanism (10 epochs, lr 2e-4; see --set)."""
    use_data(options.data_root)
    if weights:
        start = _with_weights(start, weights, options)
    normal = ModelOptions(mean=mean, std=std).normal
    with suggest_task(task, data):
        run = finetuning_run(start, mixer, data, options, task, plan, normal)
        bring_start(run, start, options.results)
        execute_run(run, options.results, training, options.as_json)


def bring_start(run: "Run", start: str, results: Path) -> None:
    """Copy the run of another store, from which a run starts, into `results`."""
    from regard.lab.results.housekeeping import bring
    from regard.lab.results.results import Results
    from regard.lab.train.run import Run

    stored = optional_run(start, results) if isinstance(run.start, Run) else None
    if stored is not None and bring(*stored, Results(results)):
        store, key = stored
        print(f"run {key} is copied from {store.root} into {results}: the new run starts from it", file=sys.stderr)


def _with_weights(start: str, weights: str, options: RunOptions) -> str:
    """The folder of a saved model, in the store of the run, of a model with the weights of a file.

    Raises: as `named_network`.
    """
    from regard.models.named import named_network
    from regard.models.saving import save

    if named_folder(start) is not None or optional_run(start, options.results):
        raise ConfigError(f"{start} has trained weights of its own: leave --weights out")
    _check_trainable(start)
    network = named_network(start, weights=weights, extra=options.extra).network
    mark = hashlib.sha256(read_bytes(user_path(weights))).hexdigest()[:8]  # another file of this name is another start
    folder = save(network, options.results / f"weights-{Path(weights).stem}-{mark}")
    progress(f"the weights of {weights} are kept in {folder}, from which the run starts")
    return str(folder)


def _check_trainable(start: str) -> None:
    """Raises: ConfigError for a model that is not of `create_model`, which a run cannot build again."""
    from regard.models.named import is_users

    if is_users(start):
        raise ConfigError(
            f"a run cannot build {start} again from its record: name the function in HOSTS of a module for --import, "
            "or train it by a loop of your own, see docs/fine-tuning.md"
        )


def finetuning_run(
    start: str, mixer: str, data: str, options: RunOptions, task: str = "", plan: str = "",
    normal: "Statistics | None" = None,
) -> "Run":  # fmt: skip
    """The run that starts from the weights of `start`.

    normal: mean and deviation of each channel, None = those of the weights. Raises: ConfigError, StoreError.
    """
    from regard.models.create import parse_host
    from regard.models.sizes import size_of, with_size

    extra, results = options.extra, options.results
    host, present, present_plan, source = _start(start, results, extra)
    own_task, host, own_fields = _own_task(host, source)
    if plan and mixer:
        raise ConfigError("--plan names the mechanism of each layer: leave --mixer out")
    task = task or own_task
    kind = find_task(task, extra)
    defaults: dict[str, dict[str, Any]] = {"recipe": DEFAULTS, "task": {}}
    if source is None and "init" in kind.__dataclass_fields__:
        defaults["task"] = {"init": "host"}
    if {"mean", "std"} <= kind.__dataclass_fields__.keys():
        mean, std = normal or _normal(source, start, results, extra)
        defaults["task"] |= {"mean": tuple(mean), "std": tuple(std)} if mean else {}
    elif normal is not None:
        raise ConfigError(f"--task {task} normalises no images: leave --mean and --std out")
    if own_fields.get("init") == "host" and "init" in kind.__dataclass_fields__:  # others may find no output layers
        defaults["task"] |= {"init": "host"}
    if own_task == task:
        defaults["task"] |= {name: own_fields[name] for name in kind.model_fields if name in own_fields}
    if "size" in kind.__dataclass_fields__:
        given = read_size(options.size) if options.size else None
        height, width = given or own_fields.get("size") or size_of(host, extra)
        options = replace(options, size=f"{height}x{width}")
        if parse_host(host)[1].keys() & {"img_size", "size"}:  # else the task builds it for this size, if it can
            host = with_size(host, (height, width), extra)

    def run_with(mixer: str, plan: str) -> "Run":
        run = make_run(mixer, data, host, options, task=task, defaults=defaults, start=source, plan=plan)
        if normal is not None and len(normal[0]) != (channels := cast("ImageTask", run.task).channels):
            raise ConfigError(
                f"--mean and --std are of {len(normal[0])} channels, the images of {data} have {channels}"
            )
        return _without_usual(run)

    if plan:
        bare = run_with("host", "")
        return replace(bare, plan=_overlaid(plan, bare, present, present_plan, extra))
    return run_with(mixer or present, "" if mixer else present_plan)


def _without_usual(run: "Run") -> "Run":
    """The run without `mean` and `std` where these change nothing: with them it would be another run.

    So it is if they are those of the data, or for another number of channels. Raises: DataError.
    """
    from regard.lab.tasks.image_task import ImageTask

    task = run.task
    if not isinstance(task, ImageTask) or not task.mean:
        return run
    usual = replace(task, mean=(), std=())
    return replace(run, task=usual) if task.statistics() == usual.statistics() else run


def _overlaid(plan: str, run: "Run", present: str, present_plan: str, extra: Extra) -> str:
    """A plan for a model that has a mechanism, or a plan, already: layers that the new one does not name keep theirs.

    run: with the host's own attention. Raises: ConfigError; SwapError for a plan that does not fit the model.
    """
    from regard.mixers.spelling import parse_mixer
    from regard.models.catalog import user_ports
    from regard.swapping.inspect import attention_layers
    from regard.swapping.layer_plan import mixers_by_layer, read_layer_plan, spell_layer_plan
    from regard.swapping.removed import Removed

    named = read_layer_plan(plan, extra)
    if present == "host" and not present_plan:
        return spell_layer_plan(named)
    layers = list(attention_layers(run.task.trial(None).model, user_ports(extra)))
    before = (
        mixers_by_layer(read_layer_plan(present_plan, extra), layers)
        if present_plan
        else dict.fromkeys(layers, parse_mixer(present, extra) or Removed())
    )
    return spell_layer_plan({**before, **mixers_by_layer(named, layers)})


def _start(start: str, results: Path, extra: Extra) -> "tuple[str, str, str, Run | Saved | None]":
    """(host, its present mechanism, its plan of layers if it has one, source of the weights).

    source None: timm's weights, by the host's spelling.
    """
    from regard.lab.train.initial_weights import Saved
    from regard.lab.train.run import changed_data, read_run
    from regard.mixers.spelling import spell
    from regard.models.catalog import has_option, own_models
    from regard.models.create import parse_host, spell_host

    if (folder := saved_model(start)) is not None:
        from regard.models.recipe import check_local
        from regard.models.saving import read_description

        description = read_description(folder)
        check_local(folder / "model.json", description["host"])
        return _bare(description["host"]), *_present(description, extra), Saved(str(folder.absolute()))
    if (stored := optional_run(start, results)) is not None:
        store, key = stored
        run = read_run(store, key, extra)
        if store.status(key) != "done":
            raise ConfigError(f"run {key} is not finished; finish it first, with the command that started it")
        if changed := changed_data(run, key):
            return _start(_saved_weights(run, store, key, changed, extra), results, extra)
        mixer = "None" if run.removed else "host" if run.mixer is None else spell(run.mixer)
        return _bare(run.task.host), mixer, run.plan, run
    _check_trainable(start)
    if named_folder(start) is not None:
        raise ConfigError(f"{start} is neither a saved model (model.json) nor a run (run.json)")
    name, options = parse_host(start.removeprefix("timm:"))
    import timm

    make = own_models(extra).get(name)
    if make is None and not timm.is_model(name.partition(".")[0]):
        raise ConfigError(f"{start!r} is no saved folder, no run in {results} and no model of timm or of --import")
    if make is not None and not has_option(make, "pretrained"):
        raise ConfigError(f"{start} has no published weights: give --weights, a saved folder or a run")
    return spell_host(name, {**options, "pretrained": True}), "host", "", None


def _saved_weights(run: "Run", store: "Results", key: str, changed: str, extra: Extra) -> str:
    """The folder of a saved model with the weights of a run, for a start that does not need the run's data.

    changed: what is different about them. Raises: ConfigError for a model that cannot be saved.
    """
    from regard.lab.train.load import load_run
    from regard.models.saving import save

    if run.task.name != "classification":
        raise ConfigError(f"{changed}: --task {run.task.name} needs them as they were, to start from this run")
    model: Any = load_run(store.folder(key), extra)
    model.regard_data = store.data(key)  # whose class names `save` leaves out where the model has other outputs
    folder = save(model, store.folder(key) / "saved")
    print(f"{changed}; its weights are the start all the same, as the saved model {folder}", file=sys.stderr)
    return str(folder)


def _own_task(host: str, source: "Run | Saved | None") -> tuple[str, str, dict[str, Any]]:
    """(name of the task that the weights are of, host inside its model, fields that belong to the model, and size)."""
    from regard.lab.train.run import Run
    from regard.models.create import parse_host
    from regard.models.segmentation.segmenter import SEGMENTER

    if isinstance(source, Run):
        names = (*source.task.model_fields, "size", "init")
        own = {name: getattr(source.task, name) for name in names if hasattr(source.task, name)}
        return source.task.name, host, own
    name, options = parse_host(host)
    if source is None or name != SEGMENTER:
        return "classification", host, {}
    return "segmentation", _bare(options["host"]), {"head": options["head"], "size": options["img_size"]}


def _normal(source: "Run | Saved | None", start: str, results: Path, extra: Extra) -> "Statistics":
    """Mean and deviation with which the weights of a source were trained, or else the usual ones; ([], []) of timm's,
    which the task knows."""
    from regard.advice.user_model import load_user_model
    from regard.lab.train.initial_weights import Saved
    from regard.lab.train.run import Run

    if isinstance(source, Saved):
        user = load_user_model(source.folder, extra=extra)
        progress(user.preparation("--mean, --std"))
        return user.statistics
    stored = optional_run(start, results) if isinstance(source, Run) else None
    return (stored[0].data(stored[1]).get("normal") if stored else None) or ([], [])


def _present(description: dict[str, Any], extra: Extra) -> tuple[str, str]:
    """The mechanism that all layers of a saved model have, or else its plan of layers: one of them, the other empty."""
    import torch

    from regard.models.catalog import user_ports
    from regard.models.recipe import create_saved
    from regard.swapping.inspect import attention_layers
    from regard.swapping.layer_plan import read_layer_plan, spell_layer_plan

    groups = description["swaps"]
    mixers = {layer: group["mixer"].replace("removed", "None") for group in groups for layer in group["layers"]}
    if not mixers:
        return "host", ""
    with torch.device("meta"):
        layers = attention_layers(create_saved(description["host"], extra), user_ports(extra))
    if len(set(mixers.values())) == 1 and mixers.keys() == layers.keys():
        return next(iter(mixers.values())), ""
    return "host", spell_layer_plan(read_layer_plan(mixers, extra))


def _bare(host: str) -> str:
    """A host's spelling without classes and channels, which depend on the new data, and without its first weights."""
    from regard.models.create import parse_host, spell_host
    from regard.models.recipe import local_host

    name, options = parse_host(local_host(host))
    kept = {key: value for key, value in options.items() if key not in ("num_classes", "in_chans")}
    return spell_host(name, kept)
