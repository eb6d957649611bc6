"""Cost: parameters and multiply-accumulates by formula, without building a layer."""

from dataclasses import dataclass

from .errors import ConfigError, nearest

ACCOUNTINGS = ("executed", "paper")


@dataclass(frozen=True)
class Cost:
    """params: number of parameters. macs: multiply-accumulates of one sample's forward pass.

    Papers that say "4.6G FLOPs" for DeiT-S mean multiply-accumulates; `flops` is twice `macs`. Softmax, normalisation
    and pointwise products are not counted, as in torch's FLOP counter.
    """

    params: int = 0
    macs: int = 0

    @property
    def flops(self) -> int:
        """2 * macs."""
        return 2 * self.macs

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.params + other.params, self.macs + other.macs)


def check_accounting(accounting: str) -> None:
    """The input check of every `cost`. Raises: ConfigError unless the accounting is "executed" or "paper"."""
    if accounting not in ACCOUNTINGS:
        raise ConfigError(f"there is no accounting {accounting!r}; {nearest(str(accounting), ACCOUNTINGS)}")


def linear_cost(tokens: int, inputs: int, outputs: int, bias: bool = True) -> Cost:
    """The cost of a linear map from `inputs` to `outputs` channels on `tokens` tokens."""
    return Cost(outputs * (inputs + bias), tokens * inputs * outputs)


def attention_cost(queries: int, keys: int, inner: int) -> Cost:
    """The cost of q k^T and A v of all heads together; inner = heads * width."""
    return Cost(0, 2 * queries * keys * inner)
