"""The Triton kernels compile, which needs no GPU, and fit into the shared memory of GPUs that are not here."""

from typing import Any

import pytest

from interpreter import elsewhere

pytestmark = [pytest.mark.untyped, elsewhere]
triton = pytest.importorskip("triton")

SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Bytes of a program by compute capability: A100, consumer cards of that time, H100 and H200."""
ROWS = {f"{x}_{part}": "i32" for x in ("q", "k", "v", "out", "grad", "dq", "dk", "dv", "begin", "start", "to")
        for part in ("batch", "head", "token")}  # fmt: skip
INPUTS = {"q": "x", "k": "x", "v": "x", "bias": "x", **ROWS, "heads": "i32"}
SIZES = {"queries": "i32", "keys": "i32", "scale": "fp32", "factor": "fp32", **ROWS, "heads": "i32"}
LAYOUT = {"keys": "*i64", "source": "*i64", "expert": "*i64"}
COUNTS = {"pairs": "i32", "heads_keys": "i32", "experts": "i32", "scale": "fp32"}
MAPS = {"out": "x", "channels": "i32", "height": "i32", "width": "i32"}
SINGLE, CHOSEN = "*fp32", "*i64"
TOKENS = {**ROWS, **dict.fromkeys(("heads", "tokens", "length", "steps", "blocks", "programs"), "i32"), "keep": "*i8",
          "table": "*i32", **dict.fromkeys(("shift", "sums", "dsums", "norm"), SINGLE), "eps": "fp32"}  # fmt: skip
TILES = {**INPUTS, **dict.fromkeys(("heads", "number", "area", "length", "entries", "stride"), "i32"),
         **dict.fromkeys(("tokens", "parts", "queries", "pairs"), "*i32"), "keep": "*i8", "lse": SINGLE,
         "scale": "fp32"}  # fmt: skip
KERNELS: dict[str, dict[str, str]] = {
    "mita._score": {**INPUTS, **SIZES, "scores": SINGLE, "parts": SINGLE, "lse": SINGLE},
    "mita._choose": {**SIZES, "scores": SINGLE, "parts": SINGLE, "partial": SINGLE, "out": "x", "lse": SINGLE,
                     "chosen": CHOSEN, "chunks": "i32"},
    "mita._attend_and_choose": {**INPUTS, **SIZES, "out": "x", "lse": SINGLE, "chosen": CHOSEN},
    "mita._attend_backward": {**INPUTS, **SIZES, "lse": SINGLE, "delta": SINGLE, "grad": "x", "dq": "x", "dk": SINGLE,
                              "dv": SINGLE},
    "routed._forward": {**INPUTS, **LAYOUT, **COUNTS, "begin": "x", "begin_lse": SINGLE, "out": "x", "lse": SINGLE},
    "routed._backward": {**INPUTS, **LAYOUT, **COUNTS, "lse": SINGLE, "delta": SINGLE, "grad": "x", "dq": "x",
                         "dk": SINGLE, "dv": SINGLE},
    "routed._lay_out": {"choice": CHOSEN, "source": CHOSEN, "expert": CHOSEN, "pairs": "i32", "blocks": "i32",
                        "experts": "i32"},
    "routed._row_products": {**SIZES, "grad": "x", "out": "x", "to_lse": SINGLE, "delta": SINGLE},
    "routed._start_gradients": {**SIZES, **dict.fromkeys(("grad", "out", "start_out", "to_out"), "x"),
                                **dict.fromkeys(("lse", "start_lse", "delta", "to_lse"), SINGLE)},
    "linear._sum_keys": {**TOKENS, "k": "x", "v": "x"},
    "linear._read_queries": {**TOKENS, "q": "x", "out": "x"},
    "linear._query_gradients": {**TOKENS, "q": "x", "out": "x", "grad": "x", "dq": "x"},
    "linear._key_gradients": {**TOKENS, "k": "x", "v": "x", "dk": "x", "dv": "x"},
    "tile._attend": {**TILES, "out": "x"},
    "tile._query_gradients": {**TILES, "out": "x", "grad": "x", "dq": "x", "dbias": SINGLE, "delta": SINGLE},
    "tile._key_gradients": {**TILES, "grad": "x", "delta": SINGLE, "dk": "x", "dv": "x", "common": SINGLE},
    "dynamic._sum_taps": {**MAPS, "padded": "x", "kernels": "x"},
    "dynamic._padded_gradient": {**MAPS, "grad": "x", "kernels": "x"},
    "dynamic._kernels_gradient": {**MAPS, "padded": "x", "grad": "x"},
}  # fmt: skip
"""The types of the parameters that are no constants; x: that of the inputs."""
CONSTANTS: dict[str, Any] = {
    "WIDTH": 64, "OUT": 64, "D": 64, "E": 64, "SIZE": 64, "STEP": 64, "LENGTH": 512, "TOP": 64,
    "BIASED": True, "VALUED": True, "CHOOSING": True, "ALL_KEYS": True, "CHUNKS": 8, "BLOCK": 4096,
    "LESS": True, "M": 64, "TILE": 128, "FEATURE": 1, "MASKED": True, "LEARNED": True,
    "SHIFTED": True, "INDEXED": True, "DIVIDED": True, "CONSTANT": True,
    "ROWS": 13, "COLUMNS": 13, "CHANNELS": 64, "POSITIONS": 64,
}  # fmt: skip


VARIANTS = [*(f"{name} of pairs" for name in KERNELS if name.startswith("tile")), "mita._attend_backward of one chunk"]


@pytest.mark.parametrize("name", [*KERNELS, *VARIANTS])
@pytest.mark.parametrize(
    ("capability", "kind"),
    [(90, "bf16"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((80, "bf16"), (86, "fp16"), (80, "fp32")))],
)
def test_a_kernel_compiles(name: str, capability: int, kind: str) -> None:
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from regard.mixers.convolutions import dynamic_triton as dynamic
    from regard.mixers.mita import triton_kernels as mita
    from regard.mixers.shared import linear_triton as linear
    from regard.mixers.shared import routed_triton as routed
    from regard.mixers.shared import tile_triton as tile

    name, _, variant = name.partition(" of ")
    place, function = name.split(".")
    files = {"mita": mita, "routed": routed, "dynamic": dynamic, "linear": linear, "tile": tile}
    kernel = getattr(files[place], function)
    types = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    values = {**CONSTANTS, "CAST": types[kind], "KIND": tl.float32}
    values["STEP"] = mita.keys_of_tile(128, 4 if kind == "fp32" else 2) if function == "_attend_backward" else 64
    values["PAIRED"] = variant == "pairs"
    values["ALL_QUERIES"] = variant == "one chunk"
    values["CHOICES"] = 3 if function == "_attend_and_choose" else 1
    constants = {(i,): values[one.name] for i, one in enumerate(kernel.params) if one.is_constexpr}
    signature = {one.name: "constexpr" if one.is_constexpr else KERNELS[name][one.name] for one in kernel.params}
    if values["ALL_QUERIES"]:
        signature |= {"dk": "x", "dv": "x"}
    signature = {key: f"*{kind}" if value == "x" else value for key, value in signature.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": 8 if function == "_attend_backward" else 4}
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED[capability]
