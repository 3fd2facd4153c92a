"""What a step costs: its time, its bytes, its collectives."""
