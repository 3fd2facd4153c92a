"""Programs that measure the optimizers; nothing in the package imports them."""
