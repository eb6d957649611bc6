"""`regard taxonomy`: MiTA's Table 1 for every mechanism of the package."""

from .show import AsJson, show


def taxonomy(as_json: AsJson = False) -> None:
    """Sort every mechanism: which factors decide its weights, how they come about, and how it scales."""
    from regard.mixers import MIXERS

    rows = []
    for cls in MIXERS:
        known = cls().card
        rows.append(
            {
                "mechanism": cls.__name__,
                "query": known.query_content,
                "key": known.key_content,
                "relative": known.relative_position,
                "dynamic": known.dynamic,
                "scaling": known.scaling,
                "experts": known.expert_type,
                "number": known.expert_count,
                "construction": known.construction,
                "topology": known.topology,
                "cost": known.complexity,
                "discrete": known.discrete,
            }
        )
    show(rows, as_json, notes=["query, key, relative: what the attention weights depend on"])
