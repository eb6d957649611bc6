"""Attended residual blocks: nothing changes at insertion, attention is where the figure has it, it can be swapped."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d

from regard.core import ConfigError, Grid, SwapError
from regard.lab.train.optimizer import param_groups
from regard.mixers.convolutions.conv import Conv
from regard.mixers.convolutions.deformable import DeformableConv, DeformableConv2d
from regard.mixers.convolutions.dynamic import DynamicConv
from regard.mixers.factors.factors import Factors
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.static_keys.ska import SKA
from regard.mixers.xca import XCA
from regard.models.attended_block import BLOCKS, Attended, Slot
from regard.models.create import create_model
from regard.models.resnet import attend, blocks_of
from regard.models.saving import load, save
from regard.projections.sne import FSNE
from regard.swapping.swap import remove, restore, retune, swap

TV = torchvision.models.resnet
E0110 = Factors(terms="0110")
HOST = "attended_resnet18(channels=(8, 16, 32, 64), stem=1, img_size=16, heads=2, num_classes=5, zero_init_last=False)"
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "torchvision basic": lambda: TV.ResNet(TV.BasicBlock, [1, 1, 2, 1], num_classes=5),
    "torchvision bottleneck": lambda: TV.ResNet(TV.Bottleneck, [1, 1, 2, 1], num_classes=5),
    "timm basic": lambda: timm.create_model("resnet18", num_classes=5, channels=(16, 24, 32, 48)),
    "timm bottleneck": lambda: timm.create_model("resnet26", num_classes=5, channels=(16, 24, 32, 48)),
    "timm, antialiased, squeezed": lambda: timm.create_model(
        "resnet26", num_classes=5, channels=(16, 24, 32, 48), aa_layer=nn.AvgPool2d, block_args={"attn_layer": "se"}
    ),
    "timm, drop path": lambda: timm.create_model("resnet18", channels=(16, 24, 32, 48), drop_path_rate=0.3),
}


def image(height: int = 64, width: int = 96) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(3))


def resnet_of(name: str, training: bool = False) -> nn.Module:
    """A network with weights and statistics of its own: timm's last norms start at zero, which would hide attention."""
    torch.manual_seed(0)
    model = NETWORKS[name]().train(training)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model


def attended(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Attended)]


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", NETWORKS)
def test_output_is_bit_identical_at_insertion(name: str, training: bool) -> None:
    plain, model = resnet_of(name, training), resnet_of(name, training)
    attend(model, E0110, heads=4, example=image())
    for network in (plain, model):
        torch.manual_seed(5)  # drop path
        network.result = network(image())
    assert torch.equal(model.result, plain.result)
    for key, value in plain.state_dict().items():  # the same names, weights and running statistics
        assert torch.equal(model.state_dict()[key], value), key
    new = set(model.state_dict()) - set(plain.state_dict())
    assert new
    assert all(".attn." in key and key.startswith(("layer3.", "layer4.")) for key in new)
    model.load_state_dict(plain.state_dict(), strict=False)  # a plain checkpoint fits


@pytest.mark.parametrize("name", ["torchvision basic", "torchvision bottleneck", "timm basic", "timm bottleneck"])
def test_attention_follows_the_norm_and_relu_of_the_3x3_convolution(name: str) -> None:
    """Figure 2a. By hand, from the block's own layers; gamma is not zero."""
    model = attend(resnet_of(name).double(), E0110, heads=4, example=image())
    block = model.layer4[0]
    nn.init.constant_(block.attn.gamma, 0.7)
    x = torch.randn(2, block.conv1.in_channels, 6, 10, dtype=torch.float64)
    steps = [block.bn1(block.conv1(x)).relu()]
    if hasattr(block, "conv3"):
        steps.append(block.bn2(block.conv2(steps[-1])).relu())
    assert steps[-1].shape[-2:] == (3, 5)  # at the block's reduced resolution
    out = steps[-1] + 0.7 * block.attn.mixer(steps[-1].flatten(2).mT, Grid(3, 5)).mT.unflatten(-1, (3, 5))
    last = block.bn3(block.conv3(out)) if hasattr(block, "conv3") else block.bn2(block.conv2(out))
    torch.testing.assert_close(block(x), (last + block.downsample(x)).relu(), rtol=0, atol=1e-12)


