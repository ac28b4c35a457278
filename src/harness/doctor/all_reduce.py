"""One process of a test: the sum of a tensor over all processes.

RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
    python -m harness.doctor.all_reduce <gloo or nccl> <cpu or cuda:0>
"""

import os
import sys

import torch
from torch import distributed


def main(backend: str, name: str) -> None:
    """Add up, and compare the sum with the right one."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend)
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    summed = torch.full((2**20,), rank + 1.0, device=device)
    distributed.all_reduce(summed)
    right = num_ranks * (num_ranks + 1) / 2
    if not torch.equal(summed, torch.full_like(summed, right)):
        sys.exit(f"The sum is {summed.min():g} to {summed.max():g}, and should be {right:g}.")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main(*sys.argv[1:])
