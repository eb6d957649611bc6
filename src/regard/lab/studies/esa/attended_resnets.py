"""What the studies of Tables 2 and 3 and Figure 2a of the ESA paper share: attended ResNets, controls, three scales."""

from collections.abc import Callable
from dataclasses import replace

from regard.lab.engine.study import Row, Setting
from regard.lab.studies.controls import CONTROLS, imagenet
from regard.lab.tasks.classification import Classification
from regard.lab.train.recipe import Recipe

SMOKE = "attended_resnet18(channels=(8, 16, 32, 64), stem=1, img_size=12, stages=(2, 3), heads=2)"
DESK = "attended_resnet18(channels=(8, 16, 32, 64), stem=2, img_size=32, stages=(2, 3), heads=2)"
PAPER = "attended_resnet18(img_size=224)"


def deformable(host: str) -> str:
    """The host with deformable convolutions before its attention."""
    return f"{host[:-1]}, deformable=True)"


def controls(start: Row) -> tuple[Row, ...]:
    """The rows that a study's baseline has to beat."""
    removed, uniform = (replace(row, start=start) for row in CONTROLS)
    return replace(removed, notes=("The plain network, trained further for as long as the others.",)), uniform


def settings(rows: Callable[[str, Row], tuple[Row, ...]]) -> dict[str, Setting]:
    """Three scales. rows(host, start): start is the row of the plain network that all others start from."""

    def setting(task: Classification, recipe: Recipe, seeds: int = 3, **first: int | float) -> Setting:
        start = Row("start", None, removed=True, recipe=first)
        return Setting(task, recipe, rows(task.host, start), seeds)

    smoke = Classification(host=SMOKE, data="digits-canvas", size=(12, 12), limit=320, init="host")
    desk = Classification(host=DESK, data="cifar10", size=(32, 32), init="host")
    return {
        "smoke": setting(smoke, Recipe(epochs=1, batch=32, lr=2e-3, augment="none"), 2, epochs=2),
        "desk": setting(desk, Recipe(epochs=6, batch=64, lr=4e-3), epochs=6, lr=2e-3),
        "paper": setting(imagenet(PAPER), _PAPER_RECIPE, epochs=90, lr=0.1, warmup=5 / 90),
    }


_PAPER_RECIPE = Recipe(
    epochs=30, batch=256, optimizer="momentum", lr=0.02, betas=(0.9, 0.999), weight_decay=1e-4, warmup=1 / 30,
    clip=0.0, smoothing=0.0, augment="timm", precision="bf16-mixed",
)  # fmt: skip
NOTES = (
    "Every row starts from the same trained plain ResNet-18 of its seed, with gamma at zero: at first it computes the "
    "same. w/o is trained further for as long as the others.",
    "Attention follows the first 3x3 convolution of a basic block, in the two stages named by the host; the paper has "
    "bottleneck blocks of ResNet-50. Maps of these stages are 8x8 and 4x4 at desk scale, 14x14 and 7x7 at paper scale.",
    "The ResNet-18 of desk scale is narrow (8 to 64 channels) and trained for 6 and then 6 epochs, so that all rows "
    "and seeds of a table take about five hours of one core. Its accuracies are low, and differences that need more "
    "training or width stay undecided. Shorter training shows nothing: after 3 epochs at a rate of 1e-3 gamma "
    "was below 0.07 in all rows, which means that attention was hardly used; with this recipe it reaches 0.2.",
    "The paper's tables are of detection, segmentation and translation, these rows are of classification: printed "
    "values are not shown beside them, and findings are judged as directions. `esa_costs` has the printed values.",
)
