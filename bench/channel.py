"""channel.*: lookups of an engine that reaches its node over the local channel, in a process of its own.

The reference is the smallest thing that could answer at all: a process that reads a frame from a Unix socket and sends
one back, on blocking sockets, without an event loop, a message format or a cache. Clients of both are processes too.
Latencies are medians of single calls; rates count calls of all clients together.
"""
