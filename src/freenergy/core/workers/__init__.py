"""Who makes the shards of a stage: this process, processes beside it, or a cluster. No engine changes a bit of them."""
