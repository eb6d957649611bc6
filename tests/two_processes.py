"""Two processes on gloo, for tests of distributed training."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

AROUND = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1", "SLURM_PROCID": "x", "RANK": "abc", "MASTER_PORT": "q"}
"""What a scheduler and a broken shell leave in the environment of a run by itself, which takes no notice."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def started(rank: int, port: int) -> None:
    """Join the group, on one thread; called first in each of the two processes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)


def train(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Steps of gradient descent on the mean square of the output, one for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def write_state(model: nn.Module, file: Path) -> None:
    """The first process writes the state, sharded tensors as whole ones; called in each of the two."""
    state = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(state, file)


def check_state(model: nn.Module, file: Path) -> None:
    """The written state is that of a model."""
    torch.testing.assert_close(torch.load(file), dict(model.state_dict()), rtol=1e-9, atol=1e-12)
