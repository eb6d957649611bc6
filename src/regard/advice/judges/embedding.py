"""One vector for each image, such as of a search or of a tower of CLIP."""

import torch
from jaxtyping import Float
from torch import Tensor

from .judge import Change, Judge, neighbours


class Embedding(Judge):
    """(B, C): one minus the cosine of old and new. What agrees: whether the nearest other image is the same."""

    kind = "embedding"
    distance = "1 - cosine of the old and the new vector"
    kept = "images whose nearest neighbour among the images is the same"
    sentence = "keeps the nearest neighbour of {} % of the images"
    whole = True

    def change(self, before: Float[Tensor, "n C"], after: Float[Tensor, "n C"]) -> Change:
        cosine = torch.cosine_similarity(before.double(), after.double())
        return (1 - cosine).clamp_min(0), (neighbours(before) == neighbours(after)).float()
