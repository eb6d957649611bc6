"""Pairs (ours, theirs) of outputs: a mechanism and another package with the same weights and inputs, in float64.

Every function imports the package when it is called; `EXTERNAL` in `external/__init__.py` lists them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import mixers
from regard.core import Grid, Mask, Site, heads, merge

Pairs = list[tuple[Tensor, Tensor]]
F64 = torch.float64


def perturb(layer: Any) -> Any:
    """A layer in float64 with perturbed parameters: a zero would hide what it multiplies."""
    layer = layer.double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def copy_weights(theirs: nn.MultiheadAttention, ours: Any) -> None:
    """Copy the weights of torch's attention; without a qkv bias that of queries becomes `u`, of values the output's."""
    width = theirs.embed_dim
    with torch.no_grad():
        ours.qkv.weight.copy_(theirs.in_proj_weight)
        ours.proj.weight.copy_(theirs.out_proj.weight)
        ours.proj.bias.copy_(theirs.out_proj.bias)
        if ours.qkv.bias is not None:
            ours.qkv.bias.copy_(theirs.in_proj_bias)
            return
        ours.proj.bias.add_(theirs.out_proj.weight @ theirs.in_proj_bias[2 * width :])
        if ours.operator.u is not None:
            ours.operator.u.copy_(theirs.in_proj_bias[:width].view_as(ours.operator.u))


# torch


def multihead(layer: Any, grid: Grid, biased: bool = True) -> Pairs:
    """nn.MultiheadAttention, without a mask and with padding. biased: whether its input biases are not 0."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 2, batch_first=True).double()
    nn.init.normal_(theirs.out_proj.bias)
    if biased:
        nn.init.normal_(theirs.in_proj_bias)
    copy_weights(theirs, layer)
    x, keep = torch.randn(3, grid.tokens, 16, dtype=F64), torch.rand(3, grid.tokens) > 0.3
    return [
        (layer(x, grid), theirs(x, x, x, need_weights=False)[0]),
        (layer.reference(x, grid), theirs(x, x, x, need_weights=False)[0]),
        (layer(x, grid, Mask(keep=keep)), theirs(x, x, x, key_padding_mask=~keep, need_weights=False)[0]),
    ]


def softmax_pairs() -> Pairs:
    """Softmax beside nn.MultiheadAttention."""

    grid = Grid(3, 5, 1)
    return multihead(mixers.Softmax().build(Site(16, 2, grid)).double(), grid)


def content_pairs(terms: str = "1010") -> Pairs:
    """Content terms of the factors beside nn.MultiheadAttention: 1010 with u = the bias of queries, 1000 without."""

    grid = Grid(3, 5, 1)
    layer = mixers.Factors(terms=terms, scale=None).build(Site(16, 2, grid, qkv_bias=False)).double()
    return multihead(layer, grid, biased=terms == "1010")


