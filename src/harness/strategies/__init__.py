"""dp and ddp2: one process drives several devices; docs/strategies.md shows how.

`node_parallel` is what both share, `parallel_forward` one call: split, copy, run, join.
"""
