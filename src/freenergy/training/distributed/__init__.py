"""Training on several processes: ranks, DDP, FSDP."""
