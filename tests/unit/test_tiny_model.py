"""The tiny models that servers are compared on are reproducible, well formed, sensitive to every weight."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sglang_fl.testing.tiny_model import (
    ARCHITECTURES,
    DEFAULT_PROMPTS,
    DEFAULT_QUESTION,
    GREEDY_TOKENS,
    MIN_GREEDY_GAP,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    Family,
    ModelShape,
    main,
    write_tiny_model,
)

FAMILIES = list(Family)
FIXED_PROMPT = " ".join(DEFAULT_PROMPTS)
# Root mean square change of the logits (their own is about 1) below which a weight counts as not felt.
FELT = 0.05


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.value)
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / family.value, family)


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(folder)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_seed_same_bytes_and_other_seed_other_weights(family: Family, tmp_path: Path) -> None:
    """Given a seed twice and another once, then files are equal to the byte, and only the weights differ."""
    first = _contents(write_tiny_model(tmp_path / "a", family, seed=5))
    second = _contents(write_tiny_model(tmp_path / "b", family.value, seed=5))
    other = _contents(write_tiny_model(tmp_path / "c", family, seed=6))

    assert first == second
    assert [name for name in sorted(first) if first[name] != other[name]] == ["model.safetensors"]


def test_hugging_face_reads_the_configuration(family: Family, folder: Path) -> None:
    """Given a written folder, when transformers reads it, then it is the family's own configuration class."""
    config = transformers.AutoConfig.from_pretrained(folder)
    generation = transformers.GenerationConfig.from_pretrained(folder)

    assert config.architectures == [ARCHITECTURES[family]]
    assert type(config).__name__.lower() == family.value.replace("_", "") + "config"
    assert config.dtype == torch.bfloat16
    assert (config.hidden_size, config.num_hidden_layers) == (64, 2)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert generation.eos_token_id == config.eos_token_id
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(folder / "model.safetensors").values())


def test_tokenizer_round_trips_any_text_and_knows_chat(
    folder: Path, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """Given text of several scripts, then it survives; given a chat, then turns are special tokens."""
    texts = [*DEFAULT_PROMPTS, " leading", "tabs\tand\nlines", "众智 FlagOS ñ é 😀 2026"]
    config = json.loads((folder / "config.json").read_text())

    assert isinstance(tokenizer, transformers.Qwen2Tokenizer)  # SGLang loads a generic class in three attempts
    assert len(tokenizer) == VOCABULARY_SIZE == config["vocab_size"]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    as_written = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer.encode(text) for text in texts] == [as_written.encode(text).ids for text in texts]
    assert len(tokenizer.encode("The model is split over several devices.")) < 20  # merges are used, not bytes
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(rendered)
    assert [ids.count(tokenizer.convert_tokens_to_ids(token)) for token in SPECIAL_TOKENS] == [0, 2, 1]
    assert config["eos_token_id"] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.pad_token_id == config["pad_token_id"] != config["eos_token_id"]


@torch.inference_mode()
def _logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def _tensors(model: transformers.PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight on its own: transformers stacks the experts of a layer, a checkpoint does not."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:
            yield from ((f"{name}[{index}]", part) for index, part in enumerate(parameter.detach()))
        else:
            yield name, parameter.detach()


PERTURBATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeroed": torch.zeros_like,
    # Scaling would not do: a norm behind a matrix takes the scale out again.
    "rolled": lambda tensor: tensor.roll(1, 0),
}


@pytest.mark.parametrize("perturb", PERTURBATIONS.values(), ids=PERTURBATIONS)
def test_every_single_tensor_is_felt_in_the_logits(
    perturb: Callable[[torch.Tensor], torch.Tensor],
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> None:
    """Given any one tensor of any layer, when zeroed or rolled by a row, then the logits move visibly."""
    ids = tokenizer.encode(FIXED_PROMPT)
    expected = _logits(model, ids)
    changes = {}
    for name, tensor in _tensors(model):
        original = tensor.clone()
        tensor.copy_(perturb(original))
        changes[name] = (_logits(model, ids) - expected).square().mean().sqrt().item()
        tensor.copy_(original)

    print(f"smallest changes: {sorted((round(change, 3), name) for name, change in changes.items())[:4]}")
    assert torch.equal(_logits(model, ids), expected)  # everything was put back
    assert {name: change for name, change in changes.items() if not change > FELT} == {}
    layers = model.config.num_hidden_layers
    assert len({name.split(".")[2] for name in changes if ".layers." in name}) == layers


def _prompt_ids(tokenizer: transformers.PreTrainedTokenizerBase) -> list[list[int]]:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": DEFAULT_QUESTION}], add_generation_prompt=True, tokenize=False
    )
    return [tokenizer.encode(text) for text in (*DEFAULT_PROMPTS, chat)]


def test_greedy_answers_are_varied_readable_and_clear(
    family: Family, model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """Given the default seed and prompts, then no answer is a loop and each token wins by MIN_GREEDY_GAP."""
    answers, gaps = [], []
    for ids in _prompt_ids(tokenizer):
        for _ in range(GREEDY_TOKENS):
            best = _logits(model, ids)[-1].topk(2)
            gaps.append((best.values[0] - best.values[1]).item())
            ids.append(int(best.indices[0]))
        answers.append(ids[-GREEDY_TOKENS:])

    print(f"{family.value}: smallest gap between first and second {min(gaps):.4f}")
    texts = [tokenizer.decode(answer) for answer in answers]
    assert min(gaps) > MIN_GREEDY_GAP
    assert all(len(set(answer)) >= GREEDY_TOKENS // 2 for answer in answers), texts
    assert len(set(texts)) == len(texts)
    assert all(text.isascii() and text.isprintable() for text in texts), texts
    assert not any(token in text for text in texts for token in SPECIAL_TOKENS), texts


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--family", "llama"], "qwen3_moe"),
        (["--heads", "4", "--kv-heads", "3"], "heads is 4, no multiple of kv_heads, which is 3"),
        (["--layers", "0"], "layers is 0"),
        (["--head-dim", "5"], "head_dim is 5"),
        (["--experts", "1"], "experts is 1"),
    ],
)
def test_command_line_refuses_what_cannot_be_built(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    """Given an impossible shape, then the command fails with the value that is wrong and writes nothing."""
    result = CliRunner().invoke(main, [str(tmp_path / "model"), *arguments])

    assert result.exit_code == 2
    assert complaint in result.output
    assert not (tmp_path / "model").exists()


def test_command_line_writes_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    """Given sizes for eight tensor-parallel ranks, then transformers loads a model of those sizes."""
    arguments = ["--family", "qwen3_moe", "--heads", "8", "--kv-heads", "8", "--experts", "4", "--seed", "3"]
    result = CliRunner().invoke(main, [str(tmp_path), *arguments])

    assert result.exit_code == 0, result.output
    assert "Qwen3MoeForCausalLM, seed 3" in result.output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.num_key_value_heads == 8
    assert model.config.num_experts == 4
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (128, 128)


def test_shape_refuses_more_experts_per_token_than_experts() -> None:
    """Given fewer experts than one token takes, then the error names both numbers."""
    with pytest.raises(ValueError, match="experts_per_token is 2, but experts is 1"):
        ModelShape(experts=1)
