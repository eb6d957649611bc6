"""Two processes on gloo, for tests of distributed training."""

import os
import socket

import torch
import torch.distributed as dist

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
