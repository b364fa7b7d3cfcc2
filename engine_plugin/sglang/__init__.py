"""SGLang's HiCache on cachesvc. `sglang` is imported in storage.py alone; the rest runs, and is tested, without it."""
