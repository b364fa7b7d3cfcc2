"""The vLLM connector: KV pages of a vLLM engine in host memory and in storage, below its own prefix cache."""
