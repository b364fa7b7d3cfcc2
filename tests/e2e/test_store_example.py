"""The example of a store client, and the code of its page in docs/, on a real daemon."""

import re
import subprocess
import sys

from tests.helpers.daemon import HANG_S, ROOT, DaemonProcess

EXAMPLE = ROOT / "examples" / "store_client" / "store_client.py"
PAGE = (ROOT / "docs" / "store-client.md").read_text()
MANAGED = ("--memory.managed-bytes", "256 MiB")


def run(home, *arguments):
    """The last line that `python ARGUMENTS` prints, in this user's world."""
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=home.path,
        env=home.environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_the_example_computes_once_also_across_a_restart_of_the_daemon(home):
    with DaemonProcess(home, *MANAGED):
        assert run(home, EXAMPLE) == "40 pages: 0 from the cache, 40 computed"
        assert run(home, EXAMPLE) == "40 pages: 40 from the cache, 0 computed"
    assert run(home, EXAMPLE) == "40 pages: 0 from the cache, 40 computed"
    with DaemonProcess(home, *MANAGED):
        assert run(home, EXAMPLE) == "40 pages: 40 from the cache, 0 computed"


def test_the_code_of_the_page_does_what_it_says(home):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    said = "\nprint((outcomes <= 1).all(), found.all(), (out == 1).all(), there.all())\n"
    with DaemonProcess(home, *MANAGED):
        assert run(home, "-c", code + said) == "True True True True"
    assert '--memory.managed-bytes "1 GiB"' in PAGE
    assert '--memory.managed-bytes "1 GiB"' in EXAMPLE.read_text()
