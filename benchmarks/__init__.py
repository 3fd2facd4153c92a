"""Programs that measure the optimizers; neither the package nor its tests import them."""
