"""The optimiser of a recipe, and which parameters decay."""

from typing import Any

from torch import nn

from regard.core import ConfigError, nearest

from .recipe import Recipe

_NO_DECAY = ("pos_embed", "cls_token", "reg_token", "dist_token", "relative_position_bias_table", "temperature")


def param_groups(model: nn.Module, weight_decay: float, lr: float | None = None) -> list[dict[str, Any]]:
    """Parameters with and without weight decay: none on vectors, biases, positions and what modules leave out.

    Those that a module's `lr_scale()` names (offsets of deformable convolutions) get groups of their own: with "lr",
    their share of lr, for the optimisers of PyTorch; or where lr is None with "lr_scale", for those of timm, whose
    schedulers read it. Frozen parameters are left out.
    """
    spared: set[str] = set()
    scales: dict[str, float] = {}
    for name, module in model.named_modules():
        start = f"{name}." if name else ""
        names, scaled = getattr(module, "no_weight_decay", None), getattr(module, "lr_scale", None)
        if callable(names):
            spared |= {start + own for own in names()}
        if callable(scaled):
            scales |= {start + own: factor for own, factor in scaled().items()}
    parts: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            last = name.rsplit(".", 1)[-1]
            plain = name in spared or parameter.ndim <= 1 or last == "bias" or last in _NO_DECAY
            parts.setdefault((not plain, scales.get(name, 1.0)), []).append(parameter)
    return [
        {"params": found, "weight_decay": weight_decay if decay else 0.0, **_rate(scale, lr)}
        for (decay, scale), found in parts.items()
        if found
    ]


def _rate(scale: float, lr: float | None) -> dict[str, float]:
    if lr is not None:
        return {"lr": lr * scale}
    return {} if scale == 1.0 else {"lr_scale": scale}


def make_optimizer(model: nn.Module, recipe: Recipe) -> Any:
    """timm's optimiser of a recipe's name, with our groups.

    Raises: ConfigError for an unknown name, one that needs second derivatives, or one that cannot be made here.
    """
    from timm.optim import create_optimizer_v2, get_optimizer_info

    try:
        info = get_optimizer_info(recipe.optimizer)
    except ValueError as error:
        from timm.optim import list_optimizers

        raise ConfigError(
            f"unknown optimizer {recipe.optimizer!r}; {nearest(recipe.optimizer, map(str, list_optimizers()))}"
        ) from error
    if info.second_order:
        raise ConfigError(
            f"{recipe.optimizer} needs second derivatives, which the loop does not compute; use another one"
        )
    options: dict[str, Any] = {} if info.has_betas else {"momentum": recipe.betas[0]}
    if info.has_betas and info.num_betas == 2:
        options["betas"] = recipe.betas
    if recipe.optimizer in ("adam", "adamw") and recipe.precision != "16-mixed":  # it unscales itself: no clipping
        options["fused"] = True  # one kernel for all parameters: 1.5 ms less a step on a small model
    try:
        return create_optimizer_v2(
            param_groups(model, recipe.weight_decay),
            opt=recipe.optimizer,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            **options,
        )
    except AssertionError as error:  # timm's word for a package or a GPU that is missing
        raise ConfigError(f"optimizer {recipe.optimizer} cannot be made here: {error}") from error
