"""`regard advise --tokens N --dim C`: advice for a model that does not exist yet, from a stored table."""

from typing import TYPE_CHECKING, Any

from regard.core import ConfigError

from .sizes import LARGEST, read_size
from .tables import show, wrapped

if TYPE_CHECKING:
    from regard.advice.new_model import NewAdvice, Option
    from regard.core import MixerConfig

OPTIONS = ("tokens", "grid", "dim", "heads", "task", "masks", "backward")
"""Of `regard advise`, that describe a model which does not exist yet."""
SEQUENCES = ("sequences", "translation")


def show_new_model(
    tokens: int, grid: str, dim: int, heads: int, task: str, masks: str, backward: bool,
    configs: "list[MixerConfig]", as_json: bool,
) -> None:  # fmt: skip
    """Print the advice. Raises: ConfigError."""
    if not dim or not (tokens or grid):
        raise ConfigError("advise takes a MODEL; for one that does not exist yet give --tokens (or --grid) and --dim")
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
            site=new_site(tokens, dim, heads, sides, line=task in SEQUENCES),
            task=task,
            masks=tuple(mask.strip() for mask in masks.split(",") if mask.strip()),
            backward=backward,
        ),
        configs,
    )
    show([_row(option) for option in advice.options], as_json, notes=wrapped(_notes(advice)))


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
