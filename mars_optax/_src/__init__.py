"""The inside of mars_optax; README.md beside this file is its map. Nothing here is public."""
