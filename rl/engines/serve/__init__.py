"""The JAX engine as an OpenAI-compatible server: `python -m rl.engines.serve --model=DIRECTORY`."""
