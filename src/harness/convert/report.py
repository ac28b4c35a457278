"""What a conversion did, for people and for programs."""

from collections import Counter
from dataclasses import dataclass, field


def printable(text: str) -> str:
    """Return the text in one line, with what a terminal would obey escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Entry:
    """One tensor of the result, and its name in the source."""

    source: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Report:
    """What was taken, renamed, dropped and verified; `str` says it in a few lines.

    Args:
        source: the checkpoint.
        output: the new file.
        kind: the source's format.
        key: the entry of the source that held the weights.
        tensors: by their new names.
        num_bytes: of the tensors that are taken, as they are in the source.
        dropped: what else the source held.
        verified: what the result was compared with; empty if it was not.
        notes: what a user should know besides.
        is_written: False for a dry run.
    """

    source: str
    output: str
    kind: str
    key: str
    tensors: dict[str, Entry]
    num_bytes: int
    dropped: list[str]
    verified: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_written: bool = False

    def __str__(self) -> str:
        types = Counter(entry.dtype for entry in self.tensors.values())
        counts = ", ".join(f"{num} {dtype}" for dtype, num in types.items())
        renamed = [f"{e.source} -> {new}" for new, e in self.tensors.items() if e.source != new]
        lines = {
            "took": f"{counts}, {self.num_bytes / 1e6:,.1f} MB, from {self.key} ({self.kind})",
            "renamed": f"{len(renamed)}, such as {renamed[0]}" if renamed else "nothing",
            "dropped": ", ".join(self.dropped) or "nothing",
            "verified": ", ".join(self.verified) or "nothing",
            "note": "; ".join(self.notes),
            "wrote" if self.is_written else "would be": self.output,
        }
        width = max(map(len, lines))
        return "\n".join(
            [
                self.source,
                *(f"  {n:{width}}  {printable(text)}" for n, text in lines.items() if text),
            ]
        )
