"""dp and ddp2: one process drives several devices; fsdp: each has a part: docs/devices.md."""
