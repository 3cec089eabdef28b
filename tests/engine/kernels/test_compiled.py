"""Every kernel compiles for each card, fits its shared memory, and keeps its numbers in registers."""

from __future__ import annotations

import re

import pytest

from tests.engine.kernels.compiled import CARDS, compile_for, spilled

pytest.importorskip("triton")
import torch

from cluster.protocol.kv_format import SCALE_BYTES
from engine.attention import triton_backend as backend
from engine.attention import triton_kernels as attention
from engine.ops.base import OpsShape
from engine.ops.codes import BYTES, FP8, NIBBLES
from engine.ops.cuda import coded_products, conversion, int8_products, products
from engine.ops.cuda import kernels as small
from engine.ops.cuda.ops import GATE_BLOCK, HEADS_TOGETHER, OPTIONS, ROW_SIZES, gate_kind, norm_sizes

TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
INTS = ("table", "rows", "ends", "cu_q", "singles", "arrived")
FLOATS = ("partial", "sums", "sinks")
NUMBERS = (
    "items",
    "window",
    "width",
    "inner",
    "inputs",
    "outputs",
    "q_stride",
    "head_stride",
    "table_stride",
    "block_stride",
    "value_offset",
    "offset",
    "tokens",
    "heads",
    "layer_stride",
    "side_stride",
)
KINDS = {
    **dict.fromkeys(INTS, "*i32"),
    **dict.fromkeys(FLOATS, "*fp32"),
    **dict.fromkeys(NUMBERS, "i32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
    **dict.fromkeys(("positions", "slots", "ids"), "*i64"),
}
DATA = (
    "q",
    "cache",
    "out",
    "x",
    "delta",
    "weight",
    "gate_up",
    "qkv",
    "bias",
    "cos",
    "sin",
    "q_norm",
    "k_norm",
    "numbers",
)


# Bytes per thread, of attention kernels: values that are used before and after the loops over keys, not in them.
SPILLED_AROUND_LOOPS = 64


def check(
    capability: int,
    kernel,
    kind: str,
    constants: dict[str, object],
    options: dict[str, int],
    kinds: dict[str, str] | None = None,
):
    """`kinds`: of arguments that are not as in other kernels. A ROW that is longer than DIM: the cache is in int8."""
    own = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {**KINDS, **dict.fromkeys(DATA, f"*{kind}"), **(kinds or {})}
    if own.get("ROW") != own.get("DIM"):
        types["cache"] = types["blocks"] = "*i8"
    needed = {name: types[name] for name in kernel.arg_names if name not in own}
    made = compile_for(capability, kernel, needed, own, {**OPTIONS, **options})
    of_attention = kernel in (attention.attend_prompts, attention.attend_tokens)
    assert spilled(made, capability) <= (SPILLED_AROUND_LOOPS if of_attention else 0)
    return made


def check_attention(
    capability: int,
    kind: str,
    dim: int,
    group: int,
    page: int,
    cap: float = 0.0,
    sinks: bool = False,
    int8: bool = False,
) -> None:
    dtype = TYPES[kind]
    row = dim + SCALE_BYTES if int8 else dim
    sizes = {
        "GROUP": group, "DIM": dim, "ROW": row, "WIDTH": backend.width_of(dim), "PAGE": page, "CAP": cap,
        "SINKS": sinks, "SPLIT": backend.SPLIT, "SPLITS": backend.most_splits(8),
    }  # fmt: skip
    prompts = backend.prompt_tiles(dtype, dim, group, hopper=capability == 90)
    tokens = backend.token_tiles(dtype, dim, group, int8=int8)
    # A window changes no tile: it is compiled for the commonest size of a head.
    for kernel, tiles, windowed in (
        (attention.attend_prompts, prompts, False),
        (attention.attend_tokens, tokens, False),
        *(
            ((attention.attend_prompts, prompts, True), (attention.attend_tokens, tokens, True))
            if dim == 128
            else ()
        ),
    ):
        constants: dict[str, object] = {**sizes, "ROWS": tiles.rows, "KEYS": tiles.keys, "WINDOWED": windowed}
        made = check(capability, kernel, kind, constants, tiles.options)
        if kernel is attention.attend_tokens:
            check_order_of_the_merge(made.asm["ptx"])


def check_order_of_the_merge(ptx: str) -> None:
    """Partial results, a barrier, an addition that releases and acquires on the whole card, a barrier, loads past the
    first-level cache: the interpreter runs one program after the other and cannot tell."""
    before, addition, after = re.split(r"(atom\.\S+)", ptx)
    for word in ("acq_rel", "gpu", "add"):
        assert word in addition.split("."), addition
    last_store = before.rindex("st.global")
    assert "bar.sync" in before[last_store:] or "barrier.sync" in before[last_store:]
    first_load = after.index("ld.global.cg")
    assert "bar.sync" in after[:first_load] or "barrier.sync" in after[:first_load]


def check_small(capability: int, kind: str, dim: int) -> None:
    for width, adds in ((4096, True), (16_384, False)):
        norm = norm_sizes(width)
        check(
            capability,
            small.norm_rows,
            kind,
            {"ADDS": adds, "BLOCK": norm["BLOCK"]},
            {"num_warps": norm["num_warps"]},
        )
    sizes_of_row: dict[str, object] = {name: ROW_SIZES[name] for name in ("ROWS", "COLUMNS")}
    for biased in (False, True):
        row = {**sizes_of_row, "BIASED": biased}
        check(capability, small.multiply_row, kind, row, {"num_warps": ROW_SIZES["num_warps"]})
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        form = gate_kind(OpsShape(8, 2, dim, 1e-5, activation, (), 1.702, 7.0))
        check(capability, small.gate_rows, kind, {"BLOCK": GATE_BLOCK, **form}, {"num_warps": 4})
    for norms in (False, True):
        sizes: dict[str, object] = {
            "HEADS": 8,
            "KV_HEADS": 2,
            "DIM": dim,
            "HALF_WIDTH": backend.width_of(dim) // 2,
            "PAGE": 16,
            "NORMS": norms,
            "TOGETHER": HEADS_TOGETHER,
        }
        for length in (dim, dim + SCALE_BYTES):
            check(capability, small.rotate_heads, kind, {**sizes, "ROW": length}, {"num_warps": 2})


def check_conversion(capability: int, kind: str, dim: int) -> None:
    constants: dict[str, object] = {"DIM": dim, "ROW": dim + SCALE_BYTES, "WIDTH": backend.width_of(dim)}
    check(
        capability,
        conversion.convert_blocks,
        kind,
        {**constants, "PAGE": 16, "TOKENS": conversion.TOKENS},
        {"num_warps": conversion.WARPS},
    )


CODES = {
    **dict.fromkeys(("x", "weight"), "*i8"),
    **dict.fromkeys(("x_scale", "x_scales", "scales", "largest"), "*fp32"),
    **dict.fromkeys(("rows", "stride"), "i32"),
    "codes": "*i8",
}


def check_int8(capability: int, kind: str, rows: tuple[int, ...]) -> None:
    """A product of as many rows as in each of `rows`."""
    for given in (False, True):
        sizes = int8_products.quantize_sizes(14_336)
        check_sized(
            capability, products.quantize_rows, kind, sizes, {"GIVEN": given}, {**CODES, "x": f"*{kind}"}
        )
    for biased in (False, True):
        words = dict.fromkeys(("x", "weight"), "*i32")
        form = {"BIASED": biased}
        check_sized(
            capability, products.multiply_row_int8, kind, int8_products.ROW_SIZES, form, {**CODES, **words}
        )
    for count in rows:
        sizes = int8_products.tile_sizes(count, hopper=capability == 90)
        for whole in (True, False):
            form = {"BIASED": True, "WHOLE": whole}
            check_sized(capability, products.multiply_int8, kind, sizes, form, CODES)


OF_CODES = {
    **dict.fromkeys(("codes", "zeros"), "*u8"),
    **dict.fromkeys(("rows", "stride", "groups", "group"), "i32"),
    "scales": "*fp32",
}


def check_codes(capability: int, code: str, group: int, rows: tuple[int, ...]) -> None:
    kind: dict[str, object] = {"KIND": coded_products.KINDS[code]}
    expand = {"BLOCK": coded_products.EXPAND_BLOCK, "num_warps": 4}
    check_sized(capability, products.expand_codes, "bf16", expand, kind, OF_CODES)
    for biased in (False, True):
        form = {**kind, "GROUP": group, "BIASED": biased}
        sizes = coded_products.row_sizes(code, group)
        check_sized(capability, products.multiply_row_codes, "bf16", sizes, form, OF_CODES)
        for count in rows:
            for whole in (True, False):
                sizes = coded_products.tile_sizes(count, group)
                check_sized(
                    capability, products.multiply_codes, "bf16", sizes, {**form, "WHOLE": whole}, OF_CODES
                )


@pytest.mark.long
@pytest.mark.parametrize(("code", "group"), [(FP8, 0), (NIBBLES, 128)])
def test_products_with_codes_compile(code, group):
    check_codes(90, code, group, (16,))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", [89, 90])  # the least and the most shared memory
@pytest.mark.parametrize("code", [FP8, BYTES, NIBBLES])
def test_every_product_with_codes_compiles(capability, code):
    for group in (0, 128):
        check_codes(capability, code, group, (16, 64, 128))


def check_sized(capability, kernel, kind, sizes, form, kinds) -> None:
    """`sizes`: constants and options together, as kernels are called with them."""
    options = {name: value for name, value in sizes.items() if name.islower()}
    constants = {name: value for name, value in sizes.items() if name.isupper()}
    check(capability, kernel, kind, {**constants, **form}, {**options, **int8_products.OPTIONS}, kinds)


def test_int8_products_compile():
    check_int8(90, "bf16", (16, 2048))


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "kind", "dim", "group", "cap", "sinks", "int8"),
    [
        (90, "bf16", 128, 4, 0.0, False, False),
        (80, "fp32", 64, 4, 0.0, False, False),
        (90, "bf16", 64, 8, 0.0, True, False),
        (90, "bf16", 256, 2, 50.0, False, False),
        (90, "bf16", 128, 4, 0.0, False, True),
    ],
)
def test_attention_compiles(capability, kind, dim, group, cap, sinks, int8):
    check_attention(capability, kind, dim, group, 16, cap, sinks, int8)


