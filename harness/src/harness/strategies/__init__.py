"""The strategies dp and ddp2 (one process drives several devices), ddp and fsdp (sharded)."""
