"""dp and ddp2: one process drives several devices; fsdp: each has a part: docs/strategies.md.

`node_parallel` is what both share, `parallel_forward` one call: split, copy, run, join.
"""
