"""Structured outputs: which tokens may come next in an answer of a given form.

llguidance (extra ``structured``) compiles the form and follows the answer; it is imported on first
use. Needs no torch.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.dist.io.sampling_params import StructuredOutputsParams
from llmpq.errors import SpecError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_GRAMMAR_BYTES = 1 << 20
_FIELD = "structured_outputs"


@lru_cache(maxsize=256)
def grammar_of(params: StructuredOutputsParams) -> str:
    """Return a form in the notation of llguidance.

    Raises:
        SpecError: it is not valid, or too large, or the library is not installed.
    """
    library = _library()
    name, text = _format_and_text(params)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise SpecError(
            f"{_FIELD}: found {len(text)} bytes, expected at most {MAX_GRAMMAR_BYTES} bytes"
        )
    try:
        grammar: str = library.grammar_from(name, text)
        problem: str = library.LLMatcher.validate_grammar(grammar)
    except ValueError as error:
        problem, grammar = str(error), ""
    if problem and not problem.startswith("WARNING"):
        raise SpecError(f"{_FIELD}: found a form that is not valid: {problem[:1000]}")
    return grammar


def _format_and_text(params: StructuredOutputsParams) -> tuple[str, str]:
    if params.json is not None:
        try:
            schema = json.loads(params.json)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{_FIELD}: field 'json': found no JSON: {error}") from None
        if not isinstance(schema, dict):
            raise SpecError(f"{_FIELD}: field 'json': found {schema!r:.80}, expected an object")
        return "json", params.json
    if params.regex is not None:
        return "regex", params.regex
    if params.choice is not None:
        return "choice", json.dumps(params.choice, ensure_ascii=False)
    if params.grammar is not None:
        return "grammar", params.grammar
    return "json", '{"type": "object"}'


class GrammarCompiler:
    """Compiles forms for the tokens of a model; the tokenizer is read on first use.

    Args:
        model_dir: directory with ``tokenizer.json``.
        eos_token_ids: the model's end tokens.
    """

    def __init__(self, model_dir: Path, eos_token_ids: Collection[int]) -> None:
        self._file = model_dir / "tokenizer.json"
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: Any = None

    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """Return the matcher of a new answer.

        Raises:
            SpecError: the form is not valid, or the model has no fast tokenizer.
        """
        library, grammar = _library(), grammar_of(params)
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer(library)
        matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise SpecError(
                f"{_FIELD}: found a form that is not valid: {matcher.get_error()[:1000]}"
            )
        return GrammarMatcher(matcher)

    def _load_tokenizer(self, library: Any) -> Any:
        try:
            text = self._file.read_text(encoding="utf-8")
            return library.LLTokenizer(_unpadded(text), eos_token=self._eos_token_ids or None)
        except (OSError, ValueError) as error:
            raise SpecError(
                f"{_FIELD}: {self._file.name} of the model cannot be used: {error}"
            ) from None


def _unpadded(text: str) -> str:
    """Return a tokenizer without padding and truncation, which are for batches of texts."""
    return json.dumps(json.loads(text) | {"padding": None, "truncation": None})


class GrammarMatcher:
    """Follows one answer through its form.

    Args:
        matcher: of llguidance.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether the form allows no further token but an end token."""
        return bool(self._matcher.is_stopped())

    def allowed(self, count: int) -> NDArray[np.bool_]:
        """Return which of ``count`` tokens may come next; none after an error."""
        import numpy as np  # noqa: PLC0415  a launcher has no use for it

        if self._matcher.is_error():
            return np.zeros(count, dtype=bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found = np.unpackbits(bits, bitorder="little", count=min(count, 8 * bits.size))
        return np.pad(found, (0, count - found.size)).astype(bool)

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self._matcher.consume_token(token)


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise SpecError(
            f"{_FIELD}: needs the package llguidance: pip install 'llmpq[structured]'"
        ) from None
