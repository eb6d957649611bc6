"""The fused attention: which cases are replaced, and that the result is the same."""

import pytest
import torch
import torch.nn.functional as F

from regard.mixers.shared import sdpa as module
from regard.mixers.shared.sdpa import sdpa


def _inputs(dtype, rows=6, columns=5):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 3, tokens, 8, generator=generator).to(dtype).requires_grad_()
        for tokens in (rows, columns, columns)
    ]


def _mask(kind):
    if kind == "keep":
        return torch.tensor([True, False, True, True, False])[None, None, None, :]
    return torch.linspace(-1, 1, 30).view(6, 5).to(torch.bfloat16) if kind == "bias" else None


@pytest.mark.parametrize("kind", ["none", "keep", "bias"])
def test_training_in_bfloat16_is_the_rounded_float32_result(kind):
    q, k, v = _inputs(torch.bfloat16)
    mask = _mask(kind)
    out = sdpa(q, k, v, attn_mask=mask, scale=0.7)
    out.float().square().sum().backward()
    float32_inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
    float32_mask = mask.float() if kind == "bias" else mask
    exact = F.scaled_dot_product_attention(*float32_inputs, attn_mask=float32_mask, scale=0.7)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.to(torch.bfloat16))
    exact.to(torch.bfloat16).float().square().sum().backward()
    for x, y in zip((q, k, v), float32_inputs, strict=True):
        assert x.grad.dtype == torch.bfloat16
        assert torch.equal(x.grad, y.grad.to(torch.bfloat16))


def test_autocast_does_not_undo_the_float32():
    q, k, v = _inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        inside = sdpa(q, k, v)
    assert torch.equal(inside, sdpa(q, k, v))


@pytest.mark.parametrize("case", ["no gradient", "large", "float32"])
def test_all_other_cases_are_the_fused_kernel(case, monkeypatch):
    q, k, v = _inputs(torch.float32 if case == "float32" else torch.bfloat16)
    if case == "large":
        monkeypatch.setattr(module, "FLOAT32_LOGITS", 0)
    with torch.set_grad_enabled(case != "no gradient"):
        assert torch.equal(sdpa(q, k, v), F.scaled_dot_product_attention(q, k, v))
        graph = sdpa(q, k, v).grad_fn
    assert graph is None or "ToCopy" not in graph.name()


def test_causal():
    q, k, v = _inputs(torch.bfloat16, rows=5)
    float32_inputs = [x.detach().float() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*float32_inputs, is_causal=True).to(torch.bfloat16)
    assert torch.equal(sdpa(q, k, v, is_causal=True), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_few_logits_compiled_are_the_exact_attention(dtype, scale):
    calls = []

    def counted(graph, inputs):
        calls.append([node.target for node in graph.graph.nodes])
        return graph.forward

    q, k, v = _inputs(dtype)
    out = torch.compile(sdpa, backend=counted)(q, k, v, scale=scale)
    out.double().square().sum().backward()
    float32_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*float32_inputs, scale=scale)
    (exact.detach().to(dtype).double() * 2 * exact).sum().backward()
    assert F.scaled_dot_product_attention not in calls[0]
    assert out.dtype == dtype
    allowed = {torch.bfloat16: 2**-8, torch.float32: 5e-6, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(out.double(), exact.to(dtype).double(), rtol=allowed, atol=allowed)
    for x, y in zip((q, k, v), float32_inputs, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=2 * allowed, atol=2 * allowed)


def test_many_logits_compiled_are_the_fused_kernel(monkeypatch):
    monkeypatch.setattr(module, "PLAIN_LOGITS", 29)
    q, k, v = _inputs(torch.float32)
    compiled = torch.compile(sdpa, backend="eager")
    assert torch.equal(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("hidden", [0, 5])
def test_a_trained_bias_is_the_exact_attention_also_where_it_hides_all_keys(dtype, frozen, hidden, monkeypatch):
    plain, compute = [], module._plain
    monkeypatch.setattr(module, "_plain", lambda *given: plain.append(given) or compute(*given))
    inputs = [x.requires_grad_(not frozen) for x in _inputs(dtype)]
    table = torch.linspace(-1, 1, 90).view(1, 3, 6, 5).to(dtype).requires_grad_()
    hides = torch.zeros(2, 1, 6, 5, dtype=torch.bool)
    hides[:, :, 1, :hidden] = hides[0, :, :3, 2] = True
    found = [table, *([] if frozen else inputs)]
    exact = [x.detach().double().requires_grad_() for x in (table, *inputs)]
    out = sdpa(*inputs, attn_mask=table.masked_fill(hides, -torch.inf), scale=0.7)
    expected = F.scaled_dot_product_attention(*exact[1:], attn_mask=exact[0].masked_fill(hides, -torch.inf), scale=0.7)
    assert (out[:, :, 1] == 0).all() == (hidden == 5)
    assert len(plain) == (hidden == 0)  # PyTorch's is for rows without keys
    allowed = {torch.bfloat16: 2**-7, torch.float32: 5e-6, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=allowed, atol=allowed)
    out.double().square().sum().backward()
    (out.detach().double() * 2 * expected).sum().backward()
    for x, y in zip(found, exact, strict=False):
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=2 * allowed, atol=2 * allowed)


def test_a_mask_that_is_trained_under_vmap():
    """Whose tensors do not tell there that they are trained."""
    q, k, v = _inputs(torch.float32)
    bias = torch.randn(2, 3, 6, 5, requires_grad=True)
    mapped = torch.func.vmap(lambda q, k, v, bias: sdpa(q[None], k[None], v[None], attn_mask=bias[None])[0])
    plain = (q @ k.mT * 8**-0.5 + bias).softmax(-1) @ v
    torch.testing.assert_close(mapped(q, k, v, bias), plain)
    gradients = [torch.autograd.grad(out.square().sum(), bias)[0] for out in (mapped(q, k, v, bias), plain)]
    torch.testing.assert_close(*gradients)
