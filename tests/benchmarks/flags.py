"""Command lines of tests."""


def last(*flags: str) -> list[str]:
    """Keeps the last of the flags with one name: a command refuses a flag that is given twice."""
    return list({flag.partition("=")[0]: flag for flag in flags}.values())
