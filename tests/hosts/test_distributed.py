"""Shared codes under DDP: two processes on gloo train as one does."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from regard.hosts.swap import create_model
from regard.mixers.ska import SKA
from regard.mixers.softmax import Softmax
from regard.mixers.spell import spell
from regard.projections.sne import FSNE

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


def work(rank, port, folder, config):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(build(config))
    images = torch.load(Path(folder) / "images.pt")
    train(model, images[:, 2 * rank : 2 * rank + 2])
    if rank == 0:
        torch.save(model.module.state_dict(), Path(folder) / "state.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [Softmax, SKA])
def test_two_processes_train_as_one_does(tmp_path, mechanism):
    config = mechanism(projection=FSNE(code=4))
    images = torch.randn(STEPS, 4, 3, 16, 24, dtype=torch.float64)
    torch.save(images, tmp_path / "images.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path), config), nprocs=2)
    model = build(config)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, images)
    state = torch.load(tmp_path / "state.pt")
    assert "regard_shared.0.weight" in state, spell(config)
    assert not torch.equal(state["regard_shared.0.weight"], first["regard_shared.0.weight"])
    for name, value in model.state_dict().items():
        assert torch.allclose(value, state[name], rtol=1e-9, atol=1e-12), name
