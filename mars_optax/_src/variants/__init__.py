"""One instantiation of MARS per file: its state, its step, its transformation, its optimizer."""
