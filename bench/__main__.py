"""`python -m bench [ONLY=glob[,glob]] [JSON=out.json] [ROUNDS=n]`: runs the figures and prints a table."""

from __future__ import annotations

import fnmatch
import importlib
import json
import pkgutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import bench
from bench.harness import FIGURES, Figure, Record, Run, measure

OPTIONS = {"ONLY": "*", "JSON": "", "ROUNDS": "7"}


def main(argv: list[str]) -> int:
    for module in pkgutil.iter_modules(bench.__path__):
        if module.name not in ("harness", "__main__"):
            importlib.import_module(f"bench.{module.name}")
    return report(argv)


def report(argv: list[str]) -> int:
    """Runs the figures that are registered and asked for; the exit status."""
    options = _options(argv)
    chosen = _choose(options["ONLY"])
    if not chosen:
        print(f"no figure matches ONLY={options['ONLY']!r}; there are: {', '.join(sorted(FIGURES))}", file=sys.stderr)
        return 2
    run = Run(rounds=int(options["ROUNDS"]))
    records: list[Record] = []
    for number, item in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {item.name}", file=sys.stderr, flush=True)
        records.append(measure(item, run))
    Console(width=140 if not sys.stdout.isatty() else None).print(_table(records))
    if options["JSON"]:
        Path(options["JSON"]).write_text(json.dumps([record.as_dict() for record in records], indent=1) + "\n")
    return 0


def _options(argv: list[str]) -> dict[str, str]:
    options = dict(OPTIONS)
    for argument in argv:
        name, found, value = argument.partition("=")
        if not found or name not in OPTIONS:
            raise SystemExit(f"bench: {argument!r} is not one of {', '.join(f'{key}=…' for key in OPTIONS)}")
        options[name] = value or OPTIONS[name]
    if not options["ROUNDS"].isdecimal() or not int(options["ROUNDS"]):
        raise SystemExit(f"bench: ROUNDS={options['ROUNDS']} is not a number of rounds, 1 or more")
    folder = Path(options["JSON"]).parent
    if not folder.is_dir():  # it is written when all is over
        raise SystemExit(f"bench: JSON={options['JSON']}: there is no folder {folder}")
    return options


def _choose(only: str) -> list[Figure]:
    patterns = only.split(",")
    return [FIGURES[name] for name in sorted(FIGURES) if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def _table(records: list[Record]) -> Table:
    table = Table(
        title="bench (ratio = value / reference, medians of interleaved runs)",
        caption="met compares with this machine as it is now, load included; docs/bench.md explains the columns",
    )
    for column, justify in (("figure", "left"), ("value", "right"), ("unit", "left"), ("reference", "right")):
        table.add_column(column, justify="right" if justify == "right" else "left", no_wrap=column != "reference")
    for column in ("ratio", "target", "met", "spread", "against", "note"):
        table.add_column(column)
    for record in records:
        met = {None: "", True: "yes", False: "NO"}[record.met]
        table.add_row(
            record.name,
            f"{record.value:.4g}",
            record.unit,
            "" if record.reference is None else f"{record.reference:.4g}",
            "" if record.ratio is None else f"{record.ratio:.3f}",
            record.target,
            met,
            f"{record.spread:.0%}",
            record.reference_name,
            record.note,
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
