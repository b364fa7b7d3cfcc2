"""The served model as the demo needs it: its tokenizer with chat template, and its context length."""

from collections.abc import Callable
from dataclasses import dataclass

from engine_plugin.demo.errors import InputError
from engine_plugin.demo.recordings import Encoder


@dataclass(frozen=True)
class ServedModel:
    """`path`: the engines' --model-path. `context_tokens`: greatest number of prompt and output tokens together."""

    path: str
    encoder: Encoder
    context_tokens: int


ModelOpener = Callable[[str | None], ServedModel]


def open_served_model(path: str | None) -> ServedModel:
    """The model that `path` names, None for the default; its weights are not read. Raises InputError."""
    from engine_plugin.engine.loading import DEFAULT_MODEL, open_model  # torch: only once it is needed

    path = DEFAULT_MODEL if path is None else path
    try:
        source = open_model(path)
    except (ValueError, OSError) as error:
        raise InputError(f"--model-path: {error}") from error
    if source.tokenizer is None or not source.tokenizer.has_chat_template:
        raise InputError(f"--model-path: {path} has no tokenizer with a chat template, which agent sessions need")
    return ServedModel(path, source.tokenizer, source.config.context_length)
