"""Words for people."""


def counted(number: int, noun: str) -> str:
    """`1 turn`, `2 turns`, `1,024 tokens`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