def conv_pairs(kernel: int = 3, groups: int = 2, dilation: int = 1) -> Pairs:
    """Patch tokens of Conv beside nn.Conv2d with zero padding."""

    torch.manual_seed(0)
    grid = Grid(5, 7, 1)
    layer: Any = perturb(mixers.Conv(kernel=kernel, groups=groups, dilation=dilation).build(Site(16, 2, grid)))
    theirs = nn.Conv2d(16, 16, kernel, padding=kernel // 2 * dilation, dilation=dilation, groups=groups).double()
    theirs.load_state_dict(layer.conv.state_dict())
    x = torch.randn(3, grid.tokens, 16, dtype=F64)
    return [(grid.to_map(layer(x, grid))[1], theirs(grid.to_map(x)[1]))]


# timm


def differential_pairs() -> Pairs:
    """The layer beside timm's, the third of a network."""
    from timm.layers.diff_attention import DiffAttention

    torch.manual_seed(0)
    grid = Grid(3, 5, 1)
    ours = perturb(mixers.Differential().build(Site(16, 2, grid, layer=2)))
    theirs: Any = DiffAttention(16, 2, qkv_bias=True, depth=2).double().eval()
    parts = {"qkv": ours.qkv, "proj": ours.proj, "sub_norm": ours.operator.norm}
    state = {f"{name}.{key}": x for name, part in parts.items() for key, x in part.state_dict().items()}
    theirs.load_state_dict(state | {f"lambda_{name}": x for name, x in ours.operator.factor.state_dict().items()})
    x = torch.randn(3, 16, 16, dtype=F64)
    later = torch.ones(16, 16, dtype=torch.bool).triu(1)
    causal = ours(x, grid, mask=Mask(causal=True)), theirs(x, attn_mask=~later)
    return [(ours(x, grid), theirs(x)), causal]


def xca_pairs(qkv_bias: bool = True, fused: bool = True) -> Pairs:
    """XCA beside timm's XCiT, fast and plain."""
    from timm.models.xcit import XCA as Theirs

    torch.manual_seed(0)
    grid = Grid(3, 5)
    theirs: Any = Theirs(24, num_heads=3, qkv_bias=qkv_bias).double()
    theirs.fused_attn = fused
    nn.init.uniform_(theirs.temperature, 0.5, 5.0)
    ours = mixers.XCA().build(Site(24, 3, grid, qkv_bias=qkv_bias)).double()
    state = theirs.state_dict()
    ours.load_state_dict({key.replace("temperature", "operator.temperature"): value for key, value in state.items()})
    x = torch.randn(3, 15, 24, dtype=F64)
    return [(ours(x, grid), theirs(x)), (ours.reference(x, grid), theirs(x))]


def window_pairs(shift: int = 3, sides: tuple[int, int] = (14, 21)) -> Pairs:
    """Window beside timm's Swin, with its table and shift; timm takes a mask of -100 where ours is exact."""
    from timm.models.swin_transformer import SwinTransformerBlock

    torch.manual_seed(0)
    block: Any = SwinTransformerBlock(32, sides, num_heads=2, window_size=7, shift_size=shift, always_partition=True)
    block.double().eval()
    grid = Grid(*sides)
    layer: Any = mixers.Window(size=7, shift=shift).build(Site(32, 2, grid)).double()
    with torch.no_grad():
        block.attn.relative_position_bias_table.normal_()
        layer.qkv.load_state_dict(block.attn.qkv.state_dict())
        layer.proj.load_state_dict(block.attn.proj.state_dict())
        layer.operator.table.copy_(block.attn.relative_position_bias_table.mT.unflatten(1, (13, 13)))
        x = torch.randn(2, grid.cells, 32, dtype=F64)
        return [(layer(x, grid), block._attn(x.unflatten(1, sides)).flatten(1, 2))]


def spread_window_pairs(size: tuple[int, int] = (3, 4), sides: tuple[int, int] = (6, 12)) -> Pairs:
    """Window with the pattern "grid" beside timm's MaxViT, whose rows of qkv are by head."""
    from timm.models import maxxvit

    torch.manual_seed(0)
    config = maxxvit.MaxxVitTransformerCfg(grid_size=size, dim_head=8)
    theirs: Any = maxxvit.PartitionAttentionCl(16, "grid", config).double().eval()
    grid, (rows, columns) = Grid(*sides), size
    layer: Any = mixers.Window(size=size, pattern="grid").build(Site(16, 2, grid)).double()
    with torch.no_grad():
        table = theirs.attn.rel_pos.relative_position_bias_table.normal_()
        layer.operator.table.copy_(table.mT.unflatten(1, (2 * rows - 1, 2 * columns - 1)))
        layer.proj.load_state_dict(theirs.attn.proj.state_dict())
        for name, own in layer.qkv.named_parameters():
            rows_of_heads = theirs.attn.qkv.get_parameter(name.rpartition(".")[2]).unflatten(0, (2, 3, 8))
            own.copy_(rows_of_heads.transpose(0, 1).flatten(0, 2))
        x = torch.randn(3, grid.cells, 16, dtype=F64)
        return [(layer(x, grid), theirs._partition_attn(x.unflatten(1, sides)).flatten(1, 2))]


def pvt_pairs(ratio: int = 2, pool: int = 0) -> Pairs:
    """PVT beside timm's PVTv2, on a rectangular map that the ratio divides."""
    from timm.models.pvt_v2 import Attention

    torch.manual_seed(0)
    theirs: Any = Attention(32, num_heads=2, sr_ratio=ratio, linear_attn=pool > 0).double().eval()
    grid = Grid(8, 10)
    layer: Any = mixers.PVT(ratio=ratio, pool=pool).build(Site(32, 2, grid)).double()
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.cat([theirs.q.weight, theirs.kv.weight]))
        layer.qkv.bias.copy_(torch.cat([theirs.q.bias, theirs.kv.bias]).normal_())
        theirs.q.bias.copy_(layer.qkv.bias[:32])
        theirs.kv.bias.copy_(layer.qkv.bias[32:])
        layer.proj.load_state_dict(theirs.proj.state_dict())
        if theirs.sr is not None:
            theirs.norm.weight.normal_()
            layer.operator.reduce.load_state_dict(theirs.sr.state_dict())
            layer.operator.norm.load_state_dict(theirs.norm.state_dict())
        x = torch.randn(3, grid.tokens, 32, dtype=F64)
        return [(layer(x, grid), theirs(x, (8, 10)))]


