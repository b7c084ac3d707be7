"""The phases of a training step, in the order of `evolver.loop.iterate`."""
