"""A question of our own: which mechanisms see what moves, where a token attends to all frames of a clip?

`moving_digits` needs attention in time and in space, which two controls lack. 128 tokens are few: the study asks
whether a mechanism works on a third axis, not whether it is fast.
"""

from regard.lab.data.moving import FRAMES, NAME, SIDE
from regard.lab.engine.study import Claim, Row, Setting, Study
from regard.lab.tasks.video import Video
from regard.lab.train.recipe import Recipe
from regard.mixers import SKA, Agent, Factors, Linear, MiTA, Softmax, Window

ROWS = (
    Row("softmax", Softmax()),
    Row("MiTA", MiTA(m=(2, 2, 2), k=16), notes=("MiTA: landmarks over boxes of 4 frames x 2 x 2 tokens.",)),
    Row("Agent", Agent(m=(4, 2, 2))),
    Row("Linear", Linear()),
    Row("Window", Window(size=(8, 2, 2)), notes=("Window: 2 x 2 tokens of all frames.",)),
    Row("SKA", SKA()),
    Row("within frames", Window(size=4), control=True, notes=("within frames: softmax in each frame, none in time.",)),
    Row("within places", Window(size=(8, 1, 1)), control=True,
        notes=("within places: softmax over the frames of a place, none in space.",)),
    Row("uniform average", Factors(terms="0000"), control=True),
)  # fmt: skip
SMOKE, DESK = (
    Video(host=host, data=NAME, size=(SIDE, SIDE), frames=FRAMES, limit=limit)
    for host, limit in (("vit_desk_video(dim=16, depth=1)", 320), ("vit_desk_video", 0))
)
RECIPE = Recipe(epochs=1, batch=64, lr=3e-3, augment="none")

STUDY = Study(
    name="moving",
    title="Which digit moves? Attention over all frames of a clip",
    source="Regard",
    question="Do mechanisms other than softmax see what moves, if a token attends to all frames?",
    baseline="softmax",
    settings={
        "smoke": Setting(SMOKE, RECIPE, ROWS, seeds=2),
        "desk": Setting(DESK, Recipe(epochs=5, batch=64, lr=3e-3, augment="none"), ROWS, seeds=4),
    },
    claims=(
        *(Claim(label, "softmax", "top1", within=3.0) for label in ("MiTA", "Agent")),
        *(Claim("softmax", label, "top1") for label in ("Linear", "Window", "SKA")),
    ),
    notes=(
        "Four digits lie on a square, and one of them moves; 16,000 clips of 8 frames to learn from, 1,000 of other "
        "digits to test. The answer is the class of the one that moves.",
        "Eight frames of 4 x 4 tokens, each 7 x 7 pixels of one frame. All rows have the learning rate at which "
        "softmax had learned the task in a pilot.",
        "The last weights after a fixed number of epochs are tested; nothing is chosen on the test clips.",
    ),
)
