"""Structured outputs: which tokens may come next in an answer of a given form.

llguidance (extra ``structured``) compiles the form and follows the answer; it is imported on first
use. Needs no torch.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from llmpq.dist.io.detokenizer import read_tokenizer
from llmpq.dist.io.sampling_params import StructuredOutputsParams
from llmpq.dist.launch.process_environment import resident_bytes, return_freed_memory
from llmpq.errors import SpecError
from llmpq.spec.model_files.weight_headers import find_gguf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_GRAMMAR_BYTES = 1 << 20
MAX_COMPILED = 8
"""Compiled forms that are kept for further answers."""
LARGE_FORM_BYTES = 16 << 20
"""A compiled form by which the process grows more is kept only while an answer has it."""
_PANIC = "<backtrace>"
"""In messages of llguidance about a failure of its own."""
_FIELD = "structured_outputs"
_SLASHES = re.compile(r"\\.|/|\n", re.DOTALL)
_ESCAPES = {"/": r"\/", "\n": r"\n"}
_JSON_OPTIONS = {"whitespace_pattern": r"[ ]?|\r?\n[ \t]{0,64}"}
"""White space between the parts of JSON: one space, or a new line with indentation. Without a limit
the answers of some models go on with it for ever."""


@lru_cache(maxsize=16)
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
        raise _invalid(problem)
    return grammar


def _invalid(problem: str) -> SpecError:
    if _PANIC in problem:
        return SpecError(f"{_FIELD}: found a form that cannot be compiled, expected a simpler one")
    return SpecError(f"{_FIELD}: found a form that is not valid: {problem[:1000]}")


def _format_and_text(params: StructuredOutputsParams) -> tuple[str, str]:
    if params.json is not None:
        try:
            schema = json.loads(params.json)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"{_FIELD}: field 'json': found no JSON: {error}") from None
        if not isinstance(schema, dict):
            raise SpecError(f"{_FIELD}: field 'json': found {schema!r:.80}, expected an object")
        return "json", json.dumps({"x-guidance": _JSON_OPTIONS, **schema})
    if params.regex is not None:
        return "regex", params.regex
    if params.choice is not None:
        return "choice", json.dumps(params.choice, ensure_ascii=False)
    if params.grammar is not None:
        return "grammar", params.grammar
    return "json", json.dumps({"type": "object", "x-guidance": _JSON_OPTIONS})


def lark_rule(params: StructuredOutputsParams) -> str | None:
    """Return a form as the body of a rule in llguidance's Lark; ``None`` for a whole grammar.

    Raises:
        SpecError: its JSON is not valid.
    """
    name, text = _format_and_text(params)
    if name == "grammar":
        return None
    if name == "json":
        return f"%json {text}"
    if name == "regex":
        return f"/{lark_regex(text)}/"
    return " | ".join(json.dumps(one, ensure_ascii=False) for one in params.choice or ())


def lark_regex(text: str) -> str:
    """Return a regular expression as it stands between slashes in Lark."""
    return _SLASHES.sub(lambda found: _ESCAPES.get(found[0], found[0]), text)


class GrammarCompiler:
    """Compiles forms for the tokens of a model; the tokenizer is read on first use.

    A form that several answers have, at the same time or one after the other, is compiled once.

    Args:
        model_dir: directory of the model, or its GGUF file.
        eos_token_ids: the model's end tokens.
        max_compiled: compiled forms that are kept for further answers.
    """

    def __init__(
        self, model_dir: Path, eos_token_ids: Collection[int], max_compiled: int = MAX_COMPILED
    ) -> None:
        gguf = find_gguf(model_dir)
        self._model_dir = model_dir
        self._file = (model_dir if gguf is None else gguf.parent) / "tokenizer.json"
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: Any = None
        self._max_compiled = max_compiled
        self._compiled: OrderedDict[StructuredOutputsParams, GrammarMatcher] = OrderedDict()
        self._large: WeakValueDictionary[StructuredOutputsParams, GrammarMatcher]
        self._large = WeakValueDictionary()
        self._lock = threading.Lock()  # of the compiled forms

    def compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """Return the matcher of a new answer, with its first mask computed.

        Raises:
            SpecError: the form is not valid, or the model has no fast tokenizer.
        """
        found = self.compiled(params)
        if found is not None:
            return found
        grammar = grammar_of(params)
        self.load_tokenizer()
        before = resident_bytes()
        matcher = _library().LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _invalid(matcher.get_error())
        first = GrammarMatcher(matcher)
        first.compute_mask()
        with self._lock:
            if resident_bytes() - before > LARGE_FORM_BYTES:
                self._large[params] = first
                weakref.finalize(first, return_freed_memory)
                return first.copy()
            self._compiled[params] = first
            if len(self._compiled) > self._max_compiled:
                self._compiled.popitem(last=False)
        return first.copy()

    def compiled(self, params: StructuredOutputsParams) -> GrammarMatcher | None:
        """Return the matcher of a new answer where the form has been compiled before."""
        with self._lock:
            found = self._large.get(params)
            if found is None and (found := self._compiled.get(params)) is not None:
                self._compiled.move_to_end(params)
            return None if found is None else found.copy()

    def load_tokenizer(self) -> None:
        """Read the tokenizer, unless that has been done.

        Raises:
            SpecError: the model has no tokenizer that the tokenizers library reads.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer(_library())

    def _load_tokenizer(self, library: Any) -> Any:
        try:
            text = self._file.read_text(encoding="utf-8") if self._file.is_file() else self._made()
            return library.LLTokenizer(_unpadded(text), eos_token=self._eos_token_ids or None)
        except (OSError, ValueError) as error:
            raise SpecError(
                f"{_FIELD}: {self._file.name} of the model cannot be used: {error}"
            ) from None

    def _made(self) -> str:
        """Return the ``tokenizer.json`` of a model that has its tokenizer in another form."""
        found = read_tokenizer(self._model_dir)
        if found is None:
            raise ValueError("found no tokenizer")
        return json.dumps(found["tokenizer"])


