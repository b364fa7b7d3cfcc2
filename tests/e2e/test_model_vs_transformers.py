"""SmolLM2 from its GGUF against transformers reading the same file: tokens, conversations, logits, and an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_plugin.engine.loading import LoadedModel, load_model
from engine_plugin.engine.tokenizer import Tokenizer
from engine_plugin.models.gguf_file import GgufFile
from tests.helpers.forwards import Bench
from tests.helpers.gguf_writer import packaged_gguf
from tests.helpers.texts import TEXTS, Message

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    pytest.mark.timeout(400),  # it reads the GGUF file in a minute on a busy machine
]

PROMPTS = [
    "The quick brown fox jumps over",
    "import os\n\ndef list_files(path):\n    return",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who every morning",
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model()


@pytest.fixture(scope="module")
def tokenizer(loaded: LoadedModel) -> Tokenizer:
    assert loaded.tokenizer is not None
    return loaded.tokenizer


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    from transformers import AutoTokenizer

    path = packaged_gguf()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def their_model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = packaged_gguf()
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # What from_pretrained(gguf_file=...) does, which asks for a package more on the way.
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied to the embedding
    model.tie_weights()
    return model


def test_ids_and_texts(tokenizer: Tokenizer, their_tokenizer: Any) -> None:
    source = Path(json.__file__).read_text(encoding="utf-8")
    for text in [*TEXTS, source]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32 and ids.tolist() == their_tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        plain = their_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == plain
    assert tokenizer.eos_token_ids == {their_tokenizer.eos_token_id}
    assert tokenizer.vocab_size == len(their_tokenizer)


def test_conversations(tokenizer: Tokenizer, their_tokenizer: Any) -> None:
    template = GgufFile(packaged_gguf()).metadata["tokenizer.chat_template"]
    for messages in (
        [Message("user", "What is the capital of France?")],
        [Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello!"), Message("user", "Bye")],
    ):
        plain = [vars(message) for message in messages]
        expected = their_tokenizer.apply_chat_template(
            plain, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.render_chat(plain) == expected
        ids = their_tokenizer(expected, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode_chat(messages).tolist() == ids
        shorter = tokenizer.render_chat(plain, add_generation_prompt=False)
        assert expected.startswith(shorter) and not shorter.endswith("assistant\n")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(loaded: LoadedModel, tokenizer: Tokenizer, their_model: Any, prompt: str) -> None:
    tokens = tokenizer.encode(prompt)
    with torch.inference_mode():
        expected = their_model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    run = Bench(loaded.model).run(tokens, range(1, len(tokens)))
    for end, logits in run.logits.items():
        assert torch.allclose(logits, expected[end - 1], atol=2e-3), f"after {end} tokens"
        assert logits.argmax() == expected[end - 1].argmax()


def test_the_capital_of_france(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    bench = Bench(loaded.model)
    table = bench.pages(100)
    tokens, start = prompt, 0
    answer: list[int] = []
    while not answer or (answer[-1] not in tokenizer.eos_token_ids and len(answer) < 40):
        logits = bench.forward((tokens, start, table))
        start += len(tokens)
        answer.append(int(logits.argmax()))
        tokens = np.array(answer[-1:], np.uint32)
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] in tokenizer.eos_token_ids
