"""Maps are the weights that the forward pass uses."""

import pytest
import torch

from regard.core import ConfigError, SwapError, UnsupportedError, merge
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA
from regard.models.create import create_model
from regard.swapping.capture import capture, with_regard_softmax
from regard.swapping.swap import swap
from small_hosts import VIT, draw_large_weights, swin, vit, xcit


def test_maps_times_values_are_the_output():
    model, x = vit(5)
    draw_large_weights(swap(model.eval().double(), Softmax()))
    mixer = model.blocks[1].attn.regard
    kept = {}
    handle = mixer.register_forward_hook(lambda module, args, output: kept.update(x=args[0], out=output))
    with capture(model, "blocks.1.*") as maps:
        model(x.double())
    handle.remove()
    assert list(maps) == ["blocks.1.attn"]
    a = maps["blocks.1.attn"]
    assert (a.shape, a.dtype) == ((3, 2, 29, 29), torch.float32)
    assert torch.allclose(a.sum(-1), torch.ones(()), atol=1e-5)
    values = mixer.project(kept["x"], "v")[0]
    assert torch.allclose(mixer.proj(merge(a.double() @ values)), kept["out"], rtol=1e-4, atol=1e-4)


def test_a_map_of_training_is_of_the_same_draw_and_leaves_the_random_numbers_alone():
    model, x = vit()
    draw_large_weights(swap(model.train(), MiTA(m=3, k=3, landmarks="random")))
    torch.manual_seed(0)
    expected = model(x), torch.rand(())
    mixer, kept = model.blocks[0].attn.regard, {}
    mixer.register_forward_hook(lambda module, args, output: kept.update(x=args[0], out=output))
    torch.manual_seed(0)
    with capture(model) as maps:
        found = model(x), torch.rand(())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    values = mixer.project(kept["x"], "v")[0]
    assert torch.allclose(mixer.proj(merge(maps["blocks.0.attn"] @ values)), kept["out"], rtol=1e-4, atol=1e-4)


def test_maps_can_be_reduced_as_they_come():
    model, x = vit()
    swap(model.eval(), Softmax())
    with capture(model) as maps:
        model(x)
    with capture(model, reduce=lambda name, weights: (name, weights.max())) as largest:
        model(x)
    assert largest == {name: (name, weights.max()) for name, weights in maps.items()}


@pytest.mark.parametrize(
    "mixer", ["Softmax()", "MiTA(m=4, k=3)", "Agent(m=4)", "Linear()", "TopK(k=3)", "Window(size=3)", "SKA()"]
)
def test_rows_of_chosen_queries_are_those_of_the_maps(mixer: str) -> None:
    model, x = vit()
    draw_large_weights(swap(model.eval(), mixer))
    with capture(model) as maps, torch.no_grad():
        model(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with capture(model, queries=(0, 7)) as rows, mode():
            model(x)
        for name, weights in maps.items():
            torch.testing.assert_close(rows[name], weights[:, :, [0, 7]], rtol=1e-4, atol=1e-5)
    with capture(model, queries=(100,)), pytest.raises(ConfigError, match="queries are numbers of tokens below"):
        model(x)


def test_masks_of_windows_are_in_the_maps():
    model, x = swin()
    swap(model.eval(), Softmax())
    with capture(model) as maps:
        model(x)
    shifted = maps["layers.0.blocks.1.attn"]
    assert shifted.shape[-2:] == (16, 16)
    assert (shifted < 1e-20).any()  # the host's -100 for tokens of another window
    assert not (maps["layers.0.blocks.0.attn"] < 1e-20).any()


def test_maps_of_a_hosts_own_attention_are_drawn_whatever_its_model_returns():
    model, x = vit()
    draw_large_weights(model.eval())
    features = create_model(VIT, None, features_only=True, out_indices=(0, 1), img_size=(32, 48)).eval()
    features.model.load_state_dict(model.state_dict(), strict=False)
    captured = []
    for host in (model, features):
        swapped = with_regard_softmax(host, x)
        with capture(swapped) as maps:
            swapped(x)
        captured.append(list(maps.values()))
    assert all(torch.equal(a, b) for a, b in zip(*captured, strict=True))


@pytest.mark.parametrize("hidden", ["layer scale", "zero projection"])
def test_attention_that_hardly_changes_the_output_is_still_compared(hidden):
    model, x = xcit()
    for block in model.eval().blocks:
        if hidden == "layer scale":
            block.gamma1.data.fill_(1e-5)
        else:
            block.attn.proj.requires_grad_(False).weight.zero_()
            block.attn.proj.bias.zero_()
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.attn of Xcit has an attention of its own"):
        with_regard_softmax(model, x)
    model, x = vit()
    for block in model.eval().blocks:
        block.attn.proj.requires_grad_(False).weight.zero_()
    assert with_regard_softmax(model, x) is not model


def test_an_empty_place_has_no_maps():
    """gamma of what is read there is zero, which would hide it."""
    host = "attended_resnet18(channels=(8, 16, 32, 64), stem=1, img_size=16, heads=2, num_classes=5)"
    with pytest.raises(UnsupportedError, match=r"layer3\.0\.attn of ResNet has an attention of its own"):
        with_regard_softmax(create_model(host, None).eval(), torch.randn(1, 3, 16, 16))


def test_nothing_is_left_behind():
    model, x = vit()
    swap(model, Softmax())
    with capture(model) as maps:
        pass
    model(x)
    assert not maps
    assert not any(block.attn.regard._forward_hooks for block in model.blocks)


def test_what_has_no_maps_is_said():
    model, _ = xcit()
    swap(model, XCA())
    with pytest.raises(UnsupportedError, match="XCA has no weights between tokens"), capture(model):
        pass
    with pytest.raises(SwapError, match="nothing is swapped"), capture(vit()[0]):
        pass


@pytest.mark.untyped
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_captured_whenever_it_was_compiled(in_place: bool) -> None:
    model, x = vit()
    compiled = swap(model.eval(), Softmax())
    if in_place:
        model.compile(backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(x)
        with capture(compiled) as maps:
            inside = compiled(x)
    assert len(maps) == len(model.blocks)
    assert torch.allclose(inside, before, atol=1e-5)
