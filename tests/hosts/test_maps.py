"""Maps are the weights that the forward pass uses."""

import pytest
import torch

from hosts.small_hosts import spread, swin, vit, xcit
from regard.core import SwapError, UnsupportedError, merge
from regard.hosts.maps import capture
from regard.hosts.swap import swap
from regard.mixers.softmax import Softmax
from regard.mixers.xca import XCA


def test_maps_times_values_are_the_output():
    model, x = vit(5)
    spread(swap(model.eval().double(), Softmax()))
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
    values = mixer.qkv(kept["x"], "v")[0]
    assert torch.allclose(mixer.proj(merge(a.double() @ values)), kept["out"], rtol=1e-4, atol=1e-4)


def test_masks_of_windows_are_in_the_maps():
    model, x = swin()
    swap(model.eval(), Softmax())
    with capture(model) as maps:
        model(x)
    shifted = maps["layers.0.blocks.1.attn"]
    assert shifted.shape[-2:] == (16, 16)
    assert (shifted < 1e-20).any()  # the host's -100 for tokens of another window
    assert not (maps["layers.0.blocks.0.attn"] < 1e-20).any()


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
