"""From the pages of a package to paragraphs: web pages, Perl manuals and dictionaries.

A paragraph is a pair (text, is a heading). Code, tables and navigation are left out here; telling
prose from the rest is left to `documents`.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from scripts.demo_model.sources import Source


def raw_documents(source: Source, root: Path) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Yield (name, paragraphs) of every page of an unpacked package, in path order."""
    suffixes = {"html": (".html", ".htm"), "pod": (".pod",), "dictd": (".dict.dz",)}[source.kind]
    split = {"html": html_paragraphs, "pod": pod_paragraphs, "dictd": dictd_paragraphs}[source.kind]
    folder = root / source.folder
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or not name.endswith(suffixes) or re.search(source.skip, name):
            continue
        blob = path.read_bytes()
        page = (gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob).decode(
            "utf-8", "replace"
        )
        paragraphs = split(page)
        size = 60 if source.kind == "dictd" else max(1, len(paragraphs))
        for start in range(0, len(paragraphs), size):
            yield f"{source.package}/{name}#{start}", paragraphs[start : start + size]


def html_paragraphs(page: str) -> list[tuple[str, bool]]:
    """Split a web page into (paragraph, is a heading)."""
    parser = ProseParser()
    parser.feed(page)
    parser.close()
    parser.flush()
    return parser.paragraphs


class ProseParser(HTMLParser):
    """Collects headings and paragraphs of a page, without its code, tables and navigation."""

    SKIPPED = frozenset({"script", "style", "pre", "table", "nav", "form", "head", "header"})
    HEADINGS = frozenset({"h1", "h2", "h3", "h4"})
    LISTS = frozenset({"li", "dd", "dt", "ul", "ol", "dl"})
    BLOCKS = HEADINGS | LISTS | {"p", "div", "section", "article", "blockquote", "hr", "body"}
    CHROME = re.compile(
        r"related|sidebar|navheader|navfooter|toc\b|menu|highlight|nosearch|footer|global-nav|"
        r"versionadded|headerlink|versionmodified|\bsrc\b|fancy"
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[tuple[str, bool]] = []  # (text, is a heading)
        self._text: list[str] = []
        self._heading = False
        self._skip_tag = ""
        self._skip_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skip_depth:
            self._skip_depth += tag == self._skip_tag
            return
        names = " ".join(value or "" for key, value in attrs if key in {"class", "id", "role"})
        chrome = tag in {"div", "a", "span", "ul"} and self.CHROME.search(names)
        if tag in self.SKIPPED or chrome:
            self._skip_tag, self._skip_depth = tag, 1
        if tag in self.BLOCKS:
            self.flush()
            self._heading = tag in self.HEADINGS

    def handle_endtag(self, tag: str) -> None:
        if self._skip_depth:
            self._skip_depth -= tag == self._skip_tag
        elif tag in self.BLOCKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self._skip_depth:
            self._text.append(data)

    def flush(self) -> None:
        """End the current paragraph."""
        text = normalise("".join(self._text))
        if text:
            self.paragraphs.append((text, self._heading))
        self._text, self._heading = [], False


def pod_paragraphs(page: str) -> list[tuple[str, bool]]:
    """Split a Perl manual page into (paragraph, is a heading), without its indented code."""
    found = []
    page = re.sub(r"(?ms)^=begin\b.*?^=end\b.*?$", "", page)
    for block in re.split(r"\n\s*\n", page):
        heading = re.match(r"=head[1-4]\s+(.*)", block, re.DOTALL)
        if block[:1].isspace() or (block.startswith("=") and not heading):
            continue
        found.append(
            (normalise(_without_pod_codes(heading[1] if heading else block)), bool(heading))
        )
    return found


def _without_pod_codes(text: str) -> str:
    text = re.sub(r"[A-Z]<<+\s(.*?)\s>>+", r"\1", text, flags=re.DOTALL)
    text = text.replace("E<lt>", "\0").replace("E<gt>", "\1").replace("E<sol>", "/")
    for _ in range(4):
        text = re.sub(r"X<[^<>]*>", "", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
        text = re.sub(r"[A-Z]<([^<>]*)>", r"\1", text)
    return text.replace("\0", "<").replace("\1", ">")


def dictd_paragraphs(page: str) -> list[tuple[str, bool]]:
    """Split a dictionary into (paragraph, is a heading), headwords being the headings."""
    found = []
    for block in re.split(r"\n\s*\n", page.replace("{", "").replace("}", "")):
        first = block.strip("\n").split("\n")[0]
        is_headword = bool(first) and not first[0].isspace() and len(first) < 40
        found.append((normalise(first if is_headword else block), is_headword))
    return found


_PLAIN = str.maketrans(  # typographic quotes, spaces, marks and dashes, by code point
    {0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'", 0xA0: " ", 0xB6: "", 0x2026: "..."}
    | {0x2013: "-", 0x2014: "-"}
)


def normalise(text: str) -> str:
    """Give a paragraph plain quotes, dashes and single spaces, so the vocabulary stays small."""
    return re.sub(r"\s+", " ", text.translate(_PLAIN)).strip()
