"""The translator: layers equal torch's, steps equal whole sequences, mechanisms that cannot are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.core import ConfigError, UnsupportedError
from regard.lab.tasks.translation.networks.seq2seq import DecoderLayer, EncoderLayer, Layer, SelfBranch
from regard.lab.tasks.translation.networks.translator import END, PAD, START, Translator, Writer, translator

CAUSAL = {
    "softmax": {},
    "gated": {"attention": "Softmax(gate=True)"},
    "four factors": {"attention": 'Factors("1111")', "positions": "none"},
    "positions only": {"attention": 'Factors("0001")'},
    "reversed positions": {"attention": 'Factors("0101", sign=-1)'},
    "average": {"attention": 'Factors("0000")'},
    "dynamic": {"attention": "DynamicConv(kernel=3, groups=4)"},
    "unit": {"unit": "DeformableConv(kernel=3, axes=1)", "dirac": False},
    "best keys": {"attention": "TopK(k=2)"},
    "none": {"attention": None},
    "encoder only": {"attention": "MiTA(m=2, k=2)", "decoder": "Softmax()"},
    "cross factors": {"cross": 'Factors("1111")'},
    "cross positions": {"cross": 'Factors("0011")'},
    "cross linear": {"cross": "Linear()"},
    "post-norm": {"norm": "post"},
}  # fmt: skip


def build(**options: Any) -> Translator:
    """A small translator with all parameters away from special values; float64, evaluation mode."""
    torch.manual_seed(0)
    model = translator(30, **{"dim": 16, "depth": 2, "heads": 2, "hidden": 24, **options}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def sentences(*lengths: int) -> Tensor:
    """Of these lengths, the first of which is the largest, by default four of 4 to 9 tokens."""
    lengths = lengths or (9, 5, 7, 4)
    source = torch.randint(3, 30, (len(lengths), lengths[0]), generator=torch.Generator().manual_seed(1))
    for row, length in enumerate(lengths):
        source[row, length - 1], source[row, length:] = END, PAD
    return source


def check_steps(model: Translator, source: Tensor, length: int, moves: dict[int, list[int]], same: bool) -> None:
    """Scores of each next token, with what is kept of those before, equal those of whole sequences. moves: the rows
    that go on after some steps."""
    target = torch.randint(3, 30, (len(source), length), generator=torch.Generator().manual_seed(2))
    target[:, 0] = START
    whole, keep = model(source, target), source != PAD
    writer, order = Writer(model, model.encode(source, keep), keep), torch.arange(len(source))
    for place in range(length):
        torch.testing.assert_close(writer.step(target[order, place]), whole[order, place], rtol=0, atol=1e-10)
        if place in moves:
            order = order[moves[place]]
            writer.select(torch.tensor(moves[place]), same)


@pytest.mark.parametrize("options", CAUSAL.values(), ids=CAUSAL)
def test_steps_equal_the_whole_sequence(options: dict[str, Any]) -> None:
    """Also after sentences have changed places, and one has left."""
    check_steps(build(**options), sentences(), 8, {3: [2, 3, 0]}, False)


def test_sequences_of_one_sentence_change_places() -> None:
    """Two sequences of each sentence: their memory stays, what they wrote is exchanged."""
    swaps = dict.fromkeys(range(6), [1, 0, 2, 3, 5, 4, 7, 6])
    check_steps(build(), sentences().repeat_interleave(2, 0), 6, swaps, True)


@pytest.mark.parametrize(
    "options", [{}, {"cross": 'Factors("1111")'}, {"attention": "DynamicConv(kernel=3, groups=4)"}]
)
def test_one_beam_is_greedy_search(options: dict[str, Any]) -> None:
    model, source = build(depth=1, **options), sentences(3, 2)
    written = model(source, None, 1)
    for row, sentence in enumerate(source):
        alone = sentence[sentence != PAD][None]
        text = [START]
        while len(text) <= 2 * alone.shape[1] + 10 and (text[-1] != END):
            scores = model(alone, torch.tensor([text]))[0, -1]
            scores[[PAD, START]] = -torch.inf
            text.append(int(scores.argmax()))
        expected = [token for token in text[1:] if token != END][: 2 * alone.shape[1] + 9]
        assert written[row].tolist() == expected + [END] * (written.shape[1] - len(expected))


@pytest.mark.parametrize("beam", [2, 4])
def test_a_translation_does_not_depend_on_its_batch(beam: int) -> None:
    model, source = build(depth=1), sentences(4, 2, 3)
    together = model(source, None, beam)
    for row, sentence in enumerate(source):
        alone = model(sentence[sentence != PAD][None], None, beam)[0]
        expected = torch.full_like(together[row], END)
        expected[: len(alone)] = alone
        assert torch.equal(together[row], expected)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_layers_equal_those_of_torch(norm: str) -> None:
    """With copied weights, padding and the causal mask; float64."""
    torch.manual_seed(0)
    layer = Layer(dim=16, heads=4, hidden=24, drop=0.0, attention="Softmax()", cross="Softmax()", norm=norm)  # type: ignore[arg-type]
    ours = (EncoderLayer(layer).double(), DecoderLayer(layer).double())
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm == "pre", "dtype": torch.float64}
    encoder = nn.TransformerEncoderLayer(16, 4, 24, **options)  # type: ignore[arg-type]
    decoder = nn.TransformerDecoderLayer(16, 4, 24, **options)  # type: ignore[arg-type]
    for mine, theirs in zip(ours, (encoder, decoder), strict=True):
        copy_layer(mine, theirs)
    x, memory = torch.randn(3, 7, 16, dtype=torch.float64), torch.randn(3, 5, 16, dtype=torch.float64)
    keep, memory_keep = torch.arange(7) < torch.tensor([[7], [4], [6]]), torch.arange(5) < torch.tensor([[2], [5], [3]])
    expected = encoder(x, src_key_padding_mask=~keep)
    torch.testing.assert_close(ours[0](x, keep)[keep], expected[keep], rtol=0, atol=1e-12)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = decoder(x, memory, tgt_mask=later, memory_key_padding_mask=~memory_keep)
    torch.testing.assert_close(ours[1](x, memory, None, memory_keep), expected, rtol=0, atol=1e-12)


def copy_layer(mine: Any, theirs: Any) -> None:
    """The weights of a torch layer from ours; its biases of q, k and v, which we do not have, become zero."""
    pairs = [(mine.self_attn.attn, theirs.self_attn)]
    norms = [(mine.norm1, theirs.norm1), (mine.norm2, theirs.norm2)]
    if hasattr(mine, "cross_attn"):
        pairs.append((mine.cross_attn, theirs.multihead_attn))
        norms.append((mine.norm3, theirs.norm3))
    with torch.no_grad():
        for attention, other in pairs:
            other.in_proj_weight.copy_(attention.qkv.weight)
            other.in_proj_bias.zero_()
            other.out_proj.load_state_dict(attention.proj.state_dict())
        for norm, other in norms:
            nn.init.normal_(norm.weight)
            other.load_state_dict(norm.state_dict())
        theirs.linear1.load_state_dict(mine.mlp[0].state_dict())
        theirs.linear2.load_state_dict(mine.mlp[3].state_dict())


def test_the_stack_ends_with_a_norm_only_with_pre_norm() -> None:
    assert isinstance(build(norm="post").decoder_norm, nn.Identity)
    assert isinstance(build(norm="pre").encoder_norm, nn.LayerNorm)


def test_absolute_positions_are_an_option() -> None:
    """Without them softmax attention does not know the order of the source; with them, or with E2 and E4, it does."""
    source, target = sentences()[:1], torch.tensor([[START, 5, 6]])
    shuffled = source[:, [3, 0, 6, 1, 2, 7, 5, 4, 8]]
    for options, same in (
        ({"positions": "none"}, True),
        ({"positions": "sine"}, False),
        ({"positions": "none", "attention": 'Factors("0100")'}, False),
    ):
        model = build(**options)
        change = (model(source, target) - model(shuffled, target)).abs().max()
        assert (change < 1e-10) == same, options


def test_padding_changes_nothing() -> None:
    model, source = build(), sentences()
    target = torch.tensor([[START, 5, 6]]).expand(4, 3)
    scores = model(source, target)
    for row, sentence in enumerate(source):
        alone = model(sentence[sentence != PAD][None], target[:1])
        torch.testing.assert_close(scores[row : row + 1], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "shortest"),
    [
        ({}, 1),
        ({"attention": "MiTA(m=4, k=3)", "decoder": "Softmax()"}, 4),
        ({"attention": "Agent(m=9)", "decoder": "Softmax()"}, 9),
        ({"attention": "TopK(k=12)"}, 12),
        ({"cross": "TopK(k=5)"}, 5),
    ],
    ids=str,
)
def test_sentences_shorter_than_a_mechanism_needs_are_filled_up(options: dict[str, str], shortest: int) -> None:
    """Filling up by hand gives the same, for sources and targets of one token too; steps equal the whole sequence."""
    model = build(depth=1, **options)
    assert model.shortest == shortest
    target = torch.tensor([[START, 5, 6, 9, 4]])
    for source in (torch.tensor([[END]]), torch.tensor([[7, 5, END]])):
        scores = model(source, target)
        assert scores.shape == (1, 5, 30)
        more = 20 if "TopK" in str(options) else 0  # pooled landmarks depend on the number of tokens
        padding = (0, max(shortest - source.shape[1], 0) + more)
        torch.testing.assert_close(scores, model(nn.functional.pad(source, padding, value=PAD), target))
        for length in (1, 3):
            torch.testing.assert_close(scores[:, :length], model(source, target[:, :length]))
        filled = model._filled_up(source)
        writer = Writer(model, model.encode(filled, filled != PAD), filled != PAD)
        steps = torch.stack([writer.step(token) for token in target.unbind(1)], 1)
        torch.testing.assert_close(steps, scores)
        written = model(source)
        assert written.shape[1] <= 2 * source.shape[1] + 10


def test_without_attention_the_source_still_arrives_through_cross_attention() -> None:
    model = build(attention=None)
    assert not any(isinstance(module, SelfBranch) for module in model.modules())
    target = torch.tensor([[START, 5, 6]])
    assert (model(sentences()[:1], target) - model(sentences()[1:2, :5], target)).abs().max() > 1e-3


def test_every_parameter_gets_a_gradient() -> None:
    model = translator(30, dim=16, depth=2, heads=2, hidden=24)
    model(sentences(), sentences()).square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "MiTA(m=2, k=2)"}, "cannot be causal"),
        ({"attention": "XCA()"}, "XCA.. cannot mask padding .masks it can apply: none.: not in the encoder"),
        ({"cross": "XCA()"}, "cannot attend to another input"),
        ({"cross": "Agent(m=4)"}, "later tokens change the outputs for earlier ones"),
    ],
    ids=["causal", "padding", "cross", "pooled queries"],
)
def test_mechanisms_that_cannot_are_refused_with_the_reason(options: dict[str, str], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        translator(30, dim=16, heads=2, **options)


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "learned"}, 'positions is "sine" or "none"'),
        ({"norm": "none"}, 'norm is "post" or "pre"'),
        ({"vocabulary": 3}, "vocabulary is above 3"),
        ({"depth": 0}, "depth is at least 1"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translator(**{"vocabulary": 30, "dim": 16, "heads": 2, **options})
