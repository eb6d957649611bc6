"""Where the runs of a study are executed, by the word that `regard study run --on` takes."""

from collections.abc import Sequence

from regard.core import ConfigError, nearest

from .base import Place
from .ray_cluster import RayCluster, without_password
from .slurm import Slurm

WORDS = ("local", "ray", "slurm")
"""The words of the places; what follows "ray://" is an address. "print" of the command line executes nothing."""


def find_place(
    word: str, *, workers: int | None = None, cpus: int | None = None, memory: float | None = None,
    nodes: int = 1, options: Sequence[tuple[str, str]] = (),
) -> Place:  # fmt: skip
    """The place of a word: "local", "ray", "ray://HOST:PORT" or "slurm".

    workers: of "local". cpus, memory: cores and GB of each run on a cluster. nodes: of each run on Slurm. options: of
    Slurm, (name, value).
    Raises: ConfigError for an unknown word, and for a choice that the place does not have.
    """
    name, slashes, address = word.partition("://")
    shown = without_password(word)
    if name not in WORDS or (slashes and name != "ray"):
        raise ConfigError(f"there is no place {shown!r} to run; {nearest(shown, (*WORDS, 'ray://HOST:PORT', 'print'))}")
    if nodes > 1 and name != "slurm":
        raise ConfigError(
            f"--nodes {nodes} needs a scheduler: take --on slurm, or train one run with: torchrun --nnodes {nodes} "
            "--nproc-per-node DEVICES --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m regard train ..."
        )
    given = {"--workers": workers, "--cpus": cpus, "--memory": memory, "--slurm": options or None}
    taken = {"local": ("--workers",), "ray": ("--cpus", "--memory"), "slurm": ("--cpus", "--memory", "--slurm")}[name]
    if wrong := [option for option, value in given.items() if value is not None and option not in taken]:
        raise ConfigError(f"--on {shown} takes {' and '.join(taken)}: leave out {', '.join(wrong)}")
    if name == "local":
        from .local import Local  # it imports torch

        return Local(workers=workers)
    if name == "ray":
        return RayCluster(address=address, cpus=1 if cpus is None else cpus, memory=memory or 0.0)
    return Slurm(cpus=1 if cpus is None else cpus, memory=memory or 0.0, nodes=nodes, options=tuple(options))
