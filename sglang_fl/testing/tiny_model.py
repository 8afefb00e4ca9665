"""Writes a small random Hugging Face model with a real tokenizer: a real server runs without a download.

``python -m sglang_fl.testing.tiny_model DIR --family qwen3`` writes config.json, generation_config.json,
model.safetensors, tokenizer.json and tokenizer_config.json in the form in which Qwen publishes its models.

The weights are random but matter: matrices are N(0, 1 / fan_in) and norm weights 1 +- 0.1, so that each
attention and each MLP adds about as much to the residual stream as it already holds, and a fault in any of
them changes the tokens. Queries and keys are half as large again, for attention that picks instead of
averaging.

Weights are stored in bfloat16: SGLang serves a bfloat16 checkpoint as it is, and turns a float32 one into
float16 unless told otherwise. bfloat16 widens to float32 without loss, so ``--dtype float32`` serves the
same model, and is what a comparison of tokens should use: the default seeds are chosen so that along the
greedy continuation of :data:`DEFAULT_PROMPTS` and of the chat turn :data:`DEFAULT_QUESTION` the best token
leads the second by at least :data:`MIN_GREEDY_GAP`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer


class Family(str, Enum):
    """Architectures that can be written; the value is Hugging Face's ``model_type``."""

    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"


ARCHITECTURES = {
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
    Family.QWEN3_MOE: "Qwen3MoeForCausalLM",
}

DEFAULT_PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "Water boils at",
    "Two ranks meet in a group and",
)
DEFAULT_QUESTION = "What is a collective?"
GREEDY_TOKENS = 32
# Tensor-parallel size 2 moved a float32 server's log probabilities by 1e-6, so this leaves four orders of magnitude.
MIN_GREEDY_GAP = 0.0135
# Found by search over some thousand seeds with the default shape; the unit test holds them to MIN_GREEDY_GAP.
DEFAULT_SEEDS = {Family.QWEN2: 42, Family.QWEN3: 90, Family.QWEN3_MOE: 454}

VOCABULARY_SIZE = 512
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_POSITIONS = 4096
# For the output rows of special tokens and byte fragments: greedy answers are readable and never stop early.
UNREADABLE_ROW_SCALE = 0.1

# Contractions, words with the character before them, single digits, punctuation, white space: as Qwen splits, whose
# tokenizer class rebuilds this from its own code and would disagree with any other pattern.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# What the tokenizer is trained on: plain sentences, long enough for VOCABULARY_SIZE tokens.
TRAINING_TEXT = """\
A machine learning model reads a text, one token after another, and answers with the token that it finds
most likely. The model is split over several devices. Each device holds a part of every matrix, computes
its part of the product, and then all of them add their parts together. That sum is called all reduce.
Gathering the parts side by side is called all gather, and sending the same data to everyone is called
broadcast. A process that takes part is a rank, and the ranks that talk to each other form a group. When
one rank does not come, the others wait for it. The capital of France is Paris, and the capital of
Germany is Berlin. The capital of Japan is Tokyo. Water boils at one hundred degrees and freezes at zero.
The sun rises in the east and sets in the west. There are seven days in a week and twelve months in a
year. Once upon a time there was a small village between the mountains and the sea. In the morning the
people went out to the fields, and in the evening they came home and told each other stories. What is the
question? Where does the answer come from? Who said that this would work? How long will it take? Hello,
my name is Robin, and I am here to help you. Please write a short letter to your friend about the
weather. def add(left, right): return left + right. for index in range(10): print(index, 2 * index, index
- 1, index / 3) The quick brown fox jumps over the lazy dog; 0 1 2 3 4 5 6 7 8 9, 10, 11, 12, 100, 1000,
2026. Thank you very much!
"""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; heads and kv_heads must divide by the tensor-parallel size that is to serve it.

    The hidden size is ``heads * head_dim``, the MLP's twice that, an expert's equal to it.
    ``experts`` and ``experts_per_token`` are read for Qwen3-MoE only.
    """

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, no multiple of kv_heads, which is {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token}, but experts is {self.experts}")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, in elements."""
        return self.heads * self.head_dim


