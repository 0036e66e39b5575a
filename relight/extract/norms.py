# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A model's last norm, applied to stored states and undone: post = weight * pre / rms(pre).

Applying it is exact. Undoing it is not: the norm has thrown away each token's length, so what comes out is the state before the
norm up to one factor a token, a surrogate. Applying the norm to a surrogate gives the state after the norm again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ansible_collections.relight.recovery.plugins.module_utils import safetensors
from ansible_collections.relight.recovery.plugins.module_utils.weights import CONFIG, INDEX, TEXT_MODEL

from relight.extract.config import BadInput
from relight.extract.states import Array, to_float32

# Families whose last norm is an RMSNorm with a plain weight; others add 1 to the weight, or take a mean away.
FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25",
    "smollm3", "phi3", "olmo2",
)  # fmt: skip
NEAR_ZERO = 1e-4  # of the weights' median magnitude: such a weight has left nothing of its number to get back
BACK = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}  # how near the norm of a surrogate must come to the state, per token
_NORM = re.compile(rf"{TEXT_MODEL}norm\.weight\Z")


@dataclass(frozen=True)
class FinalNorm:
    """The last norm of a model: its weight, the small number under the root, and a digest of both."""

    weight: Array
    eps: float
    digest: str

    def apply(self, pre: Array) -> Array:
        """States after the norm, from those before it; float32, rows are tokens."""
        square = np.mean(np.square(pre, dtype=np.float32), axis=1, keepdims=True, dtype=np.float32)
        normed: Array = pre * (np.float32(1) / np.sqrt(square + np.float32(self.eps))) * self.weight
        return normed

    def undo(self, post: Array) -> Array:
        """States before the norm up to a factor a token, from those after it. `judge_undoable` first."""
        surrogate: Array = post / self.weight
        return surrogate

    def judge_undoable(self) -> None:
        """Raises BadInput where a weight is so small that a state's number cannot be got back."""
        size = np.abs(self.weight)
        small = np.flatnonzero(size < NEAR_ZERO * np.median(size))
        if len(small):
            names = ", ".join(str(number) for number in small[:8])
            raise BadInput(
                f"{len(small)} weights of the model's last norm are near 0 (at {names}), so the state before it cannot be made of the one "
                "after it, not even up to its length: extract again with a dump that carries it"
            )

    def judge_back(self, surrogate: Array, post: Array, dtype: str) -> None:
        """Raises ValueError where the norm of a surrogate, as stored, is not the state it was made of."""
        scale = np.linalg.norm(post, axis=1)
        errors = np.linalg.norm(self.apply(surrogate) - post, axis=1) / np.where(scale > 0, scale, 1)
        if not errors.max() <= BACK[dtype]:
            raise ValueError(f"the norm of its surrogate is off by {errors.max():.2g} of the state's length, {BACK[dtype]:g} allowed")


def load(model_dir: str, hidden_size: int) -> FinalNorm:
    """The last norm of the model in a directory. Raises BadInput."""
    try:
        config = _text_config(model_dir)
        family, eps = config.get("model_type"), config.get("rms_norm_eps")
        if family not in FAMILIES or not isinstance(eps, float):
            raise BadInput(f"{model_dir}: the last norm of a model of type {family!r} is not known to be an RMSNorm with a plain weight")
        path, name = _find(model_dir)
        with safetensors.mapped(path) as (_header, tensors):
            tensor = tensors[name]
            raw = bytes(tensor.buffer)
    except safetensors.BadFile as error:
        raise BadInput(f"{model_dir}: the shard with the last norm is {error.kind}: {error}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read the model in {model_dir}: {error}") from error
    if tensor.shape != (hidden_size,) or tensor.dtype not in ("float32", "float16", "bfloat16"):
        raise BadInput(f"{model_dir}: {name} is {tensor.dtype} {list(tensor.shape)}, the samples are {hidden_size} wide")
    digest = hashlib.blake2b(f"{tensor.dtype} {eps!r} ".encode() + raw, digest_size=16).hexdigest()
    return FinalNorm(to_float32(raw, tensor.dtype), eps, digest)


def _json(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as handle:
        value = json.load(handle)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no object")
    return value


def _text_config(model_dir: str) -> Mapping[str, Any]:
    """The text model's configuration, also where it is nested in a multi-modal one."""
    config = _json(os.path.join(model_dir, CONFIG))
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _find(model_dir: str) -> tuple[str, str]:
    """The shard that has the last norm's weight, and the weight's name. Raises BadInput, OSError, ValueError."""
    index = os.path.join(model_dir, INDEX)
    names: dict[str, str] = {}
    if os.path.exists(index):
        names = {name: os.path.join(model_dir, shard) for name, shard in _json(index).get("weight_map", {}).items()}
    else:
        for path in sorted(glob.glob(os.path.join(glob.escape(model_dir), "*.safetensors"))):
            names.update(dict.fromkeys(safetensors.read_header(path).tensors, path))
    found = [name for name in names if _NORM.match(name)]
    if len(found) != 1:
        raise BadInput(f"{model_dir}: {len(found)} tensors could be the weight of the last norm")
    return names[found[0]], found[0]