# torchvision


def deformable_pairs(
    groups: int = 2, weight_groups: int = 1, masked: bool = True, frame: Mapping[str, Any] | None = None,
    form: Callable[..., Tensor] | None = None,
) -> Pairs:  # fmt: skip
    """deform_conv2d: values, then gradients of every input. frame: stride, padding and dilation. form: ours."""
    import torchvision

    from regard.mixers.convolutions.deformable import deformable_conv

    torch.manual_seed(0)
    frame = frame or {"padding": 1, "stride": 2}
    x = torch.randn(3, 8, 7, 9, dtype=F64)
    weight, bias = torch.randn(4, 8 // weight_groups, 3, 3, dtype=F64), torch.randn(4, dtype=F64)
    out = F.conv2d(x[:, :1], weight[:1, :1], **frame).shape[2:]
    offsets = torch.randn(3, 2 * groups * 9, *out, dtype=F64) * 3
    mask = torch.rand(3, groups * 9, *out, dtype=F64) if masked else None
    leaves = [t.requires_grad_() for t in (x, weight, bias, offsets, mask) if t is not None]
    theirs = torchvision.ops.deform_conv2d(x, offsets, weight, bias, mask=mask, **frame)
    ours = (form or deformable_conv)(x, weight, offsets, mask=mask, bias=bias, **frame)
    grads = (torch.autograd.grad(y.sin().sum(), leaves) for y in (ours, theirs))
    return [(ours, theirs), *zip(*grads, strict=True)]


def sampling_pairs() -> Pairs:
    """DAT's samples: a 1x1 deformable convolution with the identity as its weight samples at cell + offset."""
    import torchvision

    from regard.mixers.dat.dat import sample_points

    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 7)
    y, z = torch.meshgrid(torch.arange(5.0), torch.arange(7.0), indexing="ij")
    points = torch.stack([torch.rand(2, 5, 7) * 4, torch.rand(2, 5, 7) * 6], 1)
    theirs = torchvision.ops.deform_conv2d(x, points - torch.stack([y, z]), torch.eye(3)[:, :, None, None])
    return [(sample_points(x, points.flatten(2).mT), theirs.flatten(2))]


# transformers


def deformable_detr_pairs() -> Pairs:
    """The layer beside transformers' of Deformable DETR on one map, and the operator beside its own on two maps."""
    import transformers
    from transformers.models.deformable_detr import modeling_deformable_detr as detr

    from regard.mixers.deformable_detr import deformable_detr

    torch.manual_seed(0)
    grid, points = Grid(5, 7), 3
    ours = perturb(mixers.DeformableDETR(points=points).build(Site(16, 2, grid)))
    config = transformers.DeformableDetrConfig(d_model=16, num_feature_levels=1, disable_custom_kernels=True)
    theirs = detr.DeformableDetrMultiscaleDeformableAttention(config, 2, points).double()
    with torch.no_grad():
        both = (
            (theirs.value_proj, ours.qkv.linear), (theirs.attention_weights, ours.operator.weight),
            (theirs.output_proj, ours.proj),
        )  # fmt: skip
        for to, of in both:
            to.load_state_dict(of.state_dict())
        for name, offset in ours.operator.offset.named_parameters():
            theirs.sampling_offsets.get_parameter(name).copy_(
                offset.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
            )  # x, y
    x = torch.randn(3, 35, 16, dtype=F64)
    y, z = torch.meshgrid(*((torch.arange(side, dtype=F64) + 0.5) / side for side in (5, 7)), indexing="ij")
    reference = torch.stack([z, y], -1).view(1, 35, 1, 2).expand(3, -1, -1, -1)
    shapes = {"spatial_shapes": torch.tensor([[5, 7]]), "spatial_shapes_list": [(5, 7)], "level_start_index": None}
    layers = ours(x, grid), theirs(x, encoder_hidden_states=x, reference_points=reference, **shapes)[0]
    sides = [(5, 7), (3, 4)]
    maps = [torch.randn(3, 2, 8, *side, dtype=F64) for side in sides]
    place = torch.rand(3, 2, 9, 2, points, 2, dtype=F64) * 1.4 - 0.2  # (y, x) from 0 to 1, also beyond the border
    weights = torch.randn(3, 2, 9, 2 * points, dtype=F64).softmax(-1).unflatten(-1, (2, points))
    value = torch.cat([x.flatten(3).permute(0, 3, 1, 2) for x in maps], 1)
    arguments = place.flip(-1).transpose(1, 2), weights.transpose(1, 2), 64
    expected = detr.MultiScaleDeformableAttention()(value, torch.tensor(sides), sides, None, *arguments)
    cells = place * torch.tensor(sides)[:, None].double() - 0.5
    return [layers, (merge(deformable_detr(maps, cells, weights)), expected)]


