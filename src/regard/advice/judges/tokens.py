"""Features of tokens or positions, for a head that the user has elsewhere."""

import torch
from jaxtyping import Float
from torch import Tensor

from .judge import Change, Judge, image_mean, neighbours


class Tokens(Judge):
    """(B, N, C), or a map (B, C, h, w): one minus the cosine of old and new, the mean over tokens. What agrees: the
    share of tokens whose nearest other token of the image is the same.
    """

    kind = "tokens"
    distance = "1 - cosine of old and new tokens, the mean over tokens"
    kept = "tokens whose nearest other token of the image is the same"
    sentence = "keeps the nearest other token of {} % of the tokens"

    def change(self, before: Float[Tensor, "n ..."], after: Float[Tensor, "n ..."]) -> Change:
        x, y = (value if value.ndim == 3 else value.flatten(2).mT for value in (before, after))
        cosine = torch.cosine_similarity(x.double(), y.double(), dim=-1)
        same = [(neighbours(old) == neighbours(new)).float().mean() for old, new in zip(x, y, strict=True)]
        return image_mean(1 - cosine).clamp_min(0), torch.stack(same)
