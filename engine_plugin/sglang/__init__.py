"""SGLang's HiCache on cachesvc. `sglang` is imported in storage.py and linker.py alone; the rest runs without it."""
