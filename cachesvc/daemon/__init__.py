"""The daemon: one node for all engines of a machine, behind thin doors."""
