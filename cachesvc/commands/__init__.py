"""The commands of the `cachesvc` command line that belong to the node; each is `command(argv) -> exit status`."""
