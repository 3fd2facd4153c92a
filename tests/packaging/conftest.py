"""The consumers are read by mypy: collecting doctests would import them, and run them."""

collect_ignore = ["consumer_bad.py", "consumer_good.py"]
