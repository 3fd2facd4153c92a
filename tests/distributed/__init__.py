"""Several processes at once: data-parallel and sharded training."""
