"""What a run trains, in a line for the user who waits for its first epoch."""

from torch import nn

from regard.mixers.spelling import spell
from regard.swapping.layer import Port

from .run import Run


def announcement(run: Run, model: nn.Module) -> str:
    """Host, attention, image size, tokens of the swapped layers (each number once) and parameters, as a sentence."""
    own = "a plan of layers" if run.plan else "no attention" if run.removed else "its own attention"
    grids = [layer.mixer.site.grid for layer in model.modules() if isinstance(layer, Port)]
    tokens = ", ".join(f"{number:,}" for number in dict.fromkeys(grid.tokens for grid in grids))
    size = getattr(run.task, "size", None)
    parts = [
        *([f"{run.task.unit} of {size[0]}x{size[1]}"] if size else []),
        *([f"{tokens} tokens"] if tokens else []),
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters",
    ]
    return f"training {run.task.host} with {own if run.mixer is None else spell(run.mixer)}: {', '.join(parts)}"