def test_a_gamma_without_dimensions_is_read() -> None:
    """Weights of before: a scalar stands for the one number that gamma is now."""
    model = attend(resnet_of("timm basic"), Factors())
    state = {name: value[0] + 0.5 if name.endswith("gamma") else value for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert [value.tolist() for name, value in model.named_parameters() if name.endswith("gamma")] == [[0.5]] * 4


@pytest.mark.parametrize("name", ["torchvision bottleneck", "timm basic"])
def test_deformable_convolution_takes_the_weights_and_changes_nothing(name: str) -> None:
    plain, model = resnet_of(name).double(), resnet_of(name).double()
    attend(model, None, deformable=True)
    torch.testing.assert_close(model(image().double()), plain(image().double()), rtol=0, atol=1e-11)
    moved = [module for module in model.modules() if isinstance(module, DeformableConv2d)]
    assert len(moved) == sum(len(getattr(model, f"layer{stage}")) for stage in (3, 4))
    assert set(plain.state_dict()) <= set(model.state_dict())
    total = sum(len(group["params"]) for group in param_groups(model, 0.05) if group.get("lr_scale") == 0.1)
    assert total == 2 * len(moved)
    rates = torch.optim.SGD(param_groups(model, 0.05, lr=0.5)).param_groups
    assert sum(len(group["params"]) for group in rates if group["lr"] == 0.05) == total
    assert not any("lr_scale" in group for group in rates)


@pytest.mark.parametrize(
    "mixer",
    [
        Softmax(),
        SKA(),
        MiTA(m=2, k=2),
        XCA(),
        Conv(),
        DeformableConv(),
        DynamicConv(groups=4),
        Softmax(projection=FSNE()),
    ],
    ids=str,
)
def test_any_mechanism_and_any_size(mixer: object) -> None:
    torch.manual_seed(0)
    model = create_model(HOST, mixer)
    y = model(torch.randn(2, 3, 16, 16))
    y.sum().backward()
    gammas = [layer.gamma for layer in attended(model)]
    assert len(gammas) == 4
    assert all(gamma.grad is not None for gamma in gammas)
    if not isinstance(mixer, SKA):  # static keys have a grid, other sizes are asked for with resize=
        assert model(torch.randn(1, 3, 24, 40)).shape == (1, 5)


def test_a_second_attend_gives_what_it_is_asked() -> None:
    """Another mechanism with weights that fit, another number of heads, empty slots; a failure changes nothing."""
    model, x = resnet_of("torchvision basic"), image()
    expected = model(x)
    attend(model, E0110, heads=4, example=x)
    block = model.layer3[0]
    nn.init.constant_(block.attn.gamma, 0.5)
    output = block.attn.mixer.proj.weight
    attend(model, Factors("1111"), heads=8, example=x)
    assert {layer.mixer.site.heads for layer in attended(model)} == {8}
    assert block.attn.mixer.operator.u.shape == (8, output.shape[0] // 8)
    assert torch.equal(block.attn.mixer.proj.weight, output)
    assert block.attn.gamma.item() == 0.5
    with pytest.raises(ConfigError, match="groups do not divide"):
        attend(model, DynamicConv(groups=7), heads=2, example=x)
    assert {layer.host.heads for layer in attended(model)} == {8}
    attend(model, None, stages=(4,), heads=2)
    assert isinstance(model.layer4[0].attn, Slot)
    assert model.layer4[0].attn.heads == 2
    assert isinstance(block.attn, Attended)
    attend(model, None)
    assert not attended(model)
    assert torch.equal(model(x), expected)


def test_deformable_convolutions_keep_their_options() -> None:
    model = attend(resnet_of("torchvision basic"), None, deformable="DeformableConv(version=2)")
    conv = model.layer4[0].conv1
    assert conv.options == DeformableConv(version=2)
    for same in (True, False, DeformableConv(version=2)):
        attend(model, None, deformable=same)
        assert model.layer4[0].conv1 is conv
    with pytest.raises(SwapError, match=r"layer3.0.conv1 is a DeformableConv.version=2. already.*deformable=True"):
        attend(model, E0110, deformable=DeformableConv(groups=2), example=image())
    assert isinstance(model.layer4[0].attn, Slot)


def test_what_was_frozen_stays_frozen() -> None:
    model = resnet_of("timm basic").requires_grad_(False)
    attend(model, E0110, heads=4, deformable=True, example=image())
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning
    assert all(".attn." in name or ".offset." in name for name in learning)
    model = attend(resnet_of("timm basic"), None, deformable=True)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_copies_pickles_and_folders(tmp_path: Path) -> None:
    model = create_model(HOST.replace("heads=2", "heads=2, deformable=True"), E0110).eval()
    for layer in attended(model):
        nn.init.constant_(layer.gamma, 0.5)
    x = torch.randn(2, 3, 16, 24)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    loaded = load(save(model, tmp_path / "saved"))
    for other in (copied, pickled, loaded):
        assert torch.equal(other(x), model(x))
    nn.init.constant_(attended(copied)[0].gamma, 9.0)
    assert attended(model)[0].gamma.item() == 0.5


def test_slots_are_swapped_removed_restored_and_retuned() -> None:
    plain = create_model(HOST, None).eval()
    x = torch.randn(2, 3, 16, 24)
    count = sum(p.numel() for p in plain.parameters())
    expected = plain(x)
    model = swap(plain, MiTA(m=2, k=2))
    for layer in attended(model):
        nn.init.constant_(layer.gamma, 0.5)
    assert not torch.equal(model(x), expected)
    retune(model, k=4)
    swap(model, E0110)
    assert [layer.gamma.item() for layer in attended(model)] == [0.5] * 4  # a learned gamma goes on
    remove(model)
    assert torch.equal(model(x), expected)
    assert sum(p.numel() for p in model.parameters()) == count  # "w/o" has not even gamma
    restore(model)
    assert isinstance(model.layer3[0].attn, Slot)
    assert torch.equal(model(x), expected)


def test_gamma_and_vectors_have_no_decay() -> None:
    model = create_model(HOST, Factors(terms="1111"))
    layer = model.layer3[0].attn
    assert layer.no_weight_decay() == {"gamma", "regard.operator.u", "regard.operator.t"}
    without = {id(p) for group in param_groups(model, 0.05) if group["weight_decay"] == 0 for p in group["params"]}
    assert {id(layer.gamma), id(layer.mixer.operator.u), id(layer.mixer.operator.t)} <= without
    assert id(layer.mixer.proj.weight) not in without


def test_gradient_reaches_all_once_gamma_is_not_zero() -> None:
    """Section 1.4: with gamma at zero the first step moves gamma alone."""
    model = attend(resnet_of("torchvision bottleneck"), E0110, heads=4, example=image())
    layer = model.layer3[0].attn
    model(image()).square().sum().backward()
    assert float(layer.gamma.grad) != 0
    assert float(layer.mixer.proj.weight.grad.abs().max()) == 0
    nn.init.constant_(layer.gamma, 0.1)
    model(image()).square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for name, p in layer.named_parameters() if name != "regard.proj.bias")


def test_pyramids_and_features() -> None:
    """timm's features_only, torchvision's FPN backbone with frozen norms; the pyramid's outputs stay."""
    backbone = torchvision.models.detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=3
    ).eval()
    before = backbone(image())
    attend(backbone, E0110, example=image())
    after = backbone(image())
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert isinstance(backbone.fpn, FeaturePyramidNetwork)
    assert len(attended(backbone)) == 4
    options = {"features_only": True, "out_indices": (2, 3, 4), "channels": (8, 16, 32, 64)}
    pyramid = create_model("attended_resnet18(heads=2, img_size=(64, 96))", E0110, **options)
    assert [tuple(y.shape) for y in pyramid(image())] == [(2, 16, 8, 12), (2, 32, 4, 6), (2, 64, 2, 3)]
    assert pyramid.feature_info.channels() == [16, 32, 64]
    assert len(attended(pyramid)) == 4


