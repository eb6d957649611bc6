"""Studies: one file for each table or figure; data, without code that trains. Listing them loads nothing."""

from importlib import import_module
from typing import TYPE_CHECKING

from regard.core import ConfigError, nearest

if TYPE_CHECKING:
    from regard.lab.study import Study

# name -> (module with STUDY, title, source)
STUDIES: dict[str, tuple[str, str, str]] = {
    "quickstart": ("regard.studies.quickstart", "Digits on a canvas", "Regard"),
    "mita_table2": ("regard.studies.mita_table2", "MiTA in DeiT and PVT hosts on ImageNet", "MiTA, Table 2"),
    "ska_table1": ("regard.studies.ska_table1", "Static keys on CIFAR-10 (ViT)", "SKA, Table 1"),
    "sne_table2": ("regard.studies.sne_table2", "Non-linear queries, keys and values", "SNE, Table 2"),
}


def load_study(name: str) -> "Study":
    """Raises: ConfigError for an unknown name, with the nearest ones."""
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}; {nearest(name, STUDIES)}")
    return import_module(STUDIES[name][0]).STUDY


__all__ = ["STUDIES", "load_study"]
