"""The variants of CSKA: how its keys depend on places, with and without biases, as a product or not."""

from regard.mixers.static_keys.cska import CSKA

VARIANTS = (
    CSKA(),
    CSKA(rows="centre", cols="conv"),
    CSKA(rows="centre", bias=False),
    CSKA(factorised=True),
    CSKA(factorised=True, rows="centre"),
)
