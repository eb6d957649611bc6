"""An Empirical Study of Spatial Attention Mechanisms, Table 3: dynamic convolution against E2 in the same window."""

from regard.lab.engine.study import Claim, Row, Study
from regard.lab.studies.papers import ESA_PAPER
from regard.mixers import DynamicConv, Factors

from .attended_resnets import NOTES, PAPER, controls, settings

WINDOWS = (13, 7, 5, 3)


def rows(host: str, start: Row) -> tuple[Row, ...]:
    """E2 and dynamic convolution in every window, and the controls."""
    return (
        *(Row(f"0100 in {n}x{n}", Factors(terms="0100", window=n), start=start) for n in WINDOWS),
        *(Row(f"dynamic {n}x{n}", DynamicConv(kernel=n, kernel_bias=host != PAPER), start=start) for n in WINDOWS),
        *controls(start),
    )


STUDY = Study(
    name="esa_table3",
    title="Dynamic convolution, or attention by query content and relative position",
    source=f"{ESA_PAPER}, Table 3",
    question="In the same window, is dynamic convolution worse on images than attention by E2?",
    baseline="0100 in 13x13",
    settings=settings(rows),
    claims=(
        *(Claim(f"0100 in {n}x{n}", f"dynamic {n}x{n}", "top1") for n in WINDOWS),
        Claim("0100 in 13x13", "0100 in 3x3", "top1"),
    ),
    notes=(
        "The paper's windows are 31, 25, 19 and 13 wide on maps of 50x84; here 13, 7, 5 and 3 on smaller maps.",
        "Dynamic convolution has 16 groups and counts taps beyond the border, as published; attention does not. At the "
        "small scales its kernels have a bias, a logit of each tap that does not depend on the content. The paper's "
        "kernel exp(d^T x) has none, and at paper scale there is none.",
        *NOTES,
    ),
)
