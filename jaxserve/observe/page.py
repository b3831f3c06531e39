"""Assembles the pages that are one document: their HTML with style and script inline.

The live page of a server (`server/http/live.py`) and a written timeline (`timeline_view.py`) share
the style (`page.css`) and the drawing of timelines (`page_timeline.js`) beside this file.
"""

from collections.abc import Sequence
from pathlib import Path

SHARED = Path(__file__).parent


def assembled(html: Path, scripts: Sequence[Path]) -> bytes:
    """Returns a page with its style and script in place of its first empty `<style>` and
    `<script>`.

    Args:
      scripts: parts of the script, in order.
    """
    page = html.read_bytes()
    style = (SHARED / "page.css").read_bytes()
    script = b"\n".join(part.read_bytes() for part in scripts)
    for tag, text in ((b"style", style), (b"script", script)):
        page = page.replace(b"<%b></%b>" % (tag, tag), b"<%b>\n%b</%b>" % (tag, text, tag), 1)
    return page
