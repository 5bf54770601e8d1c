"""Worker pools that make the shards of a stage: in this process, on this machine, on a cluster; same bits from each."""
