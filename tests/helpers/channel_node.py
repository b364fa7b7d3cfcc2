"""A node behind a local channel, as a process of its own.

    python -m tests.helpers.channel_node SOCKET [FOLDER]

With FOLDER it has a file tier there. Says "ready" on stdout, and serves until stdin ends or somebody kills it.
"""

import asyncio
import sys
from pathlib import Path

from cachesvc.daemon.channel import ChannelDoor
from cachesvc.daemon.loop import new_event_loop
from cachesvc.node.node import Node
from cachesvc.node.parts import NodeOptions
from cachesvc.node.tiers import Tier
from storage_backends.registry import open_backend


async def serve(node: Node, path: Path) -> None:
    door = ChannelDoor(node, path)
    await door.start()
    print("ready", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    while not ended.is_set():
        await asyncio.wait([asyncio.create_task(ended.wait())], timeout=0.1)
        node.tick()
    await door.stop(5.0)


def main() -> None:
    path = Path(sys.argv[1])
    tiers = []
    if len(sys.argv) > 2:
        tiers.append(Tier("file", open_backend("file", {"path": sys.argv[2], "capacity_bytes": "256 MiB"})))
    path.unlink(missing_ok=True)
    options = NodeOptions(managed_bytes=1 << 30)
    with Node(tiers, options=options) as node, asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(node, path))


if __name__ == "__main__":
    main()
