"""The catalogue of studies and analyses, by name. Each is imported when it is loaded, not when it is listed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.core import ConfigError, check_known, nearest

if TYPE_CHECKING:
    from regard.lab.engine.analysis import Analysis
    from regard.lab.engine.study import Study

# name -> (module below this package; title; source)
STUDIES: dict[str, tuple[str, str, str]] = {
    "quickstart": ("quickstart", "Digits on a canvas", "Regard"),
    "probes_content": ("probes.study", "Probe: recall by content", "Regard"),
    "probes_place": ("probes.study", "Probe: recall by absolute place", "Regard"),
    "probes_offset": ("probes.study", "Probe: recall by relative place", "Regard"),
    "probes_salience": ("probes.study", "Probe: the key that stands out", "Regard"),
    "probes_compare": ("probes.study", "Probe: same or different", "Regard"),
    "probes_count": ("probes.study", "Probe: how many match", "Regard"),
    "probes_hops": ("probes.study", "Probe: two steps of recall", "Regard"),
    "video_motion": ("video_motion", "Which mechanisms follow what moves", "Regard"),
    "mita_table2": ("mita.table2", "MiTA beside other efficient attention", "MiTA, Table 2"),
    "mita_table3": ("mita.table3", "MiTA in ViT-5", "MiTA, Table 3"),
    "mita_table4": ("mita.table4", "MiTA in plain ViTs for segmentation", "MiTA, Table 4"),
    "mita_table4_tuned": ("mita.table4", "MiTA in a trained backbone for segmentation", "MiTA, Table 4"),
    "mita_table5_listops": ("mita.table5", "Long sequences: ListOps", "MiTA, Table 5"),
    "mita_table5_text": ("mita.table5", "Long sequences: bytes of reviews", "MiTA, Table 5"),
    "mita_table5_retrieval": ("mita.table5", "Long sequences: pairs of texts", "MiTA, Table 5"),
    "mita_table5_image": ("mita.table5", "Long sequences: pixels", "MiTA, Table 5"),
    "mita_table5_pathfinder": ("mita.table5", "Long sequences: Pathfinder", "MiTA, Table 5"),
    "mita_table6": ("mita.table6", "Landmarks and branches of MiTA", "MiTA, Table 6"),
    "mita_table7": ("mita.table7", "Another attention for a trained network", "MiTA, Table 7"),
    "mita_growth": ("mita.growth", "Landmarks and keys for more tokens", "Regard"),
    "mita_recall": ("mita.recall", "Landmarks, branches and experts of MiTA, by recall", "Regard"),
    "sne_counting": ("sne.counting", "Non-linear queries, keys and values, by counting", "Regard"),
    "mita_experts": ("mita.experts", "Several experts of each query", "Regard"),
    "mita_fig6": ("mita.fig6", "Landmarks and keys, trained for each pair", "MiTA, Figure 6"),
    "esa_table2": ("esa.table2", "Deformable convolution, or E2", "ESA, Table 2"),
    "esa_table3": ("esa.table3", "Dynamic convolution, or E2 in the same window", "ESA, Table 3"),
    "esa_insertion": ("esa.insertion", "Attention inserted into a trained ResNet", "ESA, Figure 2a"),
    "esa_fig3": ("esa.fig3", "The 16 configurations of the four factors", "ESA, Figure 3"),
    "esa_fig3_detection": ("esa.dense", "The 16 configurations in detection", "ESA, Figure 3a"),
    "esa_fig3_segmentation": ("esa.dense", "The 16 configurations in segmentation", "ESA, Figure 3b"),
    "esa_placement": ("esa.placement", "Attention in series or in parallel, and where", "ESA, Section 4"),
    "esa_table2_detection": ("esa.dense", "Deformable convolution, or E2, in detection", "ESA, Table 2"),
    "esa_table2_segmentation": ("esa.dense", "Deformable convolution, or E2, in segmentation", "ESA, Table 2"),
    "esa_table3_detection": ("esa.dense", "Dynamic convolution, or E2, in detection", "ESA, Table 3"),
    "esa_table3_segmentation": ("esa.dense", "Dynamic convolution, or E2, in segmentation", "ESA, Table 3"),
    "esa_fig3_translation": ("esa.translation", "The 16 configurations in translation", "ESA, Figure 3c"),
    "esa_fig3_encoder_decoder": ("esa.translation", "The 16 configurations from decoder to encoder", "ESA, Figure 3d"),
    "esa_table2_translation": ("esa.translation", "Deformable convolution, or E2, in translation", "ESA, Table 2"),
    "esa_table3_translation": ("esa.translation", "Dynamic convolution, or E2, in translation", "ESA, Table 3"),
    "ska_table1": ("ska.table1", "Static keys on CIFAR-10 and CIFAR-100 in four hosts", "SKA, Table 1"),
    "ska_table2": ("ska.placement", "SKAFormer and CSKAFormer on ImageNet", "SKA, Table 2"),
    "ska_table3": ("ska.table3", "Static keys for boxes and masks", "SKA, Table 3"),
    "ska_table4": ("ska.table4", "Softmax, or another activation, on static keys", "SKA, Table 4"),
    "ska_table5": ("ska.placement", "Stages of a MetaFormer with static keys", "SKA, Table 5"),
    "ska_table8": ("ska.table8", "Static keys on Fashion-MNIST and SVHN in four hosts", "SKA, Table 8"),
    "ska_fig3": ("ska.placement", "How many heads a static key needs", "SKA, Figure 3"),
    "ska_offset": ("ska.offset", "Activations, scale and heads of static keys, by relative place", "Regard"),
    "ska_cka": ("ska.cka", "Features of static keys and of softmax", "Regard"),
    "sne_table2": ("sne.table2", "Non-linear queries, keys and values", "SNE, Table 2"),
    "sne_table3": ("sne.distillation_and_transfer", "Embeddings under distillation", "SNE, Table 3"),
    "sne_table4": ("sne.distillation_and_transfer", "Non-linear embeddings after transfer", "SNE, Table 4"),
    "sne_table5": ("sne.variants", "Codes that all layers share, or their own", "SNE, Table 5"),
    "sne_fig3": ("sne.variants", "How many layers an embedding needs", "SNE, Figure 3"),
    "sne_fig6": ("sne.variants", "How long a code must be", "SNE, Figure 6"),
}


# computed from costs, or read from the finished runs of a study
ANALYSES: dict[str, tuple[str, str, str]] = {
    "ska_table6": ("ska.costs", "What static keys cost", "SKA, Table 6"),
    "ska_table7": ("ska.costs", "Shared and dynamic weights", "SKA, Table 7"),
    "ska_fig4": ("ska.costs", "Multiply-accumulates per parameter", "SKA, Figure 4"),
    "ska_fig5": ("ska.fig5", "Attention maps of static keys", "SKA, Figure 5"),
    "ska_cka_layers": ("ska.cka", "Features, layer by layer", "Regard"),
    "sne_fig4": ("sne.codes", "Codes of F-SNE before and after transfer", "SNE, Table 6 and Figure 4"),
    "sne_fig5": ("sne.codes", "Accuracy before and after transfer", "SNE, Figure 5"),
    "esa_fig1": ("esa.fig1", "Maps of factors, taps and kernels", "ESA, Figure 1"),
    "esa_costs": ("esa.costs", "What the factors and convolutions cost", "ESA, Tables 1-3, Figure 3"),
    "esa_insertion_curve": ("esa.insertion", "Before and after insertion, and fine-tuned", "ESA, Figure 2a"),
    "mita_table1": ("mita.table1", "How mechanisms reduce the cost of attention", "MiTA, Table 1"),
    "mita_counts": ("mita.counts", "What efficient attention costs in DeiT", "MiTA, Tables 1-3"),
    "mita_table5_average": ("mita.table5_average", "Long sequences on average", "MiTA, Table 5"),
    "mita_fig3": ("mita.trained_figures", "Keys and queries of one expert", "MiTA, Figure 3"),
    "mita_fig4": ("mita.trained_figures", "Patch tokens that no expert gathers", "MiTA, Figure 4"),
    "mita_fig5": ("mita.fig5", "Throughput against the number of tokens", "MiTA, Figure 5"),
    "mita_fig6_map": ("mita.fig6", "Accuracy over landmarks and keys", "MiTA, Figure 6"),
    "mita_fig8": ("mita.trained_figures", "Overlap of keys and queries", "MiTA, Figure 8"),
    "mita_fig9": ("mita.trained_figures", "Another mechanism at inference", "MiTA, Figure 9"),
    "mita_fig9_tuned": ("mita.trained_figures", "Another mechanism after fine-tuning", "MiTA, Figure 9"),
    "mita_fig10": ("mita.trained_figures", "Other numbers at inference", "MiTA, Figure 10"),
    "swap_distillation": ("swap_distillation", "What distillation gives back after a swap", "Regard"),
    "focus_vit": ("focus_vit.half_the_time", "Half the time for a network that is there", "Regard"),
    "focus_vit_heads": ("focus_vit.heads", "What heads keep on a backbone that is there", "Regard"),
    "focus_vit_swaps": ("focus_vit.swaps", "What a swap keeps of a network that is there", "Regard"),
    "host_counts": ("host_counts", "Sizes of the models of two papers", "SKA and SNE, Tables 1 and 2"),
    "errata": ("errata", "What the printed numbers cannot be", "the four papers"),
}


def load_study(name: str) -> "Study":
    """The study of a name. Raises: ConfigError for an unknown name, with the nearest ones, and for an analysis."""
    if name in ANALYSES:
        raise ConfigError(
            f"{name} trains nothing; `regard study run {name}` computes it, `regard report` writes its page"
        )
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}; {nearest(name, [*STUDIES, *ANALYSES])}")
    study: Study = _load(STUDIES[name][0], name)
    return study


def load_analysis(name: str) -> "Analysis":
    """The analysis of a name. Raises: ConfigError for an unknown name, with the nearest ones."""
    check_known(name, ANALYSES, f"no analysis {name!r}")
    analysis: Analysis = _load(ANALYSES[name][0], name)
    return analysis


def _load(module: str, name: str) -> Any:
    """The study or analysis of this name in a module."""
    values = vars(import_module(f"{__name__}.{module}")).values()
    return next(value for value in values if getattr(value, "name", None) == name)


__all__ = ["ANALYSES", "STUDIES", "load_analysis", "load_study"]
