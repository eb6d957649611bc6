"""Swapped models under DDP and FSDP2: two processes on gloo train as one does."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
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
from two_processes import check_state, free_port, started, train, write_state

DESK = "vit_desk(size=(16, 24), dim=16, depth=2, heads=2)"


def build(config):
    torch.manual_seed(0)
    return create_model(DESK, config).double()


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
    model, images = make(config), torch.load(folder / "images.pt")[:, 2 * rank : 2 * rank + 2]
    if hasattr(model, "layer4"):
        for block in [*model.layer3, *model.layer4]:
            fully_shard(block)
        train(fully_shard(model), images)
    else:
        train(DistributedDataParallel(model), images)
    write_state(model, folder / "state.pt")
    dist.destroy_process_group()


def check_two_processes(make, folder, config):
    """Two processes train as one does; the first state of the model, and its last one."""
    images = torch.randn(3, 4, 3, 16, 24, dtype=torch.float64)  # steps, batch, C, h, w
    torch.save(images, folder / "images.pt")
    mp.spawn(work, (free_port(), folder, make, config), nprocs=2)
    model = make(config)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, images)
    check_state(model, folder / "state.pt")
    return first, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [Softmax, SKA])
def test_two_processes_train_as_one_does(tmp_path, mechanism):
    first, last = check_two_processes(build, tmp_path, mechanism(projection=FSNE(code=4)))
    assert not torch.equal(last["regard_shared.0.weight"], first["regard_shared.0.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("config", [Factors(), MiTA(m=4, k=4), DeformableConv(), DynamicConv(kernel=3)], ids=spell)
def test_attended_resnets_are_sharded(tmp_path, config):
    _, last = check_two_processes(attended, tmp_path, config)
    gammas = [value.item() for name, value in last.items() if name.endswith("gamma")]
    assert gammas
    assert 0.5 not in gammas
