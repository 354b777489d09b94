"""Print a model's tokenizer as one JSON object, in a process of its own.

transformers knows all layouts of tokenizer files; processes without it start this program and read
its output. The object has ``tokenizer`` (the content of a ``tokenizer.json``), ``special_tokens``
(such as ``bos_token``) and ``chat_template``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llmpq.dist.model_listing import list_models_when_asked
from llmpq.errors import SpecError
from llmpq.spec.fields import read_json
from llmpq.spec.model_files.tokenizer import tokenizer_arguments, tokenizer_error

PROCESSOR_FILES = ("chat_template.json", "processor_config.json")


def export_tokenizer(model_dir: Path) -> dict[str, Any] | None:
    """Return tokenizer, special tokens and chat template; ``None`` for a model without.

    Raises:
        SpecError: the tokenizer cannot be read, or has no form that the tokenizers library reads.
    """
    arguments = tokenizer_arguments(model_dir)
    if arguments is None:
        return None
    from transformers import AutoTokenizer  # noqa: PLC0415  not before ``main`` keeps torch out

    try:
        tokenizer = AutoTokenizer.from_pretrained(**arguments, local_files_only=True)
    except Exception as error:  # tokenizers raise many types
        raise tokenizer_error(model_dir, error) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SpecError(
            f"{model_dir}: found a tokenizer written in Python, expected one that the tokenizers "
            "library reads"
        )
    return {
        "tokenizer": json.loads(backend.to_str()),
        "special_tokens": {
            name: str(value) for name, value in tokenizer.special_tokens_map.items()
        },
        "chat_template": tokenizer.chat_template
        or _template_of_processor(Path(arguments["pretrained_model_name_or_path"])),
    }


def _template_of_processor(folder: Path) -> Any:
    """Return the chat template of a multimodal model's processor, which tokenizers do not read."""
    for name in PROCESSOR_FILES:
        file = folder / name
        found = read_json(file) if file.is_file() else None
        if isinstance(found, dict) and found.get("chat_template"):
            return found["chat_template"]
    return None


def main(argv: list[str]) -> int:
    """Print the tokenizer of the directory ``argv[0]``."""
    folder = Path(argv[0])
    try:
        if "gguf_file" not in (tokenizer_arguments(folder) or {}):
            # Only GGUF files are read by torch, whose import takes seconds.
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        list_models_when_asked()
        json.dump(export_tokenizer(folder), sys.stdout)
    except SpecError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
