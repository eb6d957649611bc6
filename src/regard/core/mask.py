"""Mask: which keys a query may attend to, and what is added to the logits."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .errors import ShapeError
from .validation import plain_number


@dataclass(frozen=True, eq=False)
class Mask:
    """causal: query i sees keys up to i. keep (B, M): True where a key may be attended. bias (..., N, M): added logits.
    product: (of queries (B, H, N, r), of keys (M, r)), whose products are added logits, as position biases that are a
    sum over rows and columns of keys.

    The output of a query without any allowed key is zeros. A bias with one row is a key bias. Padding belongs in keep:
    a bias of -inf hides a token from the queries, but not from convolutions, landmarks and indexers.
    In cross-attention M counts the tokens of the memory.
    Raises: ShapeError for a causal that is neither True nor False, a keep that is not boolean with two axes, or a bias
    that is no dense tensor of floating-point numbers with two axes or more.
    """

    causal: bool = False
    keep: Bool[Tensor, "B M"] | None = None
    bias: Float[Tensor, "... N M"] | None = None
    product: tuple[Float[Tensor, "B H N r"], Float[Tensor, "M r"]] | None = None

    def __post_init__(self) -> None:
        keep, bias = self.keep, self.bias
        if type(self.causal) is not bool:
            causal = plain_number(self.causal)
            if type(causal) is not bool:
                raise ShapeError(f"Mask.causal is {_kind(causal)}; expected True or False")
            object.__setattr__(self, "causal", causal)
        if keep is not None and not (
            isinstance(keep, Tensor) and keep.dtype == torch.bool and keep.ndim == 2 and _is_dense(keep)
        ):
            raise ShapeError(
                f"Mask.keep is {_kind(keep)}; expected bool (batch, keys), True for a key that may be attended: "
                "pass keep.bool(), or what is added to the logits as bias="
            )
        if bias is not None and not (isinstance(bias, Tensor) and bias.is_floating_point() and _is_dense(bias)):
            raise ShapeError(
                f"Mask.bias is {_kind(bias)}; expected the floating-point numbers that are added to the logits: "
                "-inf where attention is forbidden"
            )
        if bias is not None and bias.ndim < 2:
            raise ShapeError(f"Mask.bias is {_kind(bias)}; expected (..., queries, keys), or (..., 1, keys)")
        if self.product is not None and not _is_product(self.product):
            raise ShapeError(
                "Mask.product is a pair of floating-point tensors, of queries (batch, heads, queries, r) and of keys "
                "(keys, r)"
            )

    def without_bias(self) -> "Mask | None":
        """The mask without what is added to the logits; None if nothing else is in it."""
        return Mask(causal=self.causal, keep=self.keep) if self.causal or self.keep is not None else None

    def with_bias(self) -> "Mask":
        """The mask with a bias for every pair in the place of the product."""
        if self.product is None:
            return self
        bias = self.product[0] @ self.product[1].mT
        return replace(self, bias=bias if self.bias is None else self.bias + bias, product=None)

    def check(self, batch: int, keys: int, heads: int, queries: int) -> None:
        """Compare the mask with the inputs of a layer.

        Raises: ShapeError unless keep has a row for each image and all its keys, and bias has these numbers of queries,
        keys, heads and images, or one.
        """
        if self.keep is not None and self.keep.shape != (batch, keys):
            raise ShapeError(f"Mask.keep is {tuple(self.keep.shape)}; expected (batch, keys) = {(batch, keys)}")
        if self.bias is not None and self.bias.ndim > 2 and self.bias.shape[-3] not in (1, heads):
            raise ShapeError(
                f"Mask.bias is of {self.bias.shape[-3]} heads, the queries have {heads}; heads= of a mechanism must be "
                "left out where a host adds a bias of its own heads"
            )
        self.check_bias(batch, heads, queries, keys)
        if self.product is not None:
            rows, columns = (tuple(part.shape) for part in self.product)
            if rows[:3] != (batch, heads, queries) or columns != (keys, rows[-1]):
                raise ShapeError(
                    f"Mask.product is of {rows} and {columns}; expected (batch, heads, queries, r) and (keys, r) with "
                    f"{batch}, {heads}, {queries} and {keys}"
                )

    def check_bias(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raises ShapeError unless the bias has these numbers, or one where it is the same for all."""
        if self.bias is None:
            return
        expected = (batch, heads, queries, keys)
        ends = self.bias.shape[-4:]
        fits = all(n in (1, m) for n, m in zip(ends, expected[-len(ends) :], strict=True))
        if self.bias.ndim > 4 or not fits:
            raise ShapeError(
                f"Mask.bias is {tuple(self.bias.shape)}; expected (batch, heads, queries, keys) = {expected}, with "
                "1 for what is the same for all"
            )

    def check_device(self, device: torch.device) -> None:
        """Raises ShapeError unless the mask's tensors are on the device of the inputs."""
        of_queries, of_keys = self.product or (None, None)
        for name, part in (("keep", self.keep), ("bias", self.bias), ("product", of_queries), ("product", of_keys)):
            if part is not None and part.device != device:
                raise ShapeError(f"Mask.{name} is on {part.device}, the inputs on {device}; move it with .to(device)")

    @property
    def kinds(self) -> frozenset[str]:
        """The parts that are set: a subset of {"causal", "padding", "bias", "product"}."""
        padding, bias, product = (part is not None for part in (self.keep, self.bias, self.product))
        kinds = (("causal", self.causal), ("padding", padding), ("bias", bias), ("product", product))
        return frozenset(name for name, used in kinds if used)

    def allowed_pairs(self, rows: int, columns: int, device: torch.device, batch: int) -> Bool[Tensor, "..."] | None:
        """True where attention is allowed, broadcastable to (B, H, rows, columns); None if everything is.

        Raises: ShapeError if `keep` has another number of keys, or of images (one row serves all images).
        """
        keep = None
        if self.causal:
            if rows != columns:
                raise ShapeError(f"a causal mask needs as many keys as queries, not {columns} keys for {rows} queries")
            keep = torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
        if self.keep is not None:
            _check_keep(self.keep, batch, columns)
            padding = self.keep[:, None, None, :]
            keep = padding if keep is None else keep & padding
        return keep

    def add_to(self, logits: Float[Tensor, "B H N M"]) -> Float[Tensor, "B H N M"]:
        """The logits with the bias added and -inf where attention is forbidden; the plain form, for references."""
        if self.product is not None:
            return self.with_bias().add_to(logits)
        if self.bias is not None:
            logits = logits + self.bias
        keep = self.allowed_pairs(logits.shape[-2], logits.shape[-1], logits.device, logits.shape[0])
        return logits if keep is None else logits.masked_fill(~keep, -torch.inf)

    def dense(self, q: Tensor, columns: int) -> Tensor | None:
        """The mask as one tensor for `scaled_dot_product_attention`, boolean or in q's dtype; None if nothing is set.

        q (B, H, N, d) gives the number of rows, dtype and device; columns is the number of keys.
        """
        if self.product is not None:
            return self.with_bias().dense(q, columns)
        keep = self.allowed_pairs(q.shape[-2], columns, q.device, q.shape[0])
        if self.bias is None:
            return keep
        bias = self.bias.to(q.dtype)
        return bias if keep is None else torch.where(keep, bias, -torch.inf)