@pytest.mark.long
def test_small_kernels_compile():
    check_small(100, "bf16", 128)
    check_conversion(90, "bf16", 128)


# Heads' sizes by type and group: all of them for the common group only, which keeps a card's compilations to a minute.
VARIANTS = [
    ("bf16", 4, (40, 64, 80, 128, 256)),
    ("bf16", 1, (64, 128)),
    ("bf16", 7, (64, 128)),
    ("fp32", 4, (64, 128, 256)),
]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "kind", "group", "dims"),
    [
        (card, *variant)
        for card in CARDS
        for variant in VARIANTS
        if card in (89, 90)  # the least and the most shared memory
    ]
    + [(80, "bf16", 4, (64, 128)), (100, "bf16", 4, (64, 128))],
)
def test_every_variant_compiles(capability, kind, group, dims):
    for dim in dims:
        check_attention(capability, kind, dim, group, 16)
        # On sm_89 these have fewer registers than they need (up to 164 bytes of a thread are spilled), and are slow.
        if kind == "bf16" and capability != 89:
            check_attention(capability, kind, dim, group, 16, int8=True)
    if kind == "bf16" and group == 1:
        check_attention(capability, kind, 256, 2, 16, cap=50.0)  # Gemma 2
        check_attention(capability, kind, 64, 8, 16, sinks=True)  # gpt-oss
    if group == 4:
        check_small(capability, kind, 64)
        check_conversion(capability, kind, 80)
        if kind == "bf16":
            check_int8(capability, kind, (16, 64, 128, 2048))
