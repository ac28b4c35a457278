"""What a report of a machine consists of."""

from dataclasses import asdict, dataclass, field
from typing import Any

from harness.machine.nvml import Gpu


@dataclass
class Problem:
    """Something that is broken, and what to do about it."""

    what: str
    remedy: str


@dataclass
class Section:
    """What was found out about one thing: ``text`` for a person, ``values`` for a program."""

    name: str
    text: str
    values: Any = None
    problems: list[Problem] = field(default_factory=list)

    def broken(self, what: str, remedy: str) -> "Section":
        """Add a problem, and return this section."""
        self.problems.append(Problem(what, remedy))
        return self


@dataclass
class Report:
    """What was found out about a machine."""

    sections: list[Section]
    gpus: dict[Gpu, str]  # CUDA's name of every GPU, ``cuda:0``; empty if CUDA does not show it
    overrides: list[str]  # settings to begin with

    @property
    def problems(self) -> list[Problem]:
        """Everything that is broken."""
        return [problem for section in self.sections for problem in section.problems]

    def values(self) -> dict[str, Any]:
        """The report for a program."""
        return {
            **{section.name.lower().replace(" ", "_"): section.values for section in self.sections},
            "cuda_to_physical": {name: gpu.number for gpu, name in self.gpus.items() if name},
            "recommended": self.overrides,
            "problems": [asdict(problem) for problem in self.problems],
        }
