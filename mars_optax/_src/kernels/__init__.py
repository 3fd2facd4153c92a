"""How an elementwise function is executed on many leaves: by XLA, or by Pallas kernels."""
