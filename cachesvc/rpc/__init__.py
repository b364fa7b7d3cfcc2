"""Messages of `proto/`: generated code (`make proto`), frames of a stream, and the codec to our own types."""
