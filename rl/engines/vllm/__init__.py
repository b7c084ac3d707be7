"""The engine on vLLM servers: start them, send requests, and transfer new weights.

`vllm_plugin/` runs under vLLM's own interpreter, which finds it through PYTHONPATH; nothing in this
project imports it.
"""
