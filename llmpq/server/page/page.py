"""The page at ``/``.

It is one file without a build step. It takes nothing from the network but this server's answers,
and its policy of content (CSP) allows no other script than its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.responses import HTMLResponse

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def _page() -> tuple[str, dict[str, str]]:
    """Return the text and the headers of the page."""
    text = resources.files(__package__).joinpath("index.html").read_text(encoding="utf-8")
    allowed = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
            for name, body in _INLINE.findall(text)
            if name == kind
        )
        for kind in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def page_response() -> HTMLResponse:
    """Return the page."""
    text, headers = _page()
    return HTMLResponse(text, headers=headers)
