"""Heads that give each class a score map from the last map of a network: linear, Mask Transformer, CBT and DEPICT.

All take a map x of tokens (B, C, h, w) and return (B, K, h', w'). The last three have an embedding c of each class:
masks = LN_K(x̂ ĉᵀ), where x̂ and ĉ are the rows of x and c after the head's layers, divided by their length.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

CBT_HEADS: Mapping[int, int] = {192: 3, 384: 3, 768: 6, 1024: 9}
DEPICT_HEADS: Mapping[int, int] = {192: 3, 384: 3, 768: 3, 1024: 6}
"""Heads of width 100 by channels, which give the FLOPs of MiTA's Table 4; other widths have 3."""


class LinearHead(nn.Module):
    """One linear layer: the scores of each token, or with pixels = p those of its p x p pixels."""

    def __init__(self, channels: int, classes: int, pixels: int = 1) -> None:
        super().__init__()
        self.pixels = pixels
        self.scores = nn.Conv2d(channels, classes * pixels**2, 1)
        nn.init.trunc_normal_(self.scores.weight, std=0.02)
        nn.init.zeros_(self.scores.bias)  # type: ignore[arg-type]

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B K H W"]:
        return F.pixel_shuffle(self.scores(x), self.pixels)


class MaskHead(nn.Module):
    """What the heads with class embeddings have in common. A subclass has `mix_tokens`: layers on [tokens; classes]."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(classes, channels))
        nn.init.trunc_normal_(self.class_embedding, std=0.02)
        self.norm = nn.LayerNorm(channels)
        self.mask_norm = nn.LayerNorm(classes)

    def no_weight_decay(self) -> set[str]:
        return {"class_embedding"}

    def mix_tokens(self, z: Float[Tensor, "B n C"], grid: tuple[int, int]) -> Float[Tensor, "B n C"]:
        """Layers on the tokens of the grid (height, width) in rows, followed by the classes."""
        raise NotImplementedError

    def pair(self, tokens: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and classes as they are compared."""
        return tokens, classes

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B K h w"]:
        grid = (x.shape[-2], x.shape[-1])
        tokens = self.embed_tokens(x.flatten(2).mT)
        z = torch.cat([tokens, self.class_embedding.to(tokens.dtype).expand(len(x), -1, -1)], 1)
        z = self.norm(self.mix_tokens(z, grid))
        tokens, classes = self.pair(z[:, : tokens.shape[1]], z[:, tokens.shape[1] :])
        masks = self.mask_norm(F.normalize(tokens, dim=-1) @ F.normalize(classes, dim=-1).mT)
        return masks.mT.unflatten(-1, grid)

    def embed_tokens(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B N C"]:
        """Tokens before the layers."""
        return tokens


class TransformerLayer(nn.Module):
    """A pre-norm block of softmax attention and an MLP of 4 C, with dropout on its hidden layer and both outputs."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc1, self.fc2 = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        for layer in (self.qkv, self.proj, self.fc1, self.fc2):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Float[Tensor, "B n C"]) -> Float[Tensor, "B n C"]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.proj(y))
        return x + self.dropout(self.fc2(self.dropout(F.gelu(self.fc1(self.norm2(x))))))


class MaskTransformer(MaskHead):
    """Segmenter's Mask Transformer (Strudel et al. 2021): a linear layer, Transformer layers, two projections.

    heads: 0 = C / 64. dropout: 0.1 as in the paper.
    """

    def __init__(self, channels: int, classes: int, layers: int = 2, heads: int = 0, dropout: float = 0.1) -> None:
        super().__init__(channels, classes)
        heads = heads or max(channels // 64, 1)
        self.embed = nn.Linear(channels, channels)
        nn.init.trunc_normal_(self.embed.weight, std=0.02)
        nn.init.zeros_(self.embed.bias)
        self.layers = nn.Sequential(*(TransformerLayer(channels, heads, dropout) for _ in range(layers)))
        self.token_projection = nn.Parameter(channels**-0.5 * torch.randn(channels, channels))
        self.class_projection = nn.Parameter(channels**-0.5 * torch.randn(channels, channels))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def mix_tokens(self, z: Tensor, grid: tuple[int, int]) -> Tensor:
        return self.layers(z)

    def pair(self, tokens: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        return tokens @ self.token_projection, classes @ self.class_projection


class CBTLayer(nn.Module):
    """Contract and broadcast (CBSA, 2025): pooled representatives attend to all, and give back what they have learnt.

        w = U LN(z);  r = pool(w of the tokens);  A = softmax(r wᵀ / sqrt d);  r <- r + eta_r A w
        z <- z + L_out(eta_x Aᵀ softmax(r rᵀ / sqrt d) r)

    The rows of Aᵀ are not normalised. eta_r and eta_x: one number for each head; 1 at first, or standard normal as in
    the published code with noisy=True, which makes early training unsteady.
    """

    def __init__(self, channels: int, heads: int, width: int, pooled: int, noisy: bool) -> None:
        super().__init__()
        self.heads, self.pooled, self.scale = heads, pooled, width**-0.5
        self.norm = nn.LayerNorm(channels)
        self.project = nn.Linear(channels, heads * width, bias=False)
        self.out = nn.Linear(heads * width, channels)
        start = torch.randn if noisy else torch.ones
        self.eta_r = nn.Parameter(start(heads, 1, 1))
        self.eta_x = nn.Parameter(start(heads, 1, 1))

    def no_weight_decay(self) -> set[str]:
        return {"eta_r", "eta_x"}

    def forward(self, z: Float[Tensor, "B n C"], grid: tuple[int, int]) -> Float[Tensor, "B n C"]:
        height, width = grid
        w = self.project(self.norm(z)).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, M, n, d)
        tokens = w[:, :, : height * width].flatten(0, 1).mT.unflatten(-1, grid)
        pooled = F.adaptive_avg_pool2d(tokens, (min(self.pooled, height), min(self.pooled, width)))
        r = pooled.flatten(2).mT.unflatten(0, (len(z), self.heads))
        a = (self.scale * r @ w.mT).softmax(-1)
        r = r + self.eta_r * (a @ w)
        delta = (self.scale * r @ r.mT).softmax(-1) @ r
        return z + self.out((self.eta_x * (a.mT @ delta)).transpose(1, 2).flatten(2))


class CBT(MaskHead):
    """The CBT head (CBSA, 2025; MiTA, Table 4): three layers, linear in the number of tokens, without MLPs.

    heads: of 100 channels; 0 = those of `CBT_HEADS`. pooled: sides of the grid of representatives.
    """

    def __init__(
        self, channels: int, classes: int, layers: int = 3, heads: int = 0, width: int = 100, pooled: int = 10,
        noisy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(channels, classes)
        heads = heads or CBT_HEADS.get(channels, 3)
        self.layers = nn.ModuleList(CBTLayer(channels, heads, width, pooled, noisy) for _ in range(layers))

    def mix_tokens(self, z: Tensor, grid: tuple[int, int]) -> Tensor:
        for layer in self.layers:
            z = layer(z, grid)
        return z


class DepictLayer(nn.Module):
    """z + eta Uᵀ softmax(w wᵀ / sqrt d) w with w = U LN(z): one projection for queries, keys, values and output."""

    def __init__(self, channels: int, heads: int, width: int, noisy: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.project = nn.Linear(channels, heads * width, bias=False)
        self.eta = nn.Parameter(torch.randn(1) if noisy else torch.ones(1))

    def forward(self, z: Float[Tensor, "B n C"]) -> Float[Tensor, "B n C"]:
        w = self.project(self.norm(z)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(w, w, w).transpose(1, 2).flatten(2)
        return z + self.eta * (y @ self.project.weight)


class Depict(MaskHead):
    """DEPICT-SA (Wen and Li 2024): a decoder derived as compression; three layers without MLPs.

    heads: of 100 channels; 0 = those of `DEPICT_HEADS`. noisy: as in `CBTLayer`.
    """

    def __init__(
        self, channels: int, classes: int, layers: int = 3, heads: int = 0, width: int = 100, noisy: bool = False
    ) -> None:
        super().__init__(channels, classes)
        heads = heads or DEPICT_HEADS.get(channels, 3)
        self.layers = nn.Sequential(*(DepictLayer(channels, heads, width, noisy) for _ in range(layers)))

    def mix_tokens(self, z: Tensor, grid: tuple[int, int]) -> Tensor:
        return self.layers(z)
