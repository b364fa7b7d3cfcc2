"""Generates `cachesvc/rpc/` from the .proto files beside this one: `make proto`. `--check`: only tells what differs.

Needs grpcio-tools 1.80.0, whose output imports on protobuf 6.33 and 7 alike; newer ones emit code that 6.33 refuses.
The package is `cachesvc.v1` on the wire and `cachesvc.rpc` in Python.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "proto"
TARGET = ROOT / "cachesvc" / "rpc"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def main(argv: list[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        texts = generate(Path(scratch))
    present = {path.name: path.read_text() for pattern in GENERATED for path in TARGET.glob(pattern)}
    different = sorted(name for name in texts.keys() | present.keys() if texts.get(name) != present.get(name))
    if "--check" in argv:
        for name in different:
            print(f"cachesvc/rpc/{name} is not what proto/ generates; run `make proto`", file=sys.stderr)
        return 1 if different else 0
    for name in different:
        if name in texts:
            (TARGET / name).write_text(texts[name])
        else:
            (TARGET / name).unlink()
    return 0


def generate(scratch: Path) -> dict[str, str]:
    """Every generated file by name."""
    files = sorted(SOURCES.rglob("*.proto"))
    services = [path for path in files if "\nservice " in path.read_text()]
    run(f"--python_out={scratch}", f"--pyi_out={scratch}", files=files)
    if services:
        run(f"--grpc_python_out={scratch}", files=services)
    made = (path for pattern in GENERATED for path in scratch.rglob(pattern))
    return {path.name: path.read_text().replace("from cachesvc.v1 import", "from cachesvc.rpc import") for path in made}


def run(*outputs: str, files: list[Path]) -> None:
    """One call of the compiler. SystemExit: it found an error, and said so."""
    status = protoc.main(["protoc", f"-I{SOURCES}", *outputs, *map(str, files)])
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
