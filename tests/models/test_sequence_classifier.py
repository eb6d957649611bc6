"""The encoder of long sequences: every mechanism on one-dimensional grids, padding, pooling, pairs, and saving."""

import importlib
import math
from dataclasses import fields, replace

import pytest
import torch

from regard.core import ConfigError, Grid, GridError, ShapeError
from regard.measure.cost import count_macs
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import parse_mixer, spell
from regard.mixers.table import MECHANISMS
from regard.mixers.xca import XCA
from regard.models.create import create_model
from regard.models.saving import load, save
from regard.models.sequence_classifier import sequence_encoder
from regard.swapping.swap import remove, restore, swap

SMALL = "sequence_encoder(dim=16, ffn=24, length=66, vocabulary=9, num_classes=3, hidden=12, drop=0.0)"
MERGED = SMALL.replace("length=66", "length=66, merge=4")


def configs():
    """The samples and the defaults of every mechanism, along one axis where the configuration has `axes`."""
    for name, module in MECHANISMS.items():
        kind = getattr(importlib.import_module(f"regard.mixers.{module}"), name)
        for config in dict.fromkeys([*map(parse_mixer, kind.samples), kind()]):
            has_axes = "axes" in {field.name for field in fields(config)}
            yield replace(config, axes=1) if has_axes else config


ALL = list(configs())
# regions in several rows have no meaning for a sequence of one row; BRA(regions=(1, 8)) has
TWO_DIMENSIONAL = ["BRA(regions=(2, 2), k=2)", "BRA()"]
RUNNING = [config for config in ALL if spell(config) not in TWO_DIMENSIONAL]


# the contract masks every mechanism, but those with `axes` in two dimensions
MASKED = [config for config in RUNNING if hasattr(config, "axes") or spell(config) in ("Softmax()", "MiTA()", "XCA()")]


def padded_ids(seed=0):
    """Three sequences of 66, 50 and 9 symbols."""
    ids = torch.randint(1, 9, (3, 66), generator=torch.Generator().manual_seed(seed))
    for row, length in enumerate((66, 50, 9)):
        ids[row, length:] = 0
    return ids


def built(mixer, host=SMALL, **options):
    torch.manual_seed(0)
    return create_model(host, mixer, **options).eval()


@pytest.mark.parametrize("mixer", RUNNING, ids=spell)
def test_every_mechanism_learns_from_sequences(mixer):
    model = built(mixer).train()
    scores = model(padded_ids())
    assert scores.shape == (3, 3)
    scores.logsumexp(-1).sum().backward()
    gradients = [value.grad for value in model.blocks[0].attn.parameters() if value.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)


def test_regions_of_several_rows_are_refused():
    assert {spell(config) for config in ALL} >= set(TWO_DIMENSIONAL)
    for spelling in TWO_DIMENSIONAL:
        with pytest.raises(GridError, match=r"cannot be divided into .* regions; nearest: regions=\(1, "):
            built(parse_mixer(spelling))
    assert built(parse_mixer("BRA(regions=(1, 8), k=2)"))(padded_ids()).isfinite().all()


@torch.no_grad()
def outputs_with_two_paddings(model):
    """Of the same sequences, before and after the embedding of padding has changed."""
    before = model(padded_ids())
    model.embed.weight[0] = torch.randn(16, generator=torch.Generator().manual_seed(2))
    return before, model(padded_ids())


@pytest.mark.parametrize("mixer", MASKED, ids=spell)
def test_padding_has_no_effect_where_it_is_masked(mixer):
    before, after = outputs_with_two_paddings(built(mixer).double())
    assert torch.equal(before[0], after[0])  # the first sequence has no padding
    unchanged = torch.allclose(before, after, rtol=0, atol=1e-12)
    assert unchanged == ("padding" in mixer.masks)


def test_without_a_mask_padding_is_input():
    before, after = outputs_with_two_paddings(built(Softmax(), mask=False).double())
    assert not torch.allclose(before[1:], after[1:], atol=1e-6)


def test_the_hosts_own_attention_is_softmax():
    host = built(None).double()
    swapped = swap(built(None).double(), Softmax())
    assert torch.allclose(host(padded_ids()), swapped(padded_ids()), rtol=0, atol=1e-12)
    assert torch.allclose(host(padded_ids()), restore(swapped)(padded_ids()), rtol=0, atol=1e-12)


def test_a_shorter_batch_equals_a_padded_one():
    model = built(Softmax()).double()
    ids = padded_ids()[1:, :50]
    padded = torch.cat([ids, ids.new_zeros(2, 16)], 1)
    assert torch.allclose(model(ids), model(padded), rtol=0, atol=1e-12)


