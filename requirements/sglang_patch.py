"""Run once with the Python of SGLang's environment: what its frozen set needs changed in an installed package.

torchvision 0.28 registers its compiled operators with torch when it is imported. Its wheel was compiled for another
build of torch than the CPU one here, so those operators are missing and the registration fails, and with it the import
that transformers and SGLang begin with. Nothing that serves text calls them. The two lines that register them are taken
out of torchvision/__init__.py; nothing else is touched, and a second run changes nothing.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

REGISTRATIONS = ("    _autograd_registrations,\n", "    _meta_registrations,\n")


def main() -> None:
    """Patches the torchvision of this environment. Exits with a message if it is not the one that is known."""
    path = Path(str(distribution("torchvision").locate_file("torchvision/__init__.py")))
    text = path.read_text()
    found = [line for line in REGISTRATIONS if line in text]
    if not found:
        return
    if len(found) != len(REGISTRATIONS):
        raise SystemExit(f"{path} is not the torchvision that this patch was written for")
    for line in REGISTRATIONS:
        text = text.replace(line, "")
    path.write_text(text)
    print(f"{path}: took out its two imports that register compiled operators")


if __name__ == "__main__":
    main()