class _Kind(Enum):
    """How elements are drawn: the mean, the deviation, and whether that is divided by sqrt(fan in)."""

    MATRIX = (0.0, 1.0, True)
    QUERY_KEY_MATRIX = (0.0, 1.5, True)
    EMBEDDING = (0.0, 1.0, False)
    NORM = (1.0, 0.1, False)
    QUERY_KEY_NORM = (1.5, 0.3, False)
    BIAS = (0.0, 0.5, False)


@dataclass(frozen=True)
class _TensorSpec:
    """One tensor of the checkpoint."""

    name: str
    size: tuple[int, ...]
    kind: _Kind


def _linear(name: str, out_features: int, in_features: int, kind: _Kind = _Kind.MATRIX) -> _TensorSpec:
    return _TensorSpec(f"{name}.weight", (out_features, in_features), kind)


def _norm(name: str, size: int, kind: _Kind = _Kind.NORM) -> _TensorSpec:
    return _TensorSpec(f"{name}.weight", (size,), kind)


def _attention_specs(prefix: str, family: Family, shape: ModelShape) -> Iterator[_TensorSpec]:
    projections = {
        "q_proj": (shape.heads, _Kind.QUERY_KEY_MATRIX),
        "k_proj": (shape.kv_heads, _Kind.QUERY_KEY_MATRIX),
        "v_proj": (shape.kv_heads, _Kind.MATRIX),
    }
    for name, (heads, kind) in projections.items():
        yield _linear(f"{prefix}.{name}", heads * shape.head_dim, shape.hidden_size, kind)
        if family is Family.QWEN2:
            yield _TensorSpec(f"{prefix}.{name}.bias", (heads * shape.head_dim,), _Kind.BIAS)
    yield _linear(f"{prefix}.o_proj", shape.hidden_size, shape.hidden_size)
    if family is not Family.QWEN2:
        yield _norm(f"{prefix}.q_norm", shape.head_dim, _Kind.QUERY_KEY_NORM)
        yield _norm(f"{prefix}.k_norm", shape.head_dim, _Kind.QUERY_KEY_NORM)


def _gated_mlp_specs(prefix: str, hidden_size: int, intermediate_size: int) -> Iterator[_TensorSpec]:
    yield _linear(f"{prefix}.gate_proj", intermediate_size, hidden_size)
    yield _linear(f"{prefix}.up_proj", intermediate_size, hidden_size)
    yield _linear(f"{prefix}.down_proj", hidden_size, intermediate_size)


def _mlp_specs(prefix: str, family: Family, shape: ModelShape) -> Iterator[_TensorSpec]:
    hidden_size = shape.hidden_size
    if family is not Family.QWEN3_MOE:
        yield from _gated_mlp_specs(prefix, hidden_size, 2 * hidden_size)
        return
    yield _linear(f"{prefix}.gate", shape.experts, hidden_size)
    for expert in range(shape.experts):
        yield from _gated_mlp_specs(f"{prefix}.experts.{expert}", hidden_size, hidden_size)


def _tensor_specs(family: Family, shape: ModelShape) -> Iterator[_TensorSpec]:
    """Every tensor of the checkpoint, under the names that Qwen's published checkpoints use."""
    hidden_size = shape.hidden_size
    yield _TensorSpec("model.embed_tokens.weight", (VOCABULARY_SIZE, hidden_size), _Kind.EMBEDDING)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield _norm(f"{prefix}.input_layernorm", hidden_size)
        yield from _attention_specs(f"{prefix}.self_attn", family, shape)
        yield _norm(f"{prefix}.post_attention_layernorm", hidden_size)
        yield from _mlp_specs(f"{prefix}.mlp", family, shape)
    yield _norm("model.norm", hidden_size)
    yield _linear("lm_head", VOCABULARY_SIZE, hidden_size)