@pytest.mark.untyped
def test_traced_features() -> None:
    """torchvision's `create_feature_extractor`, whose tracer leaves the named layers whole."""
    model = attend(resnet_of("torchvision basic"), None)
    create_feature_extractor(model, ["layer4"])
    assert copy.deepcopy(model).layer4[0].attn.grid_size == (1, 1)  # nothing of the tracer is kept
    attend(model, E0110, deformable=True, heads=4, example=image())
    options = {"leaf_modules": [Attended, DeformableConv2d]}
    features = create_feature_extractor(model, ["layer3", "layer4", "fc"], tracer_kwargs=options)(image(48, 32))
    assert [tuple(features[name].shape) for name in ("layer3", "layer4")] == [(2, 256, 3, 2), (2, 512, 2, 1)]
    assert torch.equal(features["fc"], model(image(48, 32)))


@pytest.mark.untyped
def test_compiled_without_breaks() -> None:
    model = attend(resnet_of("timm basic"), E0110, heads=4, example=image())
    torch._dynamo.reset()
    compiled = torch.compile(model.layer4[0], fullgraph=True, backend="eager")
    x = torch.randn(2, model.layer4[0].conv1.in_channels, 6, 10)
    torch.testing.assert_close(compiled(x), model.layer4[0](x))


