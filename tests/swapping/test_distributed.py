"""Swapped models under DDP and FSDP2: two processes on gloo train as one does."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from regard.mixers.convolutions.deformable import DeformableConv
from regard.mixers.convolutions.dynamic import DynamicConv
from regard.mixers.factors.factors import Factors
from regard.mixers.mita.mita import MiTA
from regard.mixers.softmax import Softmax
from regard.mixers.spelling import spell
from regard.mixers.static_keys.ska import SKA
from regard.models.create import create_model
from regard.projections.sne import FSNE
from two_processes import free_port, started

DESK = "vit_desk(size=(16, 24), dim=16, depth=2, heads=2)"
STEPS = 3


def build(config):
    torch.manual_seed(0)
    return create_model(DESK, config).double()


def train(model, images):
    """Some steps of gradient descent on images (steps, batch, C, h, w)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in images:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def attended(config):
    """An attended ResNet that uses its attention; batch norms are frozen, as they see other batches on two ranks."""
    torch.manual_seed(0)
    model = create_model("attended_resnet18(stem=1, img_size=16, num_classes=5)", config).double().eval()
    for name, value in model.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.constant_(value, 0.5)
    return model


def work(rank, port, folder, make, config):
    """Train on this rank's images: a model with layers 3 and 4 is sharded by blocks, others are under DDP."""
    started(rank, port)
    model = make(config)
    if hasattr(model, "layer4"):
        for block in [*model.layer3, *model.layer4]:
            fully_shard(block)
        fully_shard(model)
    images = torch.load(Path(folder) / "images.pt")
    trained = model if hasattr(model, "layer4") else DistributedDataParallel(model)
    train(trained, images[:, 2 * rank : 2 * rank + 2])
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(state, Path(folder) / "state.pt")
    dist.destroy_process_group()


def spawned(make, folder, config):
    """Images (steps, batch, C, h, w) that two processes trained on, and the state they ended with."""
    images = torch.randn(STEPS, 4, 3, 16, 24, dtype=torch.float64)
    torch.save(images, folder / "images.pt")
    mp.spawn(work, (free_port(), str(folder), make, config), nprocs=2)
    return images, torch.load(folder / "state.pt")


def agree(model, state):
    for name, value in model.state_dict().items():
        assert torch.allclose(value, state[name], rtol=1e-9, atol=1e-12), name


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [Softmax, SKA])
def test_two_processes_train_as_one_does(tmp_path, mechanism):
    config = mechanism(projection=FSNE(code=4))
    images, state = spawned(build, tmp_path, config)
    model = build(config)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, images)
    assert "regard_shared.0.weight" in state, spell(config)
    assert not torch.equal(state["regard_shared.0.weight"], first["regard_shared.0.weight"])
    agree(model, state)


@pytest.mark.slow
@pytest.mark.parametrize("config", [Factors(), MiTA(m=4, k=4), DeformableConv(), DynamicConv(kernel=3)], ids=spell)
def test_attended_resnets_are_sharded(tmp_path, config):
    images, state = spawned(attended, tmp_path, config)
    model = attended(config)
    gammas = [name for name in model.state_dict() if name.endswith("gamma")]
    train(model, images)
    assert gammas
    assert all(state[name].item() != 0.5 for name in gammas)
    agree(model, state)
