"""The operator functions of all mechanisms and their plain references.

Generated from mixers/table.py: run `make generated`, do not edit.
"""

from regard.mixers.agent import agent, agent_reference
from regard.mixers.axial import axial, axial_reference
from regard.mixers.bra import bra, bra_plan, bra_reference
from regard.mixers.convolutions.deformable import deformable_conv, deformable_conv_reference
from regard.mixers.convolutions.dynamic import dynamic_conv, dynamic_conv_reference
from regard.mixers.cswin import cswin, cswin_reference
from regard.mixers.dat.dat import sample_points, sample_points_reference
from regard.mixers.deformable_detr import deformable_detr, deformable_detr_reference
from regard.mixers.differential import differential, differential_reference
from regard.mixers.factors.factors import factor_logits, factors, factors_reference
from regard.mixers.flatten import flatten, flatten_reference
from regard.mixers.inline import inline, inline_reference
from regard.mixers.linear import linear, linear_reference
from regard.mixers.linformer import linformer, linformer_reference
from regard.mixers.mhla import mhla, mhla_reference
from regard.mixers.mita.mita import PooledQueries, mita, mita_plan, mita_reference, pool_landmarks
from regard.mixers.moba import moba, moba_plan, moba_reference
from regard.mixers.neighbourhood import neighbourhood, neighbourhood_reference
from regard.mixers.nsa import nsa, nsa_reference
from regard.mixers.nystrom import nystrom, nystrom_reference
from regard.mixers.performer import performer, performer_reference
from regard.mixers.polaformer import polaformer, polaformer_reference
from regard.mixers.reformer import lsh_plan, reformer, reformer_reference
from regard.mixers.routing import routing, routing_plan, routing_reference
from regard.mixers.softmax import softmax, softmax_reference
from regard.mixers.static_keys.cska import cska, cska_reference
from regard.mixers.static_keys.ska import ska, ska_reference
from regard.mixers.topk.topk import topk, topk_plan, topk_reference
from regard.mixers.vit3 import ttt, ttt_conv, ttt_conv_reference, ttt_reference
from regard.mixers.window import window, window_reference
from regard.mixers.xca import xca, xca_reference

__all__ = [
    "softmax",
    "softmax_reference",
    "differential",
    "differential_reference",
    "factor_logits",
    "factors",
    "factors_reference",
    "ska",
    "ska_reference",
    "cska",
    "cska_reference",
    "xca",
    "xca_reference",
    "linear",
    "linear_reference",
    "flatten",
    "flatten_reference",
    "polaformer",
    "polaformer_reference",
    "mhla",
    "mhla_reference",
    "inline",
    "inline_reference",
    "performer",
    "performer_reference",
    "ttt",
    "ttt_conv",
    "ttt_conv_reference",
    "ttt_reference",
    "agent",
    "agent_reference",
    "linformer",
    "linformer_reference",
    "nystrom",
    "nystrom_reference",
    "topk",
    "topk_plan",
    "topk_reference",
    "bra",
    "bra_plan",
    "bra_reference",
    "moba",
    "moba_plan",
    "moba_reference",
    "lsh_plan",
    "reformer",
    "reformer_reference",
    "routing",
    "routing_plan",
    "routing_reference",
    "sample_points",
    "sample_points_reference",
    "deformable_detr",
    "deformable_detr_reference",
    "window",
    "window_reference",
    "neighbourhood",
    "neighbourhood_reference",
    "axial",
    "axial_reference",
    "cswin",
    "cswin_reference",
    "PooledQueries",
    "mita",
    "mita_plan",
    "mita_reference",
    "pool_landmarks",
    "nsa",
    "nsa_reference",
    "deformable_conv",
    "deformable_conv_reference",
    "dynamic_conv",
    "dynamic_conv_reference",
]