def longformer_pairs(window: int = 5, prefix: int = 2) -> Pairs:
    """Neighbourhood on a line beside transformers' Longformer, whose global tokens get the same projections as all."""
    import transformers
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    config = transformers.LongformerConfig(hidden_size=16, num_attention_heads=2, attention_window=[window - 1])
    theirs: Any = LongformerSelfAttention(config, 0).double().eval()
    grid = Grid.sequence(10 * (window - 1) - prefix, prefix)
    layer: Any = mixers.Neighbourhood(window=window, border="cut", table=False).build(Site(16, 2, grid)).double()
    x = torch.randn(3, grid.tokens, 16, dtype=F64)
    first = torch.arange(grid.tokens).expand(3, -1) < prefix
    with torch.no_grad():
        for role in ("query", "key", "value"):
            theirs.get_submodule(f"{role}_global").load_state_dict(theirs.get_submodule(role).state_dict())
        for name in ("weight", "bias"):
            parts = [theirs.get_submodule(role).get_parameter(name) for role in ("query", "key", "value")]
            layer.qkv.get_parameter(name).copy_(torch.cat(parts))
        out = theirs(
            x, 10000.0 * first, is_index_masked=torch.zeros_like(first), is_index_global_attn=first, is_global_attn=True
        )
        return [(layer(x, grid), layer.proj(out[0]))]


def nystrom_pairs(batch: int = 1, number: int = 1, start: str = "matrix") -> Pairs:
    """Nystrom beside transformers' Nystromformer, whose pseudo-inverse starts from one number for the whole batch."""
    import transformers
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    torch.manual_seed(0)
    width = 8 * number
    config = transformers.NystromformerConfig(
        hidden_size=width, num_attention_heads=number, num_landmarks=4, segment_means_seq_len=24, conv_kernel_size=5,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs: Any = NystromformerSelfAttention(config).double().eval()
    grid = Grid(1, 22, 2)
    ours: Any = perturb(mixers.Nystrom(m=4, kernel=5, start=start).build(Site(width, number, grid)))  # type: ignore[arg-type]
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([theirs.query.weight, theirs.key.weight, theirs.value.weight]))
        ours.qkv.bias.copy_(torch.cat([theirs.query.bias, theirs.key.bias, theirs.value.bias]))
        ours.local.weight.copy_(theirs.conv.weight)
        x = torch.randn(batch, 24, width, dtype=F64)
        return [(ours(x, grid), ours.proj(theirs(x)[0]))]


