"""Which sources the native core was built from: a core of other sources is told at its import, not by odd errors later.

The build runs this file (`sources.py FOLDER FILE.cpp`) and compiles the digest in. Where the sources are not beside the
package, as in an installed wheel, the two came together and nothing is compared. Nothing of ours may be imported here.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "host"


def digest_of(folder: Path) -> str:
    """Of the names and contents of all C++ sources in it, in hex."""
    whole = hashlib.sha256()
    for path in sorted((*folder.glob("*.cpp"), *folder.glob("*.hpp"))):
        content = path.read_bytes()
        whole.update(f"{path.name} {len(content)}\n".encode() + content)
    return whole.hexdigest()


def check_built_from(built_from: str, folder: Path = SOURCES) -> None:
    """ImportError: the sources that are there are not those of the core."""
    if (folder / "bindings.cpp").exists() and digest_of(folder) != built_from:
        raise ImportError(f"the native core is of another version than {folder}: run make build")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        '#include "source_digest.hpp"\n'
        f'const char* const cachesvc::source_digest = "{digest_of(Path(sys.argv[1]))}";\n',
        encoding="utf-8",
    )
