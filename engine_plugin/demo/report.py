"""The result for people: a table, the first turns after the restart, and a bar chart. At most 100 columns wide."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine_plugin.demo.play import RunResult
from engine_plugin.demo.results import (
    DemoResult,
    by_turn_s,
    cached_sum,
    first_difference,
    first_turns,
    num_equal,
    percentile_s,
)
from engine_plugin.wording import counted

MAX_WIDTH = 100
MIN_WIDTH = 80
RUN_STYLES = ("yellow", "green", "cyan")
_BAR_CELLS = 44
_GAP = 2  # columns between those of the first turns' table
_LEAST_FACTOR = 1.05  # less would be shown as 1.0
_PARTS = " ▏▎▍▌▋▊▉"  # eighths of a cell


def report(result: DemoResult, *, ascii_only: bool, width: int = MAX_WIDTH) -> RenderableType:
    """Everything below the progress bars, for a console of `width` columns, at least MIN_WIDTH."""
    return Group(
        "",
        summary_table(result),
        first_turns_table(result, width),
        "",
        ttft_chart(result.runs, ascii_only=ascii_only),
        verdict(result),
    )


def summary_table(result: DemoResult) -> Table:
    """One column per run; times, tokens by source, bytes per tier, equality."""
    runs = result.runs
    table = _table(f"The same {counted(len(runs[0].turns), 'request')}, three times")
    table.add_column("")
    for index, run in enumerate(runs):
        table.add_column(run.name, justify="right", style=RUN_STYLES[index % len(RUN_STYLES)])
    for percent, label in ((50, "time to first token, p50"), (95, "                     p95")):
        table.add_row(label, *(seconds(percentile_s(run.turns, percent)) for run in runs))
        table.add_row("", "", *(_factor(runs[0], run, percent) for run in runs[1:]))
    table.add_section()
    table.add_row("prompt tokens", *(f"{sum(turn.prompt_tokens for turn in run.turns):,}" for run in runs))
    sums = [cached_sum(run.turns) for run in runs]
    table.add_row("  from the device pool", *(f"{cached.device:,}" for cached in sums))
    table.add_row("  from host memory", *(f"{cached.host:,}" for cached in sums))
    table.add_row("  from storage", *(f"{cached.storage:,}" for cached in sums))
    table.add_row("  computed", *(f"{sum(turn.computed_tokens for turn in run.turns):,}" for run in runs))
    table.add_section()
    table.add_row("KV kept, device pool", *(_bytes(run.held.device) for run in runs))
    table.add_row("         host memory", *(_bytes(run.held.host) for run in runs))
    table.add_row("         storage", *(_bytes(run.held.storage) for run in runs))
    table.add_section()
    table.add_row("same output tokens", "reference", *(_equality(runs[0], run) for run in runs[1:]))
    table.add_row("time to play", *(seconds(run.played_s) for run in runs))
    return table


def first_turns_table(result: DemoResult, width: int) -> Table:
    """How each session's first turn fared in the first run and after the restart, when only storage remembered it.

    Names of sessions get the columns that the numbers leave.
    """
    headers = ("prompt", "device", "host", "storage", "computed", "first token", "no tiers")
    styles = ("", "", "", "", "", RUN_STYLES[2], RUN_STYLES[0])
    rows = []
    for before, after in zip(first_turns(result.runs[0]), first_turns(result.runs[-1]), strict=True):
        cached = after.cached
        counts = (after.prompt_tokens, cached.device, cached.host, cached.storage, after.computed_tokens)
        name = f"{after.session + 1} {result.plan.sessions[after.session].name}"
        rows.append((name, *(f"{count:,}" for count in counts), seconds(after.ttft_s), seconds(before.ttft_s)))
    taken = sum(max(map(len, cells)) for cells in zip(headers, *(row[1:] for row in rows), strict=True))
    left = max(width, MIN_WIDTH) - taken - _GAP * len(headers)
    table = Table(
        title="First turns after the restart: only storage remembers them",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    table.add_column("session", overflow="ellipsis", no_wrap=True, max_width=min(30, left))
    for header, style in zip(headers, styles, strict=True):
        table.add_column(header, justify="right", no_wrap=True, style=style)
    for row in rows:
        table.add_row(*row)
    return table


def ttft_chart(runs: Sequence[RunResult], *, ascii_only: bool) -> RenderableType:
    """Bars of the median time to first token, turn by turn, one bar per run, on one linear scale from zero."""
    values = [by_turn_s(run) for run in runs]
    longest = max(max(times) for times in values)
    grid = Table.grid(padding=(0, 1))
    for turn in range(len(values[0])):
        for index, run in enumerate(runs):
            style = RUN_STYLES[index % len(RUN_STYLES)]
            label = f"turn {turn + 1}" if index == 0 else ""
            bar = Text(bar_of(values[index][turn] / longest, ascii_only=ascii_only), style=style)
            grid.add_row(label, Text(run.name, style=style), bar, seconds(values[index][turn]))
        grid.add_row()
    return Group(Text("Time to first token by turn, median of the sessions", style="bold"), grid)


def bar_of(share: float, *, ascii_only: bool, cells: int = _BAR_CELLS) -> str:
    """A bar of `share` (0 to 1) of `cells`, to an eighth of a cell; never empty, so that the least is seen too."""
    eighths = max(1, round(share * cells * 8))
    if ascii_only:
        return "#" * max(1, round(eighths / 8))
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def verdict(result: DemoResult) -> RenderableType:
    """The last lines: is the output the same, how long did it take."""
    lines = [Text(f"DIFFERENT OUTPUT: {difference}", style="bold red") for difference in result.differences]
    if not lines:
        turns = len(result.runs[0].turns)
        answers = f"All {turns} answers are" if turns > 1 else "The answer is"
        lines = [Text(f"{answers} the same tokens in all {len(result.runs)} runs.", style="bold green")]
    setup = ", ".join(f"{what} {spent:.1f} s" for what, spent in result.setup_s.items())
    lines.append(Text(f"Three runs: {result.demo_s:.1f} s, engine starts and stops included."))
    lines.append(Text(f"Set-up before them: {sum(result.setup_s.values()):.1f} s ({setup})."))
    return Group(*lines)


def seconds(value: float) -> str:
    """A time with three significant digits, in s or ms."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def console_for(*, stderr: bool = False) -> Console:
    """A console no wider than the report is meant for; 100 columns where nobody says how wide it is."""
    console = Console(stderr=stderr, highlight=False)
    console.width = min(console.width, MAX_WIDTH) if console.is_terminal else MAX_WIDTH
    return console


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def _factor(reference: RunResult, run: RunResult, percent: float) -> str:
    factor = percentile_s(reference.turns, percent) / percentile_s(run.turns, percent)
    if 1 / _LEAST_FACTOR < factor < _LEAST_FACTOR:
        return "as soon"
    return f"{factor:.1f}x sooner" if factor >= 1 else f"{1 / factor:.1f}x later"


def _equality(reference: RunResult, run: RunResult) -> str:
    turns = len(run.turns)
    return f"{num_equal(reference, run)} of {turns}" if first_difference(reference, run) else f"all {turns}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.0f} MB"