def hashing_pairs(chunk: int = 4, length: int = 24, scale: float | None = 1.0) -> Pairs:
    """One round of Reformer beside transformers', with its buckets; then the buckets, from the same rotations.

    Its logits have no scale, so ours have 1.
    """
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention, ReformerConfig

    from regard.mixers.reformer import LSHPlan, lsh_plan, reformer

    config = ReformerConfig(
        num_attention_heads=2, attention_head_size=8, hidden_size=16, lsh_attn_chunk_length=chunk, num_hashes=1,
        num_buckets=4, lsh_num_chunks_before=1, lsh_num_chunks_after=0, lsh_attention_probs_dropout_prob=0.0,
        is_decoder=False, hash_seed=3, attn_layers=["lsh"], axial_pos_embds=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs: Any = LSHSelfAttention(config, 0).eval().double()
    x = torch.randn(3, length, 16, dtype=F64)
    with torch.no_grad():
        out = theirs(x)
        qk, v = (heads(y, 2) for y in (theirs.query_key(x), theirs.value(x)))
        plan = LSHPlan(out.buckets.view(3, 2, 1, length))
        torch.manual_seed(3)
        rotations = torch.randn(2, 8, 1, 2, dtype=F64)
        buckets = [lsh_plan(qk[:, [head]], rotations[head].permute(1, 0, 2)).buckets for head in range(2)]
        return [
            (merge(reformer(qk, v, plan, chunk, scale=scale)), out.hidden_states),
            (torch.cat(buckets, 1).double(), plan.buckets.double()),
        ]


def transformer_xl_pairs() -> Pairs:
    """Factors as Transformer-XL beside the relative attention of transformers' Wav2Vec2-Conformer."""
    import transformers
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as conformer

    options = transformers.Wav2Vec2ConformerConfig(
        hidden_size=16, num_attention_heads=2, position_embeddings_type="relative", attention_dropout=0.0
    )
    torch.manual_seed(0)
    theirs: Any = conformer.Wav2Vec2ConformerSelfAttention(options).double().eval()
    for weight in (theirs.pos_bias_u, theirs.pos_bias_v):
        nn.init.normal_(weight)
    for linear in (theirs.linear_q, theirs.linear_k, theirs.linear_v, theirs.linear_out):
        nn.init.zeros_(linear.bias)
    length = 11
    x = torch.randn(2, length, 16, dtype=F64)
    positions = conformer.Wav2Vec2ConformerRelPositionalEmbedding(options)(x).double()
    expected = theirs(x, relative_position_embeddings=positions)[0]
    grid = Grid.sequence(length)
    config = mixers.Factors(terms="1111", scale=None, preset="transformer_xl", axes=1)
    ours: Any = config.build(Site(16, 2, grid, qkv_bias=False)).double()
    even = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([theirs.linear_q.weight, theirs.linear_k.weight, theirs.linear_v.weight]))
        ours.proj.weight.copy_(theirs.linear_out.weight)
        ours.proj.bias.zero_()
        ours.operator.u.copy_(theirs.pos_bias_u)
        ours.operator.t.copy_(theirs.pos_bias_v)
        ours.operator.positions_x.copy_(theirs.linear_pos.weight[:, even])
    return [(ours(x, grid), expected)]


# packages of single mechanisms


def linformer_pairs() -> Pairs:
    """Linformer beside the package of that name, every token of one sequence a column of E and F."""
    from linformer.linformer import LinformerSelfAttention  # type: ignore[import-not-found, unused-ignore]

    torch.manual_seed(0)
    grid = Grid.sequence(15)
    theirs: Any = LinformerSelfAttention(16, 15, k=4, heads=2).double().eval()
    layer: Any = mixers.Linformer(m=4).build(Site(16, 2, grid, qkv_bias=False)).double()
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.cat([theirs.to_q.weight, theirs.to_k.weight, theirs.to_v.weight]))
        layer.proj.load_state_dict(theirs.to_out.state_dict())
        for ours, matrix in ((layer.operator.project_k, theirs.proj_k), (layer.operator.project_v, theirs.proj_v)):
            ours.cells.copy_(matrix.mT)
        x = torch.randn(3, 15, 16, dtype=F64)
        return [(layer(x, grid), theirs(x))]


def performer_pairs() -> Pairs:
    """Performer beside performer-pytorch, with the same random features and no epsilon."""
    from performer_pytorch.performer_pytorch import (  # type: ignore[import-not-found, unused-ignore]
        linear_attention,
        softmax_kernel,
    )

    from regard.mixers.performer import performer

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 11, 8, dtype=F64)
    features = torch.randn(16, 8, dtype=F64)
    fq, fk = (
        softmax_kernel(y, projection_matrix=features, is_query=is_query, eps=0.0)
        for y, is_query in ((q, True), (k, False))
    )
    return [(performer(q, k, v, features, eps=0.0), linear_attention(fq, fk, v))]


def linear_pairs() -> Pairs:
    """Linear attention with elu + 1 beside performer-pytorch's product of features, which has no epsilon."""
    from performer_pytorch.performer_pytorch import (  # type: ignore[import-not-found, unused-ignore]
        linear_attention,
    )

    from regard.mixers.linear import linear

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 11, 8, dtype=F64)
    return [(linear(q, k, v, eps=0.0), linear_attention(F.elu(q) + 1, F.elu(k) + 1, v))]
