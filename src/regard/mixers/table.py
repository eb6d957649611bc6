"""The table of mechanisms: name -> module below `regard.mixers`, by family. Needs no torch.

`make generated` writes from it the imports of `regard.mixers`, `regard.ops` and the root, and the tables of README and
docs. A new mechanism is one entry here.
"""

FAMILIES: dict[str, dict[str, str]] = {
    "all keys: content, or any of the four terms of *An Empirical Study of Spatial Attention*": {
        "Softmax": "softmax", "Differential": "differential", "Factors": "factors.factors",
    },
    "learned keys, the same for every image": {"SKA": "static_keys.ska", "CSKA": "static_keys.cska"},
    "channels attend to channels": {"XCA": "xca"},
    "a state of fixed size instead of keys": {
        "Linear": "linear", "FLatten": "flatten", "PolaFormer": "polaformer", "MHLA": "mhla", "InLine": "inline",
        "Performer": "performer", "ViT3": "vit3",
    },
    "fewer keys, pooled, projected or convolved": {
        "Agent": "agent", "Linformer": "linformer", "Nystrom": "nystrom", "PVT": "pvt",
    },
    "some keys: the best, of the best regions, sampled, or near": {
        "TopK": "topk.topk", "Sparsifiner": "sparsifiner", "BRA": "bra", "MoBA": "moba", "Reformer": "reformer",
        "Routing": "routing", "DAT": "dat.dat", "DeformableDETR": "deformable_detr", "Window": "window",
        "Neighbourhood": "neighbourhood", "Axial": "axial", "CSWin": "cswin",
    },
    "both: pooled keys and chosen ones": {"MiTA": "mita.mita", "NSA": "nsa"},
    "convolutions, for comparison": {
        "Conv": "convolutions.conv", "DeformableConv": "convolutions.deformable", "DynamicConv": "convolutions.dynamic",
    },
}  # fmt: skip

MECHANISMS: dict[str, str] = {name: module for family in FAMILIES.values() for name, module in family.items()}
