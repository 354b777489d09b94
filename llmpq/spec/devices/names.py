"""Device types by the names that people and drivers give them.

``NVIDIA GeForce RTX 3090`` (torch), ``rtx 3090``, ``3090`` and ``RTX3090`` are one type. Case,
spaces, hyphens, makers and words such as *Graphics* do not count, then a beginning or an end that
only one type has is enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_IGNORED = re.compile(
    r"\((?:r|tm|c)\)|[®™]|@.*$|\bw(?:/|ith ).*$|\b\d+th gen\b|\b\d+-cores?\b"
    r"|\b(?:nvidia|geforce|tesla|amd|radeon|instinct|intel|apple|ampere|platinum|blackwell"
    r"|graphics|gpu|cpu|processor|generation|edition|workstation|server)\b"
)
_SYNONYMS = {"super": "s", "gb": "g"}
_WORD = re.compile(r"[a-z]+|\d+|[^a-z\d]+")


def folded(name: str) -> str:
    """Return what of a name is compared: lower case, without separators and the maker.

    A name that consists of ignored words alone, such as ``cpu``, stays as it is.
    """
    text = name.lower()
    words = _WORD.findall(_IGNORED.sub(" ", text))
    found = "".join(_SYNONYMS.get(word, word) for word in words if word[0].isalnum())
    return found or text.strip()


def matching(name: str, types: Iterable[str], other_names: Mapping[str, str]) -> tuple[str, ...]:
    """Return the types that a name may mean, best first; one alone is the answer.

    A name is compared with whole types and ``other_names`` first, then with ends and with
    beginnings that a hyphen follows (``RTX3060`` is ``RTX3060-12G`` and not ``RTX3060Ti``), then
    with any beginnings. The first comparison that finds something decides.
    """
    wanted = folded(name)
    known = {kind: folded(kind) for kind in types}
    whole = [kind for kind, text in known.items() if text == wanted]
    whole += [kind for other, kind in other_names.items() if folded(other) == wanted]
    if whole:
        return tuple(dict.fromkeys(whole))
    parts = [
        kind for kind, text in known.items() if wanted in _beginnings(kind) or text.endswith(wanted)
    ]
    return tuple(parts or (kind for kind, text in known.items() if text.startswith(wanted)))


def _beginnings(kind: str) -> set[str]:
    """Return a type up to each of its hyphens, folded."""
    parts = kind.split("-")
    return {folded("-".join(parts[:end])) for end in range(1, len(parts))}
