# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What the dump plugin cannot serve rightly, judged from the server's resolved arguments. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import layers

Test = Callable[[Any], bool]


def _more_than_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _named(value: Any) -> bool:
    return bool(value) and value != "null"


# (arguments, any of which does it; when it does; what is wrong; what to do). An argument that this SGLang lacks is not in use.
ROWS: tuple[tuple[tuple[str, ...], Test, str, str], ...] = (
    (("pp_size", "pipeline_parallel_size"), _more_than_one, "pipeline parallelism splits the layers", "use tensor parallelism alone"),
    (
        ("attn_cp_size", "dcp_size", "cp_size", "context_parallel_size"),
        _more_than_one,
        "context parallelism splits the tokens of a request",
        "set it to 1",
    ),
    (
        (
            "enable_prefill_cp",
            "enable_prefill_context_parallel",
            "enable_nsa_prefill_context_parallel",
            "enable_dsa_prefill_context_parallel",
        ),
        bool,
        "prefill context parallelism splits the tokens of a request",
        "drop the flag",
    ),
    (("enable_dp_attention",), bool, "data-parallel attention spreads the requests over ranks", "drop --enable-dp-attention"),
    (("attn_dp_size",), _more_than_one, "data-parallel attention spreads the requests over ranks", "set it to 1"),
    (("dp_size", "data_parallel_size"), _more_than_one, "data parallelism runs several servers under one port", "start one server a port"),
    (("enable_two_batch_overlap",), bool, "two-batch overlap splits each batch", "drop --enable-two-batch-overlap"),
    (("enable_layernorm_sp",), bool, "layer-norm sequence parallelism splits the tokens over ranks", "drop --enable-layernorm-sp"),
    (("speculative_algorithm",), bool, "speculative decoding captures states of its own", "drop --speculative-algorithm"),
    (
        ("enable_return_aux_hidden_states",),
        bool,
        "SGLang's own capture of auxiliary states chooses the layers too",
        "drop --enable-return-aux-hidden-states",
    ),
    (("enable_lora", "lora_paths", "uno_lora_path"), bool, "LoRA adapters change the hidden states", "serve the base model alone"),
    (("disaggregation_mode",), _named, "disaggregated serving parts prefill from the rest", "drop --disaggregation-mode"),
    (("enable_pdmux",), bool, "prefill-decode multiplexing splits a prefill by layers", "drop --enable-pdmux"),
    (("encoder_only", "is_embedding"), bool, "the server generates no tokens", "serve the language model for generation"),
    (("dllm_algorithm",), bool, "a diffusion language model has no prefill of the whole prompt", "serve an autoregressive model"),
    (("use_ray",), bool, "under Ray the ranks do not start from this launcher", "drop --use-ray"),
)


def refusals(args: Any) -> list[str]:
    """One sentence for each thing that makes wrong or missing dumps; empty where the plugin can serve.

    `args` is a plain namespace: SGLang's resolved arguments by their names, and dump_dir, dump_dir_error (why it cannot be
    written, or None), layers (the text of RELIGHT_DUMP_LAYERS), dtype, model_layers (None: not known yet) and patch_dir.
    """
    found = []
    if getattr(args, "patch_dir", None):
        found.append("SGLANG_HS_DUMP_DIR is set too, and two dumps of one server exclude each other: unset it, or RELIGHT_DUMP_DIR.")
    if args.dump_dir_error:
        found.append(f"RELIGHT_DUMP_DIR {args.dump_dir} cannot be written ({args.dump_dir_error}): make it, or name another.")
    try:
        layers.check(layers.parse(args.layers or ""), args.model_layers)
    except layers.BadLayers as error:
        found.append(f"RELIGHT_DUMP_LAYERS: {error}.")
    if getattr(args, "dtype", None) not in (None, "", *DTYPES):
        found.append(f"RELIGHT_DUMP_DTYPE {args.dtype!r} is not one of {', '.join(DTYPES)}.")
    chunk = getattr(args, "chunked_prefill_size", None)
    if not isinstance(chunk, int) or chunk > 0:
        found.append(
            f"chunked_prefill_size is {chunk}, and a prompt in chunks has its states in pieces: start with --chunked-prefill-size -1."
        )
    if not getattr(args, "disable_radix_cache", False):
        found.append("the radix cache is on, and a cached prefix has no states: start with --disable-radix-cache.")
    if getattr(args, "enable_mixed_chunk", False):
        found.append("enable_mixed_chunk mixes prefill and decode in one batch: drop --enable-mixed-chunk.")
    for names, is_used, what, remedy in ROWS:
        for name in names:
            value = getattr(args, name, None)
            if is_used(value):
                found.append(f"{name} is {value}: {what}; {remedy}.")
                break
    return found


DTYPES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

ARGUMENTS = ("chunked_prefill_size", "disable_radix_cache", "enable_mixed_chunk", *(name for row in ROWS for name in row[0]))
