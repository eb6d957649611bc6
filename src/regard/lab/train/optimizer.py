"""The optimizer of a recipe, and its parameter groups."""

from typing import Any

from torch import nn

from regard.core import ConfigError, DeviceError, nearest
from regard.core.validation import check_arguments

from .recipe import Recipe

_NO_DECAY = ("pos_embed", "cls_token", "reg_token", "dist_token", "relative_position_bias_table")


@check_arguments
def param_groups(model: nn.Module, weight_decay: float, lr: float | None = None) -> list[dict[str, Any]]:
    """Parameter groups with and without weight decay: none on vectors, biases, parameters with the names that timm has
    for position embeddings and tokens (`pos_embed`, `cls_token`, ...), and those that a `no_weight_decay()` names.

    Parameters that a module's `lr_scale()` names (offsets of deformable convolutions) get separate groups: with a
    scaled "lr", for PyTorch's optimizers; or, if lr is None, with "lr_scale", which timm's schedulers read. Frozen
    parameters are left out.
    Raises: ConfigError for a weight decay or learning rate below 0.
    """
    for name, number in (("weight_decay", weight_decay), ("lr", lr)):
        if number is not None and number < 0:
            raise ConfigError(f"{name} is 0 or more, not {number}")
    undecayed: set[str] = set()
    scales: dict[str, float] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        no_weight_decay, lr_scale = getattr(module, "no_weight_decay", None), getattr(module, "lr_scale", None)
        if callable(no_weight_decay):
            undecayed |= {prefix + label for label in no_weight_decay()}
        if callable(lr_scale):
            scales |= {prefix + label: factor for label, factor in lr_scale().items()}
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            last = name.rsplit(".", 1)[-1]
            decay = name not in undecayed and parameter.ndim > 1 and last != "bias" and last not in _NO_DECAY
            groups.setdefault((decay, scales.get(name, 1.0)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decay else 0.0, **_group_lr(scale, lr)}
        for (decay, scale), parameters in groups.items()
        if parameters
    ]


def _group_lr(scale: float, lr: float | None) -> dict[str, float]:
    if lr is not None:
        return {"lr": lr * scale}
    return {} if scale == 1.0 else {"lr_scale": scale}


def check_optimizer(recipe: Recipe) -> Any:
    """timm's facts about the recipe's optimizer.

    Raises: ConfigError for an unknown name or a second-order optimizer.
    """
    from timm.optim import get_optimizer_info

    try:
        info = get_optimizer_info(recipe.optimizer)
    except ValueError as error:
        from timm.optim import list_optimizers

        raise ConfigError(
            f"unknown optimizer {recipe.optimizer!r}; {nearest(recipe.optimizer, map(str, list_optimizers()))}"
        ) from error
    if info.second_order:
        raise ConfigError(
            f"{recipe.optimizer} needs second derivatives, which the training loop does not compute; use another one"
        )
    unused = info.num_betas != 2 if info.has_betas else not info.has_momentum
    if unused and recipe.betas != Recipe.betas:
        raise ConfigError(f"{recipe.optimizer} has no two betas and no momentum that a recipe sets: leave betas out")
    return info


def make_optimizer(model: nn.Module, recipe: Recipe) -> Any:
    """timm's optimizer of the recipe's name, with the groups of `param_groups`.

    Raises: as `check_optimizer`; DeviceError if a package or GPU is missing.
    """
    from timm.optim import create_optimizer_v2

    info = check_optimizer(recipe)
    betas = tuple(map(float, recipe.betas))
    options: dict[str, Any] = {} if info.has_betas else {"momentum": betas[0]}
    if info.has_betas and info.num_betas == 2:
        options["betas"] = betas
    if recipe.optimizer in ("adam", "adamw") and recipe.precision != "16-mixed":  # fused 16-mixed cannot clip
        options["fused"] = True  # one kernel for all parameters: saves 1.5 ms a step on a small model
    try:
        return create_optimizer_v2(
            param_groups(model, recipe.weight_decay),
            opt=recipe.optimizer,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            **options,
        )
    except AssertionError as error:  # timm's error for a missing package or GPU
        raise DeviceError(f"optimizer {recipe.optimizer} is not available here: {error}") from error
