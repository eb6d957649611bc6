"""Studies and analyses: one file for each table or figure, or for a few that belong together. Listing loads nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.core import ConfigError, nearest

if TYPE_CHECKING:
    from regard.lab.analysis import Analysis
    from regard.lab.study import Study

# name -> (module with STUDY or ANALYSIS, or module:name, title, source)
STUDIES: dict[str, tuple[str, str, str]] = {
    "quickstart": ("regard.studies.quickstart", "Digits on a canvas", "Regard"),
    "mita_table2": ("regard.studies.mita_table2", "MiTA in DeiT and PVT hosts on ImageNet", "MiTA, Table 2"),
    "esa_fig3": ("regard.studies.esa_fig3", "The 16 configurations of the four factors", "ESA, Figure 3"),
    "ska_table1": ("regard.studies.ska_table1", "Static keys on CIFAR-10 (ViT)", "SKA, Table 1"),
    "sne_table2": ("regard.studies.sne_table2", "Non-linear queries, keys and values", "SNE, Table 2"),
}


# those that train nothing: computed from costs, or read from the runs of a study
ANALYSES: dict[str, tuple[str, str, str]] = {
    "ska_table6": ("regard.studies.ska_costs:TABLE6", "What static keys cost", "SKA, Table 6"),
    "ska_table7": ("regard.studies.ska_costs:TABLE7", "Shared and dynamic weights", "SKA, Table 7"),
    "ska_fig4": ("regard.studies.ska_costs:FIGURE4", "Work a parameter", "SKA, Figure 4"),
    "errata": ("regard.studies.errata", "What the printed numbers cannot be", "the four papers"),
}


def load_study(name: str) -> "Study":
    """Raises: ConfigError for an unknown name, with the nearest ones, and for an analysis."""
    if name in ANALYSES:
        raise ConfigError(f"{name} trains nothing; `regard study run {name}` computes it and `regard report` draws it")
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}; {nearest(name, [*STUDIES, *ANALYSES])}")
    study: Study = _load(STUDIES[name][0], "STUDY")
    return study


def load_analysis(name: str) -> "Analysis":
    """Raises: ConfigError for an unknown name, with the nearest ones."""
    if name not in ANALYSES:
        raise ConfigError(f"no analysis {name!r}; {nearest(name, ANALYSES)}")
    analysis: Analysis = _load(ANALYSES[name][0], "ANALYSIS")
    return analysis


def _load(place: str, default: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name or default)


__all__ = ["ANALYSES", "STUDIES", "load_analysis", "load_study"]
