"""What ``prove`` says of an experiment: a verdict for each promise."""

from dataclasses import dataclass, field

HOLDS, DEFINITION, REFUSED = "holds", "by definition", "refused"
BROKEN, SKIPPED = "BROKEN", "not tried"
STRATEGIES = ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)")
OTHERS = ("resume", "resume elsewhere", "evaluation")  # promises


@dataclass(frozen=True)
class Verdict:
    """Whether one promise holds, and what there is to say."""

    promise: str
    status: str
    said: str
    why: str = ""
    line: str = ""  # to write instead

    def __str__(self) -> str:
        lines = [f"{self.promise}: {self.status}: {self.said}", self.why]
        return "\n".join([*filter(None, lines), *[f"change: {self.line}"] * bool(self.line)])


@dataclass
class Proof:
    """What holds for an experiment."""

    experiment: str
    settings: str
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_broken(self) -> bool:
        """Whether a promise is broken."""
        return any(verdict.status == BROKEN for verdict in self.verdicts)

    def verdict(self, promise: str) -> Verdict:
        """Of one promise."""
        found = [verdict for verdict in self.verdicts if verdict.promise == promise]
        return found[0] if found else Verdict(promise, SKIPPED, "not asked for")
