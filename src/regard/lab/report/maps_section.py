"""The attention maps on a study's page: pictures, overlays, the menus of layers and heads, and the note."""

from collections.abc import Sequence
from typing import Any

from regard.pages import figures, phrasing

from .page_data import AttentionMaps, StudyData, read_maps


def maps_section(study_data: StudyData) -> tuple[dict[str, Any], dict[int, list[Any]]]:
    """(variables of the template; row -> its layers, each a list of data URIs: the mean, then the heads)."""
    maps = read_maps(study_data)
    photos = list(dict.fromkeys(row_maps.image for row_maps in maps))
    overlays: dict[int, list[Any]] = {}
    entries = []
    for row_maps in maps:
        height, width = row_maps.grid
        layers = [
            [figures.heat(weights, height, width) for weights in (layer["mean"], *layer["heads"])]
            for layer in row_maps.layers
        ]
        if layers:
            overlays[row_maps.row] = layers
        entries.append({
            "row": row_maps.row, "label": study_data.rows[row_maps.row]["label"],
            "photo": photos.index(row_maps.image), "query": _frame(row_maps), "src": layers[-1][0] if layers else "",
        })  # fmt: skip
    depth = max(map(len, overlays.values()), default=1)
    heads = max((len(layer) - 1 for layers in overlays.values() for layer in layers), default=0)
    view = {
        "photos": photos, "maps": entries,
        # by relative depth, so that rows with different numbers of layers can be compared
        "map_layers": [{"share": f"{i / max(depth - 1, 1):.4f}", "name": f"{i + 1} of {depth}"} for i in range(depth)],
        "map_heads": ["mean of all heads", *(f"head {i + 1}" for i in range(heads))],
        "map_shape": f"{maps[0].grid[1]}/{maps[0].grid[0]}" if maps else "1",
        "map_pixels": "pixelated" if maps and len(maps[0].image) < 3000 else "auto",
        "maps_note": _note(maps, study_data),
    }  # fmt: skip
    return view, overlays


def _frame(row_maps: AttentionMaps) -> str:
    """The CSS position of the query's cell."""
    if row_maps.query is None:
        return ""
    (y, x), (height, width) = row_maps.query, row_maps.grid
    return (f"left:{100 * x / width:.3f}%;top:{100 * y / height:.3f}%;"
            f"width:{100 / width:.3f}%;height:{100 / height:.3f}%")  # fmt: skip


def _note(maps: Sequence[AttentionMaps], study_data: StudyData) -> str:
    if not maps:
        return ""
    query = "Attention of the framed query" if maps[0].query is not None else "Mean attention of all queries"
    rows = {row_maps.row for row_maps in maps}
    others = [row["label"] for i, row in enumerate(study_data.rows) if i not in rows and study_data.of(i)]
    without = f" Rows without attention weights between tokens: {phrasing.join_with_and(others)}." if others else ""
    credits = list(dict.fromkeys(row_maps.credit for row_maps in maps if row_maps.credit))
    return (f"{query} to the cells of the picture; a stronger amber is a larger weight. Each map is scaled to its "
            "largest weight. Trained weights of the first seed of each row."
            + without + "".join(f" Picture: {credit}." for credit in credits)
            + " To point at a picture of your own: regard explore RUN PICTURE.")  # fmt: skip
