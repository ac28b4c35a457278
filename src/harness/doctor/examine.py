"""Look at everything that a run on this machine depends on."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.doctor import gpus, machine, process_groups, recommend, versions
from harness.doctor.section import Problem, Section
from harness.machine import choice
from harness.machine.nvml import Gpu

ROOT = Path(__file__).parents[3]


@dataclass
class Report:
    """What was seen.

    Attributes:
        gpus: every GPU with CUDA's name for it, ``cuda:0``; empty if CUDA does not show it.
        overrides: the settings to begin with.
    """

    sections: list[Section]
    gpus: dict[Gpu, str]
    overrides: list[str]

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


def examine(output_dir: Path, say: Callable[[str], None] = lambda _: None) -> Report:
    """Look, which takes some seconds: torch is started three times.

    Args:
        output_dir: where runs are to be written.
        say: called with what is looked at.
    """
    say("GPUs")
    found, there, shown = gpus.gpus()
    driver_section, driver = gpus.driver()
    say("torch")
    torch_section, places, working = gpus.torch_on_gpus(there, shown, driver, gpus.ask_torch())
    say("all-reduce of two processes")
    gloo = process_groups.gloo()
    nccl = process_groups.nccl([f"cuda:{index}" for index in working])
    cores, shared_memory = machine.cores(), machine.shared_memory()
    names = {gpu: f"cuda:{index}" for index, gpu in places.items()}
    return Report(
        [
            *(found, driver_section, torch_section, cores, machine.memory(), shared_memory),
            *(machine.disk(output_dir), versions.versions(ROOT), gloo, nccl),
        ],
        {gpu: names.get(gpu, "") for gpu in choice.selectable(there)},
        recommend.recommend(
            num_visible=len(shown),
            num_gpus=len(working),
            num_busy=sum(recommend.is_busy(gpu) for gpu in (places[index] for index in working)),
            nccl_works=nccl.values["works"] is True,
            num_cores=cores.values["usable"],
            workers_can_share=not shared_memory.problems,
        ),
    )
