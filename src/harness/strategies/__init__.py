"""dp and ddp2: one process drives several devices.

The network's `forward` is split over the devices; the step around it runs once, on the whole
batch of the process. docs/strategies.md shows what is copied, split and summed.

    dp.py                 one process on one machine
    ddp2.py               one process per node, gradients averaged between nodes
    launchable.py         launches that cannot work, refused without torch
    node_parallel.py      what both share: when forward is split, and which misuses are refused
    parallel_forward.py   one call: split, copy, run, join
    splitting.py          split inputs by sample, join outputs by sample
    replica.py            the module on another device, with differentiable copies of its parameters
    device_threads.py     a thread per device that sees the caller's autocast, grad mode and streams
    replicable.py         which modules can be replicated, and on which devices
"""
