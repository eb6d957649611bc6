"""The settings of MiTA's Table 5, those of Nystroemformer's Long Range Arena, as fields of task and recipe."""

from typing import Any

from regard.core import ConfigError

HOST = "sequence_encoder(pool='padded_mean')"
STEPS = {
    "listops": (5_000, 32, 1_000, 96_000),
    "imdb": (20_000, 32, 8_000, 25_000),
    "cifar10": (35_000, 256, 175, 45_000),
    "pathfinder": (62_400, 256, 312, 160_000),
}
"""Training steps, batch, warm-up steps, training samples."""
LENGTHS = {"imdb": 4_000, "cifar10": 1_024}


def published(data: str) -> dict[str, dict[str, Any]]:
    """Fields of "task" and "recipe", as `Sequences.defaults` has them; hours on one GPU.

    Whole epochs stand for the published numbers of steps. Not the same as published: the samples of ListOps and
    Pathfinder, the training reviews (2,500 are reserved), AdamW's eps, and the last weights in place of the best ones
    on the development split. Raises: ConfigError for a set that Table 5 does not have.
    """
    if data not in STEPS:
        raise ConfigError(
            f"Table 5 of MiTA has {', '.join(STEPS)}, and pairs of papers that are not here; not {data!r}"
        )
    steps, batch, warmup, samples = STEPS[data]
    recipe = {
        "epochs": round(steps * batch / samples), "batch": batch, "lr": 1e-4, "betas": (0.9, 0.999),
        "weight_decay": 0.0, "schedule": "linear", "warmup": warmup / steps, "smoothing": 0.0, "augment": "none",
    }  # fmt: skip
    return {"task": {"host": HOST, "length": LENGTHS.get(data, 0)}, "recipe": recipe}