def _unpadded(text: str) -> str:
    """Return a tokenizer without padding and truncation, which are for batches of texts."""
    return json.dumps(json.loads(text) | {"padding": None, "truncation": None})


class GrammarMatcher:
    """Follows one answer through its form.

    Args:
        matcher: of llguidance.
        mask: bits of the tokens that may come next, where they are known.
        origin: that it is a copy of, which lives as long.
    """

    def __init__(
        self, matcher: Any, mask: bytes | None = None, origin: GrammarMatcher | None = None
    ) -> None:
        self._matcher = matcher
        self._mask = mask
        self._origin = origin

    @property
    def is_complete(self) -> bool:
        """Whether the form allows no further token but an end token."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> GrammarMatcher:
        """Return the matcher of another answer with the same tokens so far."""
        return GrammarMatcher(self._matcher.deep_copy(), self._mask, self._origin or self)

    def compute_mask(self) -> None:
        """Compute which tokens may come next; the first time takes longest."""
        if self._mask is None and not self._matcher.is_error():
            self._mask = self._matcher.compute_bitmask()

    def allowed(self, count: int) -> NDArray[np.bool_]:
        """Return which of ``count`` tokens may come next; none after an error."""
        import numpy as np  # noqa: PLC0415  a launcher has no use for it

        self.compute_mask()
        if self._mask is None:
            return np.zeros(count, dtype=bool)
        bits = np.frombuffer(self._mask, dtype=np.uint8)
        found = np.unpackbits(bits, bitorder="little", count=min(count, 8 * bits.size))
        return np.pad(found, (0, count - found.size)).astype(bool)

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self._mask = None
        self._matcher.consume_token(token)


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise SpecError(
            f"{_FIELD}: needs the package llguidance: pip install 'llmpq[structured]'"
        ) from None