def _draw(spec: _TensorSpec, seed: int) -> torch.Tensor:
    """Random elements that depend on the seed and the tensor's own name only; float32.

    numpy draws them: its ziggurat gives the same bits on every processor, torch's vectorised normal need not.
    """
    import numpy as np
    import torch

    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    mean, deviation, per_fan_in = spec.kind.value
    if per_fan_in:
        deviation *= float(spec.size[-1]) ** -0.5
    return torch.from_numpy(mean + deviation * generator.standard_normal(spec.size, dtype=np.float32))


def make_weights(family: Family, seed: int, shape: ModelShape, unreadable_tokens: list[int]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name, bfloat16, on the CPU.

    The rows of ``lm_head`` that belong to ``unreadable_tokens`` are scaled by UNREADABLE_ROW_SCALE.
    """
    import torch

    weights = {spec.name: _draw(spec, seed) for spec in _tensor_specs(family, shape)}
    weights["lm_head.weight"][unreadable_tokens] *= UNREADABLE_ROW_SCALE
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCABULARY_SIZE tokens, built like Qwen's and trained on TRAINING_TEXT.

    Raises RuntimeError if the text is too short for that many tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise RuntimeError(
            f"the training text gives {tokenizer.get_vocab_size()} tokens, {VOCABULARY_SIZE} are needed: "
            "lengthen TRAINING_TEXT"
        )
    return tokenizer


def _unreadable_tokens(tokenizer: Tokenizer) -> list[int]:
    """Ids of special tokens and of tokens that are no printable ASCII text, as fragments of UTF-8 are."""

    def is_readable(token_id: int) -> bool:
        text: str = tokenizer.decode([token_id], skip_special_tokens=True)
        return bool(text) and text.isascii() and text.isprintable()

    return [token_id for token_id in range(VOCABULARY_SIZE) if not is_readable(token_id)]


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def _config(family: Family, shape: ModelShape, tokenizer: Tokenizer) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family.value,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": shape.layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **_special_ids(tokenizer),
    }
    if family is not Family.QWEN2:
        config |= {"head_dim": shape.head_dim, "attention_bias": False}
    if family is Family.QWEN3_MOE:
        config |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.hidden_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tiny_model(
    folder: Path,
    family: Family | str = Family.QWEN2,
    seed: int | None = None,
    shape: ModelShape | None = None,
) -> Path:
    """Write a model into ``folder``, which is made if need be; files of the same names are replaced.

    The same family, seed, shape and library versions give the same bytes. Without a seed the family's own of
    DEFAULT_SEEDS is taken, without a shape the default ModelShape. Returns ``folder``.
    Raises ValueError for an unknown family.
    """
    from safetensors.torch import save

    family, shape = Family(family), shape or ModelShape()
    seed = DEFAULT_SEEDS[family] if seed is None else seed
    tokenizer = train_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    weights = make_weights(family, seed, shape, _unreadable_tokens(tokenizer))
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", _config(family, shape, tokenizer))
    _write_json(folder / "generation_config.json", {"do_sample": False, **_special_ids(tokenizer)})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    return folder


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--family", type=click.Choice([family.value for family in Family]), default="qwen2", show_default=True)
@click.option("--seed", type=int, default=None, help="Default: the family's own, chosen for clear greedy tokens.")
@click.option("--layers", default=ModelShape.layers, show_default=True)
@click.option("--heads", default=ModelShape.heads, show_default=True, help="A multiple of the tensor-parallel size.")
@click.option("--kv-heads", default=ModelShape.kv_heads, show_default=True, help="Key and value heads.")
@click.option("--head-dim", default=ModelShape.head_dim, show_default=True, help="Elements per head.")
@click.option("--experts", default=ModelShape.experts, show_default=True, help="Qwen3-MoE only.")
def main(folder: Path, family: str, seed: int | None, **sizes: int) -> None:
    """Write a small random model with a real tokenizer into FOLDER."""
    try:
        shape = ModelShape(**sizes)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    write_tiny_model(folder, family, seed, shape)
    used_seed = DEFAULT_SEEDS[Family(family)] if seed is None else seed
    click.echo(f"{folder}: {ARCHITECTURES[Family(family)]}, seed {used_seed}, {shape}")


if __name__ == "__main__":
    main()
