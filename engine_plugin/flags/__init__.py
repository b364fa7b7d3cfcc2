"""`cachesvc flags ENGINE`: how to launch an engine with cachesvc. One module per engine; none of them needs it."""