STAGES = r"attend: stages is .*a list \(each entry a whole number\) is expected"
MOVING = "attend: deformable is .*True or False, a string or a DeformableConv is"
WRONG: list[tuple[type[Exception], str, dict[str, object]]] = [
    (SwapError, "no stage 5, 7; it has 1, 2, 3, 4", {"stages": (4, 5, 7)}),
    (SwapError, "stages is empty", {"stages": ()}),
    *((ConfigError, STAGES, {"stages": stages}) for stages in (3, "34", ("layer3",), (3.0,), None)),
    *(
        (
            ConfigError,
            f"{list(taken)[-1]}=.*these come from the replaced convolution",
            {"deformable": DeformableConv(**taken)},
        )
        for taken in ({"kernel": 5}, {"dilation": 3}, {"extra": "zero"}, {"axes": 1}, {"axes": 1, "causal": True})
    ),
    (ConfigError, "is True, False or a DeformableConv with its options, not 'Conv", {"deformable": "Conv()"}),
    *((ConfigError, MOVING, {"deformable": deformable}) for deformable in (1, Conv())),
    *((ConfigError, f"layer3.0 has 256 channels, not a multiple of {n}; give another", {"heads": n}) for n in (7, 0)),
    (ConfigError, r"attend: heads is 2\.0; a whole number is expected", {"heads": 2.0}),
    (ConfigError, "attend: mixer is 3; a MixerConfig, a string or None is expected", {"mixer": 3}),
    # refused after the slots were opened
    (ConfigError, "groups do not divide", {"mixer": DynamicConv(groups=7), "deformable": True, "example": image()}),
]


@pytest.mark.untyped
def test_wrong_use_leaves_the_model_alone() -> None:
    model = resnet_of("torchvision basic")
    expected, keys = model(image()), list(model.state_dict())
    for error, message, options in WRONG:
        with pytest.raises(error, match=message):
            attend(model, **{"mixer": E0110, **options})  # type: ignore[arg-type]
    assert list(model.state_dict()) == keys
    assert {type(block) for block in model.layer4} <= set(BLOCKS)
    assert torch.equal(model(image()), expected)
    for name, message in (("vit_tiny_patch16_224", "not a ResNet"), ("res2net50_26w_4s", "layer3.0 is a Bottle2neck")):
        with pytest.raises(SwapError, match=message):
            attend(timm.create_model(name), E0110)
    for options in ({"stem": 3}, {"img_size": 0}, {"img_size": "24"}, {"img_size": (24, 24, 3)}):
        with pytest.raises(ConfigError, match="stem is 4" if "stem" in options else "img_size"):
            create_model("attended_resnet18", None, **options)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_parallel_attention_gets_the_input_of_the_convolution(name: str) -> None:
    model = attend(timm.create_model(name, num_classes=3), "Factors()", (4,), parallel=True).eval()
    images = torch.randn(1, 3, 64, 64)
    seen: dict[str, Tensor] = {}
    blocks = dict(blocks_of(model, (4,)))
    for label, block in blocks.items():
        spatial = block.conv1 if name == "resnet18" else block.conv2
        spatial.register_forward_pre_hook(lambda _, x, label=label: seen.update({f"{label} conv": x[0]}))
        block.attn.mixer.register_forward_pre_hook(lambda _, x, label=label: seen.update({f"{label} attn": x[0]}))
        torch.nn.init.ones_(block.attn.gamma)
    model(images)
    first, *others = blocks
    assert seen[f"{first} attn"].shape[1] != seen[f"{first} conv"].flatten(2).shape[2]  # a stride: after it
    for label in others:
        assert torch.equal(seen[f"{label} attn"], seen[f"{label} conv"].flatten(2).mT)
    for block in blocks.values():
        block.attn.host.parallel = False
    model(images)
    assert not torch.equal(seen[f"{others[0]} attn"], seen[f"{others[0]} conv"].flatten(2).mT)


@pytest.mark.parametrize("features_only", [False, True])
def test_a_frozen_resnet_trains_the_later_stages_and_the_attention_alone(features_only: bool) -> None:
    model = create_model("attended_resnet18(frozen=True)", Softmax(), features_only=features_only)
    assert not [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[0] for name in trained} - {"fc"} == {"layer2", "layer3", "layer4"}
    assert [name for name in trained if ".attn." in name]
    before = {name: value.clone() for name, value in model.named_buffers()}
    model.train()(torch.randn(2, 3, 64, 64))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
