# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Which layers a model has, and how to ask SGLang for the outputs of some. Pure; standard library only, Python 3.9 and newer.

Everywhere in Relight a layer id is a layer *output*, counted from 0 (Hugging Face's hidden_states[id + 1]). Inside SGLang the
number k means the input of layer k, which is the output of layer k - 1; `set_eagle3_layers_to_capture` shifts what it is given
by a rule that depends on the model family and on SGLang's version. That rule lives here alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COUNT = 3
# These families add 1 only if the first id is 1, and take the ids as they are else, from SGLang 0.5.13 on; before, always 1.
BY_FIRST_ID = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
BY_FIRST_ID_SINCE = (0, 5, 13)
# These always add 1; read in the model files of 0.5.23.
ALWAYS_ONE = frozenset(
    {
        "ApertusForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)


class BadLayers(Exception):
    """Layers that cannot be captured; the message is one sentence about them."""


@dataclass(frozen=True)
class Shape:
    """What of a model's config.json matters here. `text` is the architecture of the language model inside, where there is one."""

    architecture: str
    layers: int
    hidden_size: int
    dtype: str
    text: str = ""


def shape(config: Mapping[str, Any]) -> Shape:
    """Read a config.json, whose language model may lie under text_config. Raises BadLayers where it tells no layers."""
    inner = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(inner, Mapping):
        raise BadLayers("config.json has a text_config that is no object")
    names = config.get("architectures") or inner.get("architectures") or [""]
    text = "" if inner is config else (inner.get("architectures") or [""])[0]
    layers, hidden = inner.get("num_hidden_layers"), inner.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden, int) or isinstance(layers, bool) or isinstance(hidden, bool):
        raise BadLayers("config.json does not say num_hidden_layers and hidden_size")
    dtype = inner.get("dtype") or inner.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
    return Shape(str(names[0]), layers, hidden, str(dtype), str(text))


def parse(text: str) -> tuple[int, ...]:
    """The ids of RELIGHT_DUMP_LAYERS ("1,14,26"). Raises BadLayers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts):
        raise BadLayers(f"the layers {text!r} are not {COUNT} numbers with commas between them")
    return tuple(int(part) for part in parts)


def check(outputs: Sequence[int], layers: int | None = None) -> None:
    """Can these layer outputs be captured from a model of so many layers (None: not known yet)? Raises BadLayers."""
    listed = ", ".join(str(k) for k in outputs)
    if len(outputs) != COUNT:
        raise BadLayers(f"the layers [{listed}] are {len(outputs)}, not {COUNT}")
    if any(left >= right for left, right in zip(outputs, outputs[1:])):
        raise BadLayers(f"the layers [{listed}] do not rise: states come in the order of the layers, each once")
    if layers is None:
        return
    if outputs[0] < 0 or outputs[-1] >= layers:
        raise BadLayers(f"the layers [{listed}] are out of range: this model has the layer outputs 0 to {layers - 1}")
    if outputs[-1] == layers - 1:
        last = f"the last layer, {layers - 1}, whose output cannot be captured"
        raise BadLayers(f"the layers [{listed}] hold {last} (its state after the norm is dumped anyway)")


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, three of them: 0.5.12.post1 is (0, 5, 12)."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else (0, 0, 0)


def is_known(model: Shape) -> bool:
    """Is this model's rule one that was read in SGLang's source?"""
    return bool({model.architecture, model.text} & (BY_FIRST_ID | ALWAYS_ONE))


def ids_to_pass(outputs: Sequence[int], model: Shape, version: str) -> list[int]:
    """What to give to set_eagle3_layers_to_capture, so that exactly these layer outputs are captured. Raises BadLayers."""
    if {model.architecture, model.text} & BY_FIRST_ID and version_numbers(version) >= BY_FIRST_ID_SINCE:
        if outputs[0] == 1:
            return list(outputs)
        if outputs[0] == 0:
            raise BadLayers(f"SGLang {version} cannot capture layer 0 of {model.architecture}: it would capture each layer's successor")
        return [k + 1 for k in outputs]
    return list(outputs)


def inside(outputs: Sequence[int]) -> list[int]:
    """The numbers under which SGLang itself keeps these outputs (layers_to_capture)."""
    return [k + 1 for k in outputs]
