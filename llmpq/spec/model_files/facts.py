"""What the files of a model say, each with where it stands, and where they contradict each other.

Every fact is read by the function with which planner, runtime and server read it, so that nothing
here can be another opinion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.families import family_of, find_mtp
from llmpq.spec.fields import read_json
from llmpq.spec.huggingface.config import POSITIONS, SCALING, rotations, scaled_positions
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.huggingface.quantization import FIELD, find_config
from llmpq.spec.model import ModelSpec
from llmpq.spec.model_files.config import CONFIG_FILE, language_fields, model_fields, stored_weights
from llmpq.spec.model_files.tokenizer import (
    chat_templates,
    end_tokens,
    tokenizer_arguments,
    tokenizer_files,
)
from llmpq.spec.model_files.weight_headers import find_gguf, find_weights, read_gguf_header
from llmpq.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that the files of a model say.

    Attributes:
        name: of what.
        value: what is believed.
        source: file, and its field, or what it follows from.
        contradiction: what another place says, ``None`` where all agree.
    """

    name: str
    value: str
    source: str
    contradiction: str | None = None


def model_facts(model: Path | str) -> tuple[Fact, ...]:
    """Return what the files of a model say.

    Args:
        model: directory of the model, or its GGUF file.

    Raises:
        SpecError: as :func:`llmpq.spec.huggingface.families.load_model_dir`, or a file of the
            tokenizer cannot be read.
    """
    path = Path(model)
    spec, gguf = load_model_dir(path), find_gguf(path)
    stated = {} if gguf is not None else read_json(path / CONFIG_FILE, allows_constants=True)
    files = _Files(
        path=path,
        gguf=gguf,
        spec=spec,
        fields=language_fields(model_fields(path)),
        stated=language_fields(stated),
    )
    return tuple(files.facts())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The files of a model.

    Attributes:
        path: of the model.
        gguf: its GGUF file, if it is one.
        spec: the sizes.
        fields: of the configuration as they are believed.
        stated: the same as the file states them; empty for a GGUF file.
    """

    path: Path
    gguf: Path | None
    spec: ModelSpec
    fields: Mapping[str, Any]
    stated: Mapping[str, Any]

    def facts(self) -> Iterator[Fact]:
        """Yield what the files say."""
        yield self._weights()
        yield Fact(name="family", value=self.spec.family, source=self._place("model_type"))
        yield Fact(name="layers", value=_layers(self.spec), source=self._where)
        yield self._dtype()
        yield self._head()
        yield self._context()
        yield from self._rotations()
        yield from self._quantization()
        yield from self._drafts()
        yield self._tokenizer()
        yield from self._end_tokens()
        yield self._template()

    @property
    def _where(self) -> str:
        return CONFIG_FILE if self.gguf is None else self.gguf.name

    def _place(self, field: str) -> str:
        """Return the place of a field of the configuration; a GGUF file has other names."""
        return f"{CONFIG_FILE}: {field}" if self.gguf is None else self.gguf.name

    def _weights(self) -> Fact:
        if self.gguf is not None:
            size = format_bytes(self.gguf.stat().st_size)
            return Fact(name="weights", value=f"GGUF, {size}", source=self.gguf.name)
        try:
            names = find_weights(self.path).names
        except SpecError:  # a plan needs no weights
            return _none("weights")
        size = format_bytes(sum((self.path / name).stat().st_size for name in names))
        source = names[0] if len(names) == 1 else f"{len(names)} files"
        return Fact(name="weights", value=f"safetensors, {size}", source=source)

    def _dtype(self) -> Fact:
        stored, dtype = stored_weights(self.path), self.spec.dtype
        of_weights = None if stored is None else stored.dtype
        field = next((one for one in ("dtype", "torch_dtype") if self.stated.get(one)), None)
        if field is None:
            source = "most weights" if self.gguf is not None or of_weights else "usual"
            return Fact(name="dtype", value=dtype, source=source)
        differs = of_weights not in (None, dtype)
        return Fact(
            name="dtype",
            value=dtype,
            source=self._place(field),
            contradiction=f"most weights are {of_weights}" if differs else None,
        )

    def _head(self) -> Fact:
        is_tied = self.fields.get("tie_word_embeddings")
        # Without the field, the class decides; a stored head that differs was believed already.
        value = "the embedding" if is_tied or is_tied is None else "its own"
        stated = self.stated.get("tie_word_embeddings")
        if self.gguf is not None or (stated is not False and is_tied is False):
            contradiction = "tie_word_embeddings is true" if stated else None
            return Fact(
                name="head", value=value, source="stored weights", contradiction=contradiction
            )
        source = "default of the family" if stated is None else self._place("tie_word_embeddings")
        return Fact(name="head", value=value, source=source)

    def _context(self) -> Fact:
        longest = self.spec.max_positions
        value = "unlimited" if longest is None else f"{longest:,} tokens"
        field = next((one for one in POSITIONS if self.fields.get(one) is not None), None)
        stated = None if field is None else self.fields[field]
        if longest is not None and longest == _yarn(self.fields) and longest != stated:
            other = None if stated is None else f"{field} is {stated:,}"
            return Fact(
                name="context",
                value=value,
                source=self._place("rope_parameters, YaRN"),
                contradiction=other,
            )
        source = "default of the family" if field is None else self._place(field)
        return Fact(name="context", value=value, source=source)

    def _rotations(self) -> Iterator[Fact]:
        stated = next((one for one in SCALING[:2] if self.fields.get(one)), None)
        found = []
        for part in rotations(self.fields):
            kind = part.get("rope_type") or part.get("type") or "default"
            base = part.get("rope_theta") or self.fields.get("rope_theta")
            factor = part.get("factor")
            more = [f"base {base:,g}"] if isinstance(base, int | float) else []
            more += [f"factor {factor:g}"] if isinstance(factor, int | float) else []
            found.append(", ".join([str(kind), *more]))
        if found:
            value = "; ".join(dict.fromkeys(found))
            yield Fact(name="rotation", value=value, source=self._place(str(stated)))

    def _quantization(self) -> Iterator[Fact]:
        found = find_config(self.path)
        if found is None:
            return
        value = str(found.get("packing_format") or found.get("quant_method"))
        bits = found.get("bits", found.get("num_bits"))
        value += f", {bits} bits" if isinstance(bits, int) else ""
        yield Fact(name="quantization", value=value, source=self._place(FIELD))

    def _drafts(self) -> Iterator[Fact]:
        tensor = stored_mtp(self.path, self.spec)
        if tensor is not None:
            value = "a layer for multi-token prediction (method mtp)"
            yield Fact(name="drafts", value=value, source=tensor)

    def _tokenizer(self) -> Fact:
        if tokenizer_arguments(self.path) is None:
            return _none("tokenizer")
        files = tokenizer_files(self.path)
        source = files[0].name if files else self._where
        return Fact(name="tokenizer", value="there", source=source)

    def _end_tokens(self) -> Iterator[Fact]:
        believed, others = end_tokens(self.path, self.fields.get("eos_token_id"))
        numbers = sorted(set().union(*believed.values()))
        if not numbers:
            yield _none("end tokens")
            return
        differing = [
            f"{place} says {_numbers(found)}"
            for place, found in others.items()
            if not found <= set(numbers)
        ]
        yield Fact(
            name="end tokens",
            value=_numbers(numbers),
            source=", ".join(place for place, found in believed.items() if found),
            contradiction="; ".join(differing) or None,
        )

    def _template(self) -> Fact:
        found = chat_templates(self.path)
        if not found:
            return _none("chat template")
        (place, text), *others = found.items()
        differing = [other for other, one in others if one != text]
        return Fact(
            name="chat template",
            value=f"{len(text):,} characters",
            source=place,
            contradiction=f"another in {', '.join(differing)}" if differing else None,
        )


def stored_mtp(model: Path, spec: ModelSpec) -> str | None:
    """Return a tensor of the layer for multi-token prediction, ``None`` where none is stored.

    Args:
        model: directory of the model, or its GGUF file.
        spec: its sizes.
    """
    gguf = find_gguf(model)
    if gguf is not None:
        names: Iterable[str] = read_gguf_header(gguf).tensors
    else:
        stored = stored_weights(model)
        names = () if stored is None else stored.names
    found = find_mtp(family_of(spec.family), spec.num_layers, names)
    return None if found is None else f"{found[0]}{found[1].projection}.weight"


def _none(name: str) -> Fact:
    return Fact(name=name, value="none", source="no file")


def _yarn(fields: Mapping[str, Any]) -> int | None:
    return scaled_positions({name: fields.get(name) for name in SCALING})


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def _layers(spec: ModelSpec) -> str:
    """Return how many layers of each kind a model has."""
    kinds: Counter[str] = Counter()
    for kind in spec.layer_kinds:
        layer = spec.layer_types[kind]
        if layer.state_values:
            beside = " and full attention" if layer.num_heads else ""
            kinds[f"with a recurrent state{beside}"] += 1
        elif layer.sliding_window is not None:
            kinds[f"with a window of {layer.sliding_window:,} tokens"] += 1
        else:
            kinds["with full attention"] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())
