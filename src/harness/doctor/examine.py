"""Look at everything that a run on this machine depends on, and recommend settings."""

from pathlib import Path

from harness.doctor import gpus, machine, process_groups
from harness.doctor.report import Report
from harness.machine import choice
from harness.machine.nvml import Gpu

MOST_WORKERS = 8  # of one process; only a measurement tells the best number


def examine(output_dir: Path) -> Report:
    """Examine this machine, which takes some seconds: torch is started three times."""
    gpus_section, all_gpus, visible = gpus.gpus()
    torch_section, by_index, working = gpus.torch_on_gpus(all_gpus, visible, gpus.ask_torch())
    gloo = process_groups.gloo()
    nccl = process_groups.nccl([f"cuda:{index}" for index in working])
    cores, shared_memory = machine.cores(), machine.shared_memory()
    names = {gpu: f"cuda:{index}" for index, gpu in by_index.items()}
    disk, versions = machine.disk(output_dir), machine.versions()
    return Report(
        [gpus_section, torch_section, cores, shared_memory, disk, versions, gloo, nccl],
        {gpu: names.get(gpu, "") for gpu in choice.selectable(all_gpus)},
        recommend(
            num_visible=len(visible),
            num_gpus=len(working),
            num_busy=sum(is_busy(by_index[index]) for index in working),
            nccl_works=nccl.values["works"] is True,
            num_cores=cores.values["usable"],
            workers_can_share=not shared_memory.problems,
        ),
    )


def recommend(
    num_visible: int,
    num_gpus: int,
    num_busy: int,
    nccl_works: bool,
    num_cores: int,
    workers_can_share: bool,
) -> list[str]:
    """Settings to begin with, as words of a command.

    Of the ``num_visible`` CUDA devices torch computes on ``num_gpus``, of which others use
    ``num_busy``.
    """
    num_devices = max(1, num_gpus - num_busy) if nccl_works else 1
    # auto would try a GPU that does not work.
    alone = "gpu" if num_gpus else "cpu" if num_visible else "auto"
    words = ["strategy=ddp" if num_devices > 1 else f"strategy={alone}"]
    if num_devices < num_gpus:
        words.append("gpus=emptiest")
    # On a CPU the network itself uses the cores.
    num_workers = min(MOST_WORKERS, max(0, num_cores // num_devices - 1)) if num_gpus else 0
    return [
        *words,
        f"trainer.devices={num_devices}",
        f"data.num_workers={num_workers if workers_can_share else 0}",
        f"data.pin_memory={'true' if num_gpus else 'false'}",
    ]


def is_busy(gpu: Gpu) -> bool:
    """Whether a run has locked it, or others have allocated more than half of its memory."""
    return bool(choice.locked_by(gpu)) or gpu.free_bytes < gpu.total_bytes / 2
