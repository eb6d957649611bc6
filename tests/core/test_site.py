"""Site: widths and what is refused."""

import pytest

from operators import check_error
from regard import ConfigError, Grid, Site


def test_the_width_is_the_share_of_a_head() -> None:
    site = Site(192, 3, Grid(14, 14, 1))
    assert (site.width, site.inner) == (64, 192)
    assert Site(10, 3, Grid(2, 2), width=4).inner == 12


def test_channels_that_heads_do_not_divide_need_a_width() -> None:
    check_error(ConfigError, r"dim 10 is not a multiple of 3 heads; pass Site\(width=\)", Site, 10, 3, Grid(2, 2))


@pytest.mark.parametrize(("dim", "heads", "width"), [(0, 1, 0), (8, 0, 0), (8, 2, -4)])
def test_numbers_below_one_are_refused(dim: int, heads: int, width: int) -> None:
    check_error(ConfigError, "at least 1", Site, dim, heads, Grid(2, 2), width=width)
