"""The engine in this process: continuous batching in JAX over a KV cache that sessions keep between
turns."""