@torch.no_grad()
def test_merged_symbols_are_tokens():
    model = built(Softmax(), MERGED).double()
    assert model.blocks[0].attn.mixer.site.grid == Grid.sequence(17)
    ids = padded_ids()
    tokens, keep = model.merge(model.embed(ids), ids != 0)
    assert keep.sum(1).tolist() == [17, 13, 3]
    # token t sees the symbols 4 t - 2 .. 4 t + 5
    changed = ids.clone()
    changed[0, 34] = ids[0, 34] % 8 + 1
    others, _ = model.merge(model.embed(changed), ids != 0)
    assert (tokens != others).any(-1).nonzero().tolist() == [[0, 8], [0, 9]]
    model.embed.weight[0] = 7 * torch.randn(16)
    assert torch.equal(model.merge(model.embed(ids), ids != 0)[0], tokens)
    assert torch.allclose(model(ids[1:, :52]), model(ids)[1:], rtol=0, atol=1e-12)


@torch.no_grad()
def test_grams_are_those_of_the_last_symbols():
    model = built(None, grams=4)
    ids = padded_ids()[:1]
    before, changed = model.grams(ids)[0], ids.clone()
    changed[0, 20] = ids[0, 20] % 8 + 1
    differ = (model.grams(changed)[0] != before).any(-1)
    assert differ.nonzero().flatten().tolist() == [20, 21, 22, 23]
    twice = model.grams(torch.cat([ids, ids], 1))[0]
    assert torch.equal(twice[66 + 3 :], before[3:])  # the same four symbols have the same embedding everywhere
    assert torch.equal(twice[:66], before)
    contexts = {tuple(ids[0, place - 3 : place + 1].tolist()) for place in range(3, 66)}
    assert len({tuple(row.tolist()) for row in before[3:]}) == len(contexts)


def test_padding_alone_is_finite():
    for mixer in (None, Softmax(), MiTA(m=4, k=4), XCA()):
        assert built(mixer)(torch.zeros(2, 66, dtype=torch.long)).isfinite().all()


def test_padded_mean_divides_by_all_tokens():
    masked, padded = built(None), built(None, pool="padded_mean")
    padded.load_state_dict(masked.state_dict())
    count = torch.tensor([66.0, 50.0, 9.0])[:, None]
    ids = padded_ids()
    assert torch.allclose(padded.encode(ids), masked.encode(ids) * count / 66, atol=1e-6)


def test_without_attention_and_positions_order_has_no_effect():
    model = remove(built(None)).double()
    ids = padded_ids()
    order = torch.cat([torch.randperm(9, generator=torch.Generator().manual_seed(1)), torch.arange(9, 66)])
    assert not torch.allclose(model(ids[2:]), model(ids[2:, order]), atol=1e-6)
    torch.nn.init.zeros_(model.positions.weight)
    assert torch.allclose(model(ids[2:]), model(ids[2:, order]), rtol=0, atol=1e-12)


def test_pairs_are_compared():
    model = built(MiTA(m=4, k=4), pairs=True)
    first, second = padded_ids(0), padded_ids(1)
    a, b = model.encode(first), model.encode(second)
    expected = model.head(torch.cat([a, b, a * b, a - b], -1))
    assert torch.allclose(model(torch.stack([first, second], 1)), expected, atol=1e-6)


def test_parameters_and_macs_of_the_published_model():
    model = sequence_encoder(length=1024, vocabulary=512, num_classes=2)
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 128 + 128 + 64 + 4 * 64
    head = 64 * 128 + 128 + 128 * 2 + 2
    assert sum(value.numel() for value in model.parameters()) == (512 + 1024) * 64 + 2 * layer + 2 * 64 + head
    macs = 2 * 1024 * (4 * 64 * 64 + 2 * 64 * 128 + 2 * 1024 * 64) + 64 * 128 + 128 * 2
    swapped = swap(model, Softmax())
    assert count_macs(swapped, swapped.example_input()) == macs
    assert swapped.blocks[1].attn.mixer.site.grid == Grid.sequence(1024)


@pytest.mark.parametrize("mixer", [None, MiTA(m=4, k=4), "removed"], ids=str)
def test_saved_models_are_the_same(tmp_path, mixer):
    model = remove(built(None)) if mixer == "removed" else built(mixer)
    ids = padded_ids()
    assert torch.equal(load(save(model, tmp_path / "model"))(ids), model(ids))


def test_wrong_shapes_and_options_are_explained():
    model = built(None)
    with pytest.raises(ShapeError, match="at most 66 tokens"):
        model(torch.ones(2, 67, dtype=torch.long))
    with pytest.raises(ShapeError, match="2, tokens"):
        built(None, pairs=True)(padded_ids())
    for option, message in (
        ("heads=3", "not a multiple of 3 heads"),
        ("depth=0", "depth=0: a whole number between 1 and 1000"),
        ("pool='cls'", "pool is one of masked_mean, padded_mean"),
        ("vocabulary=1", "counts padding and a symbol"),
        ("drop=1.0", "fractions below 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_model(f"sequence_encoder({option})", None)
    with pytest.raises(ConfigError, match="it has no 'patch'"):
        create_model("sequence_encoder(patch=2)", None)


def test_initial_losses_are_those_of_a_uniform_guess():
    torch.manual_seed(0)
    model = sequence_encoder(length=96, vocabulary=16).eval()
    scores = model(torch.randint(1, 16, (64, 96)))
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(64) % 10)
    assert abs(loss.item() - math.log(10)) < 0.1
