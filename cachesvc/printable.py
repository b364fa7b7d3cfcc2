"""Names that come from outside, made fit for one line of a log or a table."""


def printable(text: str) -> str:
    """`text` with a question mark for whatever would move a cursor, start a line or change a colour."""
    return "".join(character if character.isprintable() else "?" for character in text)
