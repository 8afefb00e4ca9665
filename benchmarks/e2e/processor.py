"""The processor of a multimodal shape: SGLang makes one at its start, even where requests carry token ids alone.

It never sees a text or a picture here. The files have the form in which Qwen publishes its models that see; the
tokenizer is the small one of the tests with the tokens between which a picture stands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_fl.testing.tiny_model import END_OF_TEXT, TURN_END, train_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# Least and most pixels, of a picture and of a whole video.
IMAGE_PIXELS = {"shortest_edge": 65536, "longest_edge": 16777216}
VIDEO_PIXELS = {"shortest_edge": 4096, "longest_edge": 25165824}


def write(folder: Path, vision: dict[str, Any]) -> None:
    """Put tokenizer and processor beside ``config.json``, whose vision_config is ``vision``."""
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    patches = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
    }
    contents = {
        "tokenizer_config": {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": TURN_END, "pad_token": END_OF_TEXT},
        "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessorFast", "size": IMAGE_PIXELS, **patches},
        "video_preprocessor_config": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": VIDEO_PIXELS,
            **patches,
        },
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
