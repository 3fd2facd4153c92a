"""Trainings that compare the optimizers, and what makes tables and pictures of them."""