def _is_dense(x: Tensor) -> bool:
    return not x.is_nested and x.layout == torch.strided


def _is_product(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(part, Tensor) for part in value):
        return False
    rows, columns = value
    numbers = rows.is_floating_point() and columns.is_floating_point()
    return numbers and (rows.ndim, columns.ndim) == (4, 2) and rows.shape[-1] == columns.shape[-1]


def _kind(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


NO_MASK = Mask()
POSITION_BIASES = frozenset({"bias", "product"})
"""The kinds of what hosts add to the logits."""


def only_kept(x: Float[Tensor, "B H M d"], keep: Bool[Tensor, "B1 M"] | None) -> Float[Tensor, "B H M d"]:
    """Zeros, in value and gradient, for tokens that are not kept: their values, even NaN, have no effect.

    keep has a row for each image, or one for all. Raises: ShapeError unless it has all tokens of x.
    """
    if keep is None:
        return x
    _check_keep(keep, x.shape[0], x.shape[-2])
    return x.masked_fill(~keep[:, None, :, None], 0.0)


def hide(x: Float[Tensor, "B H M d"], mask: Mask | None) -> Float[Tensor, "B H M d"]:
    """`only_kept` for the tokens that a mask keeps."""
    return x if mask is None else only_kept(x, mask.keep)


def join_product(
    q: Float[Tensor, "B H N d"], k: Float[Tensor, "B H M d"], mask: Mask | None, scale: float | None
) -> tuple[Tensor, Tensor, Mask | None, float | None]:
    """q and k with further channels whose products, times scale, are those of `Mask.product`; the mask without it.

    So nothing of N x M numbers is made, and whatever ranks keys by q . k ranks them by the biased logit. scale: None =
    d^-0.5 of the given q; returned as a number where channels were added.
    """
    if mask is None or mask.product is None:
        return q, k, mask, scale
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows, columns = mask.product
    q = torch.cat([q, (rows / scale).to(q.dtype)], -1)
    k = torch.cat([k, columns.to(k.dtype).expand(*k.shape[:2], -1, -1)], -1)
    return q, k, replace(mask, product=None), scale


def _check_keep(keep: Tensor, batch: int, keys: int) -> None:
    if keep.shape[-1] != keys:
        raise ShapeError(f"Mask.keep has {keep.shape[-1]} keys, the operator has {keys}")
    if keep.shape[0] not in (1, batch):
        raise ShapeError(f"Mask.keep has a batch of {keep.shape[0]}, the operator has {batch}")


def softmax_rows(logits: Float[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
    """Softmax over the last axis where a row that is -inf throughout gives zeros, in value and gradient."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
