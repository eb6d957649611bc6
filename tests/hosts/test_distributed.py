"""Shared codes under DDP: two processes on gloo give the gradients of one."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from regard.hosts.swap import create_model
from regard.mixers.softmax import Softmax
from regard.projections.sne import FSNE

DESK = "vit_desk(size=(16, 24), dim=16, depth=2, heads=2)"


def build():
    torch.manual_seed(0)
    return create_model(DESK, Softmax(projection=FSNE(code=4))).double()


def work(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(build())
    x = torch.load(Path(folder) / "x.pt")
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    if rank == 0:
        torch.save({name: value.grad for name, value in model.module.named_parameters()}, Path(folder) / "grads.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_give_the_gradients_of_one(tmp_path):
    x = torch.randn(4, 3, 16, 24, dtype=torch.float64)
    torch.save(x, tmp_path / "x.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path)), nprocs=2)
    model = build()
    model(x).square().mean().backward()
    grads = torch.load(tmp_path / "grads.pt")
    assert "regard_shared.0.weight" in grads
    for name, value in model.named_parameters():
        assert torch.allclose(value.grad, grads[name], rtol=1e-9, atol=1e-12), name
