"""Random values: grids, masks, fields, spellings, spellings of hosts. The profiles are in tests/conftest.py."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.core import Grid, GridError, Mask, RegardError, ShapeError
from regard.mixers import MIXERS
from regard.mixers.spelling import parse, spell
from regard.models.create import parse_host, spell_host
from regard.projections import PROJECTIONS

pytestmark = pytest.mark.untyped

numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.integers(0, 20).map(np.int64), st.complex_numbers())
anything = st.one_of(st.none(), numbers, st.text(max_size=8), st.binary(max_size=4), st.tuples(numbers, numbers))
sides = st.one_of(st.integers(-2, 12), st.integers(1, 12).map(np.int64), anything)
cells = st.integers(1, 12)


@given(sides, sides, sides, sides)
def test_a_grid_has_whole_sides_or_is_refused(height: Any, width: Any, prefix: Any, suffix: Any) -> None:
    try:
        grid = Grid(height, width, prefix, suffix)
    except GridError:
        return
    given = (height, width, prefix, suffix)
    assert all(isinstance(side, int | np.integer) and not isinstance(side, bool) for side in given)
    assert dataclasses.astuple(grid) == (*given, 1)
    assert {type(side) for side in dataclasses.astuple(grid)} == {int}
    assert min(grid.height, grid.width) >= 1
    assert min(grid.prefix, grid.suffix) >= 0
    assert grid.tokens == grid.prefix + grid.height * grid.width + grid.suffix


@given(cells, cells, st.integers(0, 3), st.integers(0, 3), st.integers(-2, 150))
def test_tokens_come_back_from_the_map_and_windows_cover_the_grid(h: int, w: int, p: int, s: int, m: int) -> None:
    grid = Grid(h, w, p, s)
    x = torch.arange(float(grid.tokens))[:, None]
    extra, image = grid.to_map(x)
    assert torch.equal(image[0], p + torch.arange(float(h * w)).view(h, w))
    assert torch.equal(grid.from_map(extra, image), x)
    possible = [(r, m // r) for r in range(1, h + 1) if m > 0 and m % r == 0 and m // r <= w]
    if possible:
        assert grid.factor(m) in possible
    else:
        with pytest.raises(GridError):
            grid.factor(m)


@given(anything, st.lists(st.integers(0, 5), max_size=3), st.sampled_from([torch.bool, torch.int64, torch.float32]))
def test_a_mask_is_of_the_right_kind_or_is_refused(causal: Any, shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    for fields, right in (
        ({"causal": causal}, isinstance(causal, bool)),
        ({"keep": tensor}, dtype == torch.bool and len(shape) == 2),
        ({"bias": tensor}, dtype == torch.float32 and len(shape) >= 2),
    ):
        try:
            mask = Mask(**fields)
        except ShapeError:
            assert not right
        else:
            assert right
            assert type(mask.causal) is bool


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.randoms(use_true_random=False))
def test_a_mask_forbids_what_it_says(batch: int, tokens: int, causal: bool, random: Any) -> None:
    keep = torch.tensor([[random.random() < 0.6 for _ in range(tokens)] for _ in range(batch)])
    added = Mask(causal=causal, keep=keep).add_to(torch.zeros(batch, 1, tokens, tokens))
    for b in range(batch):
        for i in range(tokens):
            for j in range(tokens):
                assert (added[b, 0, i, j] == 0) == (bool(keep[b, j]) and (j <= i or not causal))


FIELDS = [(cls, field.name) for cls in (*MIXERS, *PROJECTIONS) for field in dataclasses.fields(cls)]


@given(anything)
def test_a_field_has_a_value_that_can_be_written_and_read_or_is_refused(value: Any) -> None:
    for cls, name in FIELDS:
        try:
            config = cls(**{name: value})
        except RegardError:
            continue
        assert type(getattr(config, name)).__module__ != "numpy"
        assert not isinstance(value, float) or abs(value) <= 1e18
        assert isinstance(value, bool) <= isinstance(getattr(cls, name, False), bool)
        assert parse(spell(config)) == config


pieces = st.lists(
    st.one_of(
        st.sampled_from(
            ["MiTA", "Softmax", "FSNE", "m", "scale", "projection", "(", ")", "[", "{", "}", "]", "=", ","]
        ),
        st.sampled_from(
            ["**", "*", ":", "'", "+", "-", ".", "\0", "\ud800", "lambda ", "None", "\n", " ", "3", "1e999"]
        ),
        st.text(max_size=3),
    ),
    max_size=14,
).map("".join)
keywords = st.lists(st.sampled_from(["m", "k"]), min_size=1, max_size=4)


@given(st.one_of(pieces, st.tuples(st.sampled_from("([{-"), st.integers(1, 9000)).map(lambda p: p[0] * p[1])))
def test_a_text_is_a_spelling_or_is_refused(text: str) -> None:
    for read in (parse, lambda text: parse_host(f"vit_desk({text}")):
        said = ""
        try:
            read(text)
        except RegardError as error:
            said = str(error)
        assert len(said) < 2000


@given(keywords)
def test_no_keyword_is_read_twice(names: list[str]) -> None:
    arguments = ", ".join(f"{name}={5 + i}" for i, name in enumerate(names))
    if len(set(names)) == len(names):
        config = parse(f"MiTA({arguments})")
        assert [getattr(config, name) for name in names] == [5 + i for i in range(len(names))]
    else:
        with pytest.raises(RegardError):
            parse(f"MiTA({arguments})")


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.floats(-9, 9), st.text("abc'\\(,=", max_size=5)),
    lambda inner: st.tuples(inner, inner) | st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)


@given(
    st.dictionaries(st.sampled_from(["dim", "depth", "img_size", "name"]), plain), st.sampled_from(["(", ")", "(a=1)"])
)
def test_a_host_is_read_as_it_is_written_and_nothing_may_follow(options: dict[str, Any], rest: str) -> None:
    text = spell_host("vit_desk", options)
    assert parse_host(text) == ("vit_desk", options)
    if options:
        with pytest.raises(RegardError):
            parse_host(text + rest)
