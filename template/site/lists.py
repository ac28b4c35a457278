"""Lists for the site's Markdown parser, which nests by four columns.

GitHub nests by the width of the marker: two columns for ``- ``, three for ``1. ``.
"""

import re

MARKER = re.compile(r"(?:[-*]|\d+\.) +")
RAW = re.compile(r"(?:^|\n)(?:[-*] |\d+\. |\|)[^\n]*")


def nested_by_four(text: str) -> str:
    """Return the text with the lines below an item of a list indented by four columns."""
    lines, shift, is_code = [], 0, False
    for line in text.split("\n"):
        if line.startswith("```"):
            is_code = not is_code
        if line and not line[0].isspace():
            marker = None if is_code else MARKER.match(line)
            shift = 4 - marker.end() if marker else 0
        is_inner = shift > 0 and line.startswith("  ")
        lines.append(" " * shift + line if is_inner else line)
    return "\n".join(lines)


def unread(page: str) -> list[str]:
    """Return the lines of lists and tables that the parser took for text, in a page of HTML."""
    paragraphs = re.findall(r"(?s)<p>(.*?)</p>", page)
    return [line.strip() for text in paragraphs for line in RAW.findall(text)]
