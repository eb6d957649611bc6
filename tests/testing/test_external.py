"""The table of comparisons with other packages: what holds, what is missing, and that a wrong mechanism is found."""

from dataclasses import replace

import pytest
import torch

import regard
from operators import check_error
from published_layers import REWRITES
from regard.core import Grid, RegardError, Site
from regard.mixers import MIXERS
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import parse
from regard.testing.external import EXTERNAL, Compared, External, compare, comparisons, largest, plain_gap
from regard.testing.external.packages import conv_pairs, copy_weights, multihead
from samples import texts
from wrong_softmax import Wrong

GRIDS = (Grid(4, 6, 2), Grid(3, 5, 1, 2))


def label(one: External) -> str:
    return f"{one.mechanism}-{one.package}"


@pytest.mark.parametrize(
    "external",
    [
        pytest.param(one, marks=pytest.mark.slow) if one.package == "transformers" else one
        for one in (*EXTERNAL, *REWRITES)
    ],
    ids=label,
)
def test_every_comparison_holds(external: External) -> None:
    found = compare(external)
    if found.difference is None:
        pytest.skip(found.label)
    assert found.label == external.what
    assert found.difference <= external.allowed
    assert external.allowed <= 1e-10 or external.note


def test_the_table_is_in_the_order_of_the_mechanisms() -> None:
    names = [cls.__name__ for cls in MIXERS]
    order = [names.index(external.mechanism) for external in EXTERNAL]
    assert order == sorted(order)
    assert [external.package for external in comparisons("Factors")] == ["torch", "transformers"]
    assert comparisons("SKA") == ()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_value_that_is_no_number_is_a_difference(place: int) -> None:
    """Outputs come first, gradients after them."""
    pairs = [(torch.ones(2), torch.ones(2)) for _ in range(3)]
    assert largest(pairs) == 0
    pairs[place] = (torch.tensor([torch.nan, 1.0]), torch.ones(2))
    assert torch.tensor(largest(pairs)).isnan()
    assert not compare(External(mechanism="Softmax", package="torch", what="it", pairs=lambda: pairs)).holds


def missing(name: str) -> External:
    def pairs() -> list:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    return External(mechanism="Softmax", package="some-package", what="it", pairs=pairs)


def test_a_missing_package_is_named_and_nothing_else_is_hidden() -> None:
    found = compare(missing("some_package.inner"))
    assert found == Compared(label="needs some-package", difference=None, allowed=1e-11)
    assert found.holds
    check_error(ModuleNotFoundError, "another", compare, missing("another"))


def test_a_comparison_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    compare(replace(EXTERNAL[0], pairs=conv_pairs))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wrong_mechanism_is_found() -> None:
    """Softmax with a factor that is 1 % too large."""
    grid = Grid(3, 5, 1)
    layer = Softmax(scale=1.01 * 8**-0.5).build(Site(16, 2, grid)).double()
    wrong = External(mechanism="Softmax", package="torch", what="torch", pairs=lambda: multihead(layer, grid))
    found = compare(wrong)
    assert found.difference is not None
    assert found.difference > 1e-4
    assert not found.holds


def test_padding_and_the_plain_form_are_compared_too() -> None:
    grid = Grid(3, 5, 1)
    pairs = multihead(Softmax().build(Site(16, 2, grid)).double(), grid)
    assert len(pairs) == 3
    assert largest([(pairs[0][0], pairs[2][0])]) > 1e-3
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True).double()
    layer = Softmax().build(Site(16, 2, grid)).double()
    copy_weights(theirs, layer)
    assert torch.equal(layer.qkv.weight, theirs.in_proj_weight)


@pytest.mark.parametrize("name", [cls.__name__ for cls in MIXERS if not comparisons(cls.__name__)])
def test_the_others_are_their_plain_equation(name: str) -> None:
    assert plain_gap(parse(texts(getattr(regard, name))[0]), GRIDS) < 1e-11


def test_a_fast_form_that_is_not_its_equation_is_found() -> None:
    assert plain_gap(Wrong(), GRIDS) > 1e-4


def test_grids_that_a_mechanism_refuses_are_left_out() -> None:
    assert plain_gap(MiTA(m=(4, 6), k=4), (Grid(3, 5), Grid(4, 6))) < 1e-11
    check_error(RegardError, "landmarks", plain_gap, MiTA(m=(4, 6), k=4), (Grid(3, 5),))
