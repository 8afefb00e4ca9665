"""Shapes of models: one file ``shapes/NAME.json`` each, Hugging Face's config.json; no weights.

``_source`` in it says where sizes come from that are not obvious; SGLang does not read it. A multimodal shape is
written with a processor, any other without a tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.e2e import processor

FOLDER = Path(__file__).with_name("shapes")
# Architectures whose attention SGLang 0.5.11 splits over less than all ranks; that of Qwen2 it does not.
WITH_DP_ATTENTION = ("Qwen3ForCausalLM",)


def names() -> list[str]:
    """All shapes."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def vocabulary_size(name: str) -> int:
    """Number of token ids; a multimodal model's lies in its text_config."""
    config = json.loads((FOLDER / f"{name}.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def architecture(name: str) -> str:
    """SGLang's class of the model."""
    (found,) = json.loads((FOLDER / f"{name}.json").read_text())["architectures"]
    return str(found)


def has_dp_attention(name: str) -> bool:
    """Whether the model can be served with ``--enable-dp-attention``, and has been."""
    return architecture(name) in WITH_DP_ATTENTION


def write(name: str, folder: Path) -> Path:
    """Make ``folder`` a model for ``--load-format dummy``; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(FOLDER / f"{name}.json", folder / "config.json")
    vision = json.loads((folder / "config.json").read_text()).get("vision_config")
    if vision is not None:
        processor.write(folder, vision)
    return folder
