"""Translation blocks: what may be seen, what padding may change, and any mechanism in the place of self-attention."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard.core import ConfigError, Grid, MixerConfig, ShapeError, UnsupportedError
from regard.lab.tasks.translation.networks.seq2seq import UNIT, DecoderLayer, EncoderLayer, Layer, on_sequences, stack
from regard.mixers.convolutions.conv import Conv
from regard.mixers.convolutions.deformable import DeformableConv
from regard.mixers.convolutions.dynamic import DynamicConv
from regard.mixers.factors.factors import Factors
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell

SMALL = Layer(dim=16, heads=2, hidden=24, drop=0.0, length=9)
CAUSAL: list[MixerConfig] = [Factors(terms="1111"), Factors(terms="0011"), Softmax(), DynamicConv(kernel=5, groups=4)]
UNITS = {"plain": None, "deformable": UNIT}


def spread(model: nn.Module) -> nn.Module:
    """Offsets, biases and Dirac weights away from their special first values; float64, evaluation mode."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def tokens(number: int, seed: int = 0) -> Tensor:
    return torch.randn(3, number, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_an_encoder_sees_both_sides() -> None:
    layer = spread(EncoderLayer(replace(SMALL, attention=DynamicConv(kernel=5, groups=4), unit=UNIT)))
    x = tokens(9)
    later = x.clone()
    later[:, 6] += 1
    assert (layer(later)[:, 4] - layer(x)[:, 4]).abs().max() > 1e-3


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("attention", CAUSAL, ids=spell)
def test_padded_tokens_change_nothing(attention: MixerConfig, unit: object) -> None:
    """Neither their values nor, but for dynamic convolution's softmax and its zero taps, their number."""
    layer = replace(SMALL, attention=attention, unit=unit)
    encoder, decoder = spread(EncoderLayer(layer)), spread(DecoderLayer(layer))
    x, memory = tokens(9), tokens(7, 1)
    keep, memory_keep = torch.arange(9).expand(3, 9) < 6, torch.arange(7).expand(3, 7) < 5
    dirty, dirty_memory = x.clone(), memory.clone()
    dirty[:, 6:], dirty_memory[:, 5:] = 7.0, -9.0
    a, b = encoder(x, keep), encoder(dirty, keep)
    torch.testing.assert_close(a[:, :6], b[:, :6], rtol=0, atol=1e-12)
    torch.testing.assert_close(a[:, :6], encoder(x[:, :6]), rtol=0, atol=1e-11)
    c, d = decoder(x, memory, keep, memory_keep), decoder(dirty, dirty_memory, keep, memory_keep)
    torch.testing.assert_close(c[:, :6], d[:, :6], rtol=0, atol=1e-12)
    torch.testing.assert_close(c[:, :6], decoder(x[:, :6], memory[:, :5]), rtol=0, atol=1e-11)
    assert c.isfinite().all()
    assert d.isfinite().all()


def test_cross_attention_knows_the_place_of_source_and_target() -> None:
    """With E4 alone the weights depend on source index - target index and on nothing else."""
    layer = spread(DecoderLayer(replace(SMALL, attention=None, cross=Factors(terms="0001"))))
    cross = layer.cross_attn
    weights = cross.operator.weights(None, None, torch.zeros(1, 2, 7, 8, dtype=torch.float64),
                                     grid=Grid.sequence(4), memory=Grid.sequence(7))[0, 0]  # fmt: skip
    logits = weights.log()
    for delta in (-1, 1, 2):  # differences of logits along a row depend on delta alone
        steps = torch.stack([logits[i, i + delta + 1] - logits[i, i + delta] for i in (1, 2, 3)])
        torch.testing.assert_close(steps, steps[:1].expand(3), rtol=0, atol=1e-10)
    assert (logits - logits[:1]).abs().max() > 1e-3


def test_the_unit_starts_as_the_identity() -> None:
    """Section 4.2: the branch starts as the plain Transformer's."""
    for make, more in ((EncoderLayer, ()), (DecoderLayer, (tokens(6, 1),))):
        with_unit = make(replace(SMALL, unit=UNIT)).double().eval()
        plain = make(SMALL).double().eval()
        plain.load_state_dict(with_unit.state_dict(), strict=False)
        torch.testing.assert_close(with_unit(tokens(9), *more), plain(tokens(9), *more), rtol=0, atol=1e-12)


def test_every_parameter_gets_a_gradient() -> None:
    torch.manual_seed(0)
    layer = replace(SMALL, attention=DynamicConv(kernel=3, groups=4), unit=UNIT, drop=0.1)
    encoder, decoder = stack(EncoderLayer, layer, 2), stack(DecoderLayer, layer, 2)
    memory, x = tokens(7).float(), tokens(9).float()
    for one in encoder:
        memory = one(memory)
    for one in decoder:
        x = one(x, memory)
    x.square().sum().backward()
    names = {name for model in (encoder, decoder) for name, p in model.named_parameters() if p.grad is None}
    assert not names
    assert encoder[0].self_attn.unit.conv.offset.weight.grad.abs().max() > 0
    assert encoder[0].self_attn.unit.conv.lr_scale() == {"offset.weight": 0.1, "offset.bias": 0.1}


def test_dropout_is_on_in_training_only() -> None:
    layer = EncoderLayer(replace(SMALL, drop=0.5)).double()
    x = tokens(9)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_base_transformer_size() -> None:
    """Six layers of width 512 without q, k, v biases, with four factors: projections, positions, u, t, MLP, norms."""
    each = 4 * 512**2 + 512 + 512 * 512 + 2 * 512 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512
    assert sum(p.numel() for p in EncoderLayer(Layer()).parameters()) == each


@pytest.mark.untyped
def test_wrong_use_says_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match="window=5.* cannot attend to another input; give a cross= that can"):
        replace(SMALL, cross=Factors(terms="1111", window=5))
    with pytest.raises(ConfigError, match="needs unit=None"):
        replace(SMALL, attention=None, unit=UNIT)
    assert replace(SMALL, unit="DeformableConv(version=2)").unit == DeformableConv(version=2)
    for unit in (Conv(), True):
        with pytest.raises(ConfigError, match=r"unit is a configuration such as DeformableConv\(axes=1\), not"):
            replace(SMALL, unit=unit)
    with pytest.raises(ConfigError, match="drop is a fraction"):
        replace(SMALL, drop=1.0)
    with pytest.raises(ShapeError, match="expected bool"):
        EncoderLayer(SMALL)(torch.randn(3, 9, 16), torch.ones(3, 8, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"memory has shape .* expected \(batch, tokens, 16\)"):
        DecoderLayer(SMALL)(torch.randn(3, 9, 16), torch.randn(3, 9, 12))
    assert on_sequences(DynamicConv(kernel=3), causal=True) == DynamicConv(kernel=3, axes=1, causal=True)
