"""`regard advise --tokens N --dim C`: advice for a model that does not exist yet, from a stored table."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.core import ConfigError

from .sizes import LARGEST, read_size
from .tables import show, wrap_notes

if TYPE_CHECKING:
    from regard.advice.new_model import NewAdvice, Option
    from regard.core import MixerConfig

SEQUENCES = ("sequences", "translation")


@dataclass(frozen=True, kw_only=True)
class NewModelOptions:
    """What `regard advise` is told of a model that does not exist yet."""

    tokens: Annotated[int, typer.Option(help="Tokens of a model that does not exist yet, in the place of MODEL.")] = 0
    grid: Annotated[str, typer.Option(help="Their grid, such as 64x64; default: a square.")] = ""
    dim: Annotated[int, typer.Option(help="Its channels.")] = 0
    heads: Annotated[int, typer.Option(help="Its heads; default: of 64 channels, else of 32.")] = 0
    task: Annotated[str, typer.Option(help="Its task, such as segmentation: `regard list tasks`.")] = ""
    masks: Annotated[str, typer.Option(help="Masks that it needs: causal, padding, bias, separated by commas.")] = ""
    backward: Annotated[bool, typer.Option("--backward", help="Times of training, not of inference alone.")] = False


def show_new_model(new: NewModelOptions, configs: "list[MixerConfig]", as_json: bool) -> None:
    """Print the advice. Raises: ConfigError."""
    tokens, dim, heads, grid = new.tokens, new.dim, new.heads, new.grid
    if not dim or not (tokens or grid):
        raise ConfigError(
            "advise takes a MODEL; for one that does not exist yet give --tokens (or --grid) and --dim, both above 0"
        )
    if not (0 <= tokens <= LARGEST and 0 < dim <= LARGEST and 0 <= heads <= dim):
        raise ConfigError(
            f"--tokens {tokens}, --dim {dim}, --heads {heads}: expected positive numbers up to {LARGEST:,}"
        )
    sides = read_size(grid) if grid else None
    if sides is not None and sides[0] * sides[1] > LARGEST:
        raise ConfigError(f"--grid {grid} has more than {LARGEST:,} tokens")
    from regard.advice.new_model import NewModel, advise_new_model, new_site

    advice = advise_new_model(
        NewModel(
            site=new_site(tokens, dim, heads, sides, line=new.task in SEQUENCES),
            task=new.task,
            masks=tuple(mask.strip() for mask in new.masks.split(",") if mask.strip()),
            backward=new.backward,
        ),
        configs,
    )
    show([_row(option) for option in advice.options], as_json, notes=wrap_notes(_notes(advice)))


def _row(option: "Option") -> dict[str, Any]:
    return {
        "mechanism": option.mixer,
        "parameters": option.params,
        "MACs": option.macs,
        "MACs ratio": round(option.macs_ratio, 3),
        "time ratio": None if option.time_ratio is None else round(option.time_ratio, 3),
        "not learned in probes": None if option.lacking is None else ", ".join(option.lacking) or "none",
        "difference to softmax, trained": "; ".join(map(_difference, option.evidence[:3])),
    }


def _difference(line: dict[str, Any]) -> str:
    verdict = f", {line['verdict'].partition(' (')[0]}" if line["verdict"] else ""
    return f"{line['row']} {line['mean']:+.1f} [{line['low']:+.1f}, {line['high']:+.1f}]{verdict} ({line['study']})"


def _notes(advice: "NewAdvice") -> list[str]:
    return [
        *advice.answer,
        *(f"from: {line}" for line in advice.studies),
        *(f"nobody has measured: {line}" for line in advice.unknown),
        *(f"left out: {line}" for line in advice.left_out),
    ]
